"""Fuzzing of output constraints (patterns, schemas, choices, spans) and of chat templates."""

import functools
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from mars_jax import constraints
from mars_jax.constraints.spans import Spans, checked_spans
from mars_jax.constraints.token_table import token_table
from mars_jax.constraints.vocabulary import Vocabulary
from mars_jax.core import fake
from mars_jax.hub.pretrained import Pretrained
from tests.fuzz.damage import HOSTILE, TEXTS, damaged, damaged_json, to_text
from tests.fuzz.harness import Surface, empty
from tests.helpers.schemas import SCHEMAS

_VOCABULARY = Vocabulary((*(bytes([b]) for b in range(256)), b"ab", b'{"', b"1234", b"true"))
_PIECES = (
    *("a", "ab", ".", r"\d", r"\w", r"\S", "[a-z]", "[^a]", r"[\d-]", "é", "\ud800", "^", "$", "|", "||", "("),
    *(")", "()", "(?:", "(?i:", "(?=a)", "(?<!a)", "(?P<n>a)", "(?P=n)", r"\1", "(?>a)", "(?#c)", "(?i)", "(?x)"),
    *("{2}", "{0,3}", "{3,1}", "{,5}", "{0}", "{1000}", "{0,1000}", "{1000000000}", "{4294967294}", "{4294967296}"),
    *("*", "+", "?", "*?", "++", "[", "]", "[]", "[^]", "[z-a]"),
    *("\\", r"\x0", r"\uD800", r"\U00110000", r"\b", r"\Z", "\0", "\n"),
)  # fmt: skip
_JOINED = st.lists(st.sampled_from(_PIECES), max_size=10).map("".join)
_LARGE = ("(" * 2000 + ")" * 2000, "a|" * 3000, "(a?){64}" * 9, "(.*a){30}", "(a|b)*a(a|b){15}", "[" * 99)
_PATTERNS = st.one_of(_JOINED, _JOINED, st.text(max_size=12), st.sampled_from(_LARGE))


def regex(case: str, folder: Path) -> None:
    """Compile a pattern, and its token table if the automaton is small."""
    automaton = constraints.regex(case).automaton
    if len(automaton.next) <= 300:
        token_table(automaton, _VOCABULARY)


def schema(case: tuple[bytes, bool], folder: Path) -> None:
    """Read a schema file."""
    path = folder / "in" / "schema.json"
    path.write_bytes(case[0])
    constraints.json_schema(path, compact=case[1])


def list_constraint(case: tuple[str, Any], folder: Path) -> None:
    """Compile a list of choices, of tokens or of spans."""
    kind, value = case
    if kind == "choice":
        token_table(constraints.choice(value).automaton, _VOCABULARY)
    elif kind == "tokens":
        constraints.tokens(value).table(_VOCABULARY)
    else:
        spans = checked_spans(value)
        if sum(map(len, spans)) < 60:
            Spans(spans).table(_VOCABULARY)


@functools.cache
def _target() -> Pretrained:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "user": 1, "hello": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    return Pretrained.from_parts(fake.hash_model(vocab_size=3), (), tokenizer, max_positions=64)


def template(case: tuple[str, list[Any]], folder: Path) -> None:
    """Render a chat template with a list of turns."""
    target = _target()
    target.tokenizer.chat_template = case[0]
    target.encode_chat(case[1])


def _read(turns: Any) -> list[Any]:
    """Return the turns as a prompts file would provide them: a list of JSON values."""
    try:
        turns = json.loads(to_text(turns))
    except (ValueError, RecursionError):
        return []
    return turns if isinstance(turns, list) else [turns]


_TEMPLATE = (
    *("{% for m in messages %}", "{% endfor %}", "{{ m.role }}", "{{ m['content'] }}", "{{ m.content | trim }}"),
    *("{% if add_generation_prompt %}", "{% endif %}", "{{ raise_exception('no') }}", "{{ messages[9].role }}"),
    *("{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}", "{% set x = namespace(a=1) %}", "{{ x.a.b }}", "{%", "%}", "{{"),
    *("{{ 'a' * 10**10 }}", "{{ range(10**9) | list }}", "{% include 'x' %}", "{{ messages | tojson }}", "hello", "é"),
    *("{{ strftime_now('%Y') }}", "{% generation %}", "{% macro f(x) %}{{ f(x) }}{% endmacro %}", "{{ f(1) }}"),
    "\ud800",
)  # fmt: skip
_TURNS = ({"role": "system", "content": "hello"}, {"role": "user", "content": "hello"})
_CONVERSATION = st.one_of(st.just(list(_TURNS)), damaged(list(_TURNS), max_edits=1).map(_read))


_LISTS = st.lists(st.one_of(st.sampled_from(TEXTS), HOSTILE, st.integers(0, 260)), max_size=4)
_SPAN = st.sampled_from(("think", "<a>...</a>", "...", "a...", "x...x", "......", "\ud800...b", *TEXTS))
SURFACES = {
    "patterns": Surface(_PATTERNS, regex, 1500),
    "schemas": Surface(st.tuples(st.one_of(*map(damaged_json, SCHEMAS)), st.booleans()), schema, 2000, empty),
    "choices, tokens and spans": Surface(
        st.one_of(
            st.tuples(st.just("choice"), _LISTS),
            st.tuples(st.just("tokens"), _LISTS),
            st.tuples(st.just("spans"), st.one_of(_SPAN, st.lists(st.one_of(_SPAN, HOSTILE), max_size=3))),
        ),
        list_constraint,
        800,
    ),
    "chat templates": Surface(
        st.tuples(st.lists(st.sampled_from(_TEMPLATE), max_size=6).map("".join), _CONVERSATION), template, 800
    ),
}
