"""Tables over tokens: every token byte by byte, real tokenizers of each family, and spans."""

import numpy as np
import pytest

from mars_jax import constraints, hub
from mars_jax.constraints.automaton import automaton
from mars_jax.constraints.pattern import parse_pattern
from mars_jax.constraints.spans import Spans, checked_spans
from mars_jax.constraints.token_table import token_table
from mars_jax.constraints.vocabulary import Vocabulary, vocabulary
from mars_jax.utils.errors import MarsError

TEXTS = ("Once upon a time,", ' "hé" 日本\n  x', "{'a': 1.5}\t🙂 end")


@pytest.fixture(scope="module")
def words():
    target = hub.outline("tiny/target")
    return vocabulary(target.tokenizer, target.config.vocab_size)


def metaspace():
    """Return a sentencepiece vocabulary with byte tokens, like Llama's, built with the tokenizers package."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"Onceupatim", "▁time", "▁t", "im"]
    merges = [("▁", "t"), ("i", "m")]
    bpe = Tokenizer(
        models.BPE(
            {p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize("family", ["byte-level", "byte fallback"])
def test_tokens_are_the_bytes_of_their_text(family, words):
    tokenizer = metaspace() if family == "byte fallback" else hub.outline("tiny/target").tokenizer
    pieces = vocabulary(tokenizer, len(tokenizer) + 3)
    assert pieces.tokens[-3:] == (None,) * 3 and pieces.marks
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(pieces.tokens[i] or b"?" for i in ids).decode() == text
        assert b"".join(pieces.tokens[i] for i in pieces.spell(text.encode())) == text.encode()


@pytest.mark.parametrize(
    "pattern",
    [r'\{"name": "[^"\\\n]{0,12}", "age": [0-9]{1,3}\}', r"(.|\n){0,30}#### -?[0-9]{1,6}", r"[\w ]+\."],
)
def test_every_token_leads_where_its_bytes_lead(pattern, words):
    compiled = automaton(parse_pattern(pattern))
    table = token_table(compiled, words)
    states = np.arange(len(table.next))
    for token, data in enumerate(words.tokens):
        targets = states if data else np.zeros_like(states)
        for byte in data or b"":
            targets = compiled.next[targets, compiled.classes[byte]]
        assert np.array_equal(table.next[:, table.classes[token]], targets), (token, data)
    for state in np.flatnonzero(table.forced >= 0).tolist():
        # Wherever a token is forced, all allowed tokens begin alike.
        forced = words.tokens[table.forced[state]]
        allowed = [words.tokens[v] for v in np.flatnonzero(table.next[state, table.classes])]
        assert all(forced.startswith(spelling) or spelling.startswith(forced) for spelling in allowed)


def test_an_allow_list_is_the_pattern_of_its_letters(words):
    """Both allow the same tokens, accept at the same places, force no token and are never strict."""
    letters = [words.tokens.index(letter.encode()) for letter in "abc"]
    tables = constraints.tokens(letters).table(words), constraints.regex("[abc]*").table(words)
    single = [i for i, data in enumerate(words.tokens) if not data or len(data) == 1]
    for tokens in ([], letters[:1], [*letters, letters[0]]):
        allowed = []
        for table in tables:
            state = table.run(tokens)
            assert table.accepting[state] and table.forced[state] < 0 and not table.strict[state]
            allowed.append(table.allowed[state, table.classes][single])
        assert np.array_equal(*allowed)


def test_a_text_that_no_token_says_gets_a_sentence():
    words = Vocabulary(tokens=(None, b"a", b"ab"))
    assert token_table(automaton(parse_pattern("aab|c")), words).run([1, 2]) > 0
    with pytest.raises(MarsError, match="matches no text that this vocabulary's tokens can spell"):
        constraints.regex("ba").table(words)
    with pytest.raises(MarsError, match="allows the token 7, and there are 3"):
        constraints.tokens([7]).table(words)


def inside(text, opening, closing):
    """Return whether a text ends inside a span, by a search."""
    position, open_ = 0, False
    while (match := text.find(closing if open_ else opening, position)) >= 0:
        position, open_ = match + len(closing if open_ else opening), not open_
    return open_


def test_spans_are_those_that_a_search_finds(words):
    rng = np.random.default_rng(0)
    pieces = ["<think>", "</think>", "```", "`", "<", "th", "ink>", "{", "}", '"', "\\", "a ", "[", "]", "/"]
    spans = Spans(relax_in=("think", "<th...`"), strict_in=("code", "json"))
    table = spans.table(words)
    outcomes = set()
    for _ in range(200):
        text = "".join(rng.choice(pieces, 12))
        strict = table.strict[table.run(words.spell(text.encode()))]
        relaxed = inside(text, "<think>", "</think>") or inside(text, "<th", "`")
        strict_span = inside(text, "```", "```") or json_depth(text) > 0
        assert strict == (not relaxed or strict_span), text
        outcomes.add(bool(strict))
    assert outcomes == {True, False}
    with pytest.raises(MarsError, match="the span is 'thought': expected think, code"):
        checked_spans("thought")
    with pytest.raises(MarsError, match="not valid Unicode"):
        checked_spans(["think", "\ud800...b"])


def json_depth(text):
    depth, string, escape = 0, False, False
    for c in text:
        if escape:
            escape = False
        elif string:
            string, escape = c != '"', c == "\\"
        elif c in "{[":
            depth += 1
        elif c in "}]":
            depth = max(depth - 1, 0)
        elif c == '"' and depth:
            string = True
    return depth
