"""Patterns match the same strings as in Python's `re`."""

import random
import re

import pytest

from mars_jax import constraints
from mars_jax.constraints.automaton import automaton
from mars_jax.constraints.pattern import parse_pattern
from mars_jax.utils.errors import MarsError
from tests.helpers.automata import accepted_strings

PATTERNS = (
    r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    r"-?(0|[1-9][0-9]*)",
    r"(a|ab)(c|bcd)(d*)",
    r"[^\W\d_]+é?",
    r"(?i:straSSe|[k-m])x{2,3}",
    r".*foo.{0,3}",
    r"(?s:.*)b|(a*)*b|(c+d?)+",
    r"^日本[語人]{1,2}.$",
    r"\s*\S+\s*",
    r"[^abc\n]*?c{2}",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_re_matches(pattern):
    rng = random.Random(0)
    compiled = automaton(parse_pattern(pattern))
    letters = sorted(set("ab01c-dfoox ſKẞK\n日本語人é") | set(re.sub(r"[\\^$.|?*+(){}\[\]]", "", pattern)))
    for _ in range(1500):
        text = "".join(rng.choice(letters) for _ in range(rng.randint(0, 8)))
        assert compiled.matches(text) == bool(re.fullmatch(pattern, text)), text
    for text in accepted_strings(compiled, rng, 60):
        assert re.fullmatch(pattern, text), text
        data = text.encode()
        assert all(compiled.begins(data[:n]) for n in range(len(data) + 1))


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("a(", r"the pattern 'a\(' is not a regular expression"),
        (r"(a)\1", "refers back to a group, which no automaton can represent"),
        ("(?=a)b", "looks ahead or behind"),
        (r"a\bb", "has an anchor or a word boundary inside"),
        ("(?>a*)b", "has an atomic group"),
        ("[^\\s\\S]", "matches no text at all"),
        (".{90000}", "the constraint is too large"),
        ("\ud800", "matches no text at all"),
        ("(a|b)*a(a|b){20}", "the constraint is too large .more than 32,000 states"),
    ],
)
def test_a_pattern_that_no_automaton_reads_gets_a_sentence(pattern, sentence):
    with pytest.raises(MarsError, match=sentence):
        constraints.regex(pattern)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: constraints.choice([]), "expected a list of non-empty texts"),
        (lambda: constraints.choice("yes"), "expected a list of non-empty texts"),
        (lambda: constraints.choice(["yes", "\ud800"]), r"the text '.ud800' is not valid Unicode"),
        (lambda: constraints.tokens([-1]), "expected token ids"),
        (lambda: constraints.from_fields({"regex": "a", "choice": ["b"]}), "regex and choice are both given"),
    ],
)
def test_bad_constraints_get_a_sentence(make, sentence):
    with pytest.raises(MarsError, match=sentence):
        make()


@pytest.mark.parametrize("pattern", ["(){4000000000}a", "a(b{0}){7,}", "(()*(){2}){3000000000}a?"])
def test_a_repeat_of_nothing_is_nothing_however_often(pattern):
    compiled = constraints.regex(pattern).automaton
    assert compiled.matches("a") and not compiled.matches("aa")
