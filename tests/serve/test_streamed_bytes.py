"""Streamed text of arbitrary bytes, in both encodings of bytes as tokens. Oracle: decoding all tokens at once."""

import functools

import hypothesis.strategies as st
import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from tokenizers import decoders, models

from mars_jax.core import fake
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve.requests import Request
from mars_jax.serve.text import Detokenizer, RowText

SPECIAL = "<s>"
CHARACTERS = ["é", "€", "🙂", "\N{REPLACEMENT CHARACTER}", "a"]
"""Characters of one to four bytes."""


def byte_level():
    """Return a tokenizer that writes bytes as printable characters, like those of GPT-2, Llama 3 and Qwen."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    names = dict(zip([*visible, *hidden], map(chr, [*visible, *range(256, 256 + len(hidden))]), strict=True))
    tokens = [*(names[byte] for byte in range(256)), "\u0120cat", "dog", SPECIAL]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback():
    """Return a tokenizer with byte tokens for missing characters, like those of Llama 2 and Gemma."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581cat", "dog", SPECIAL]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    spaces, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    return tokenizer


KINDS = {"byte level": byte_level, "byte fallback": byte_fallback}
WORDS, WORD, SPECIAL_ID, SIZE = [256, 257], 257, 258, 259


@functools.cache
def pretrained(kind):
    backend = KINDS[kind]()
    backend.add_special_tokens([SPECIAL])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    return Pretrained.from_parts(fake.hash_model(vocab_size=SIZE), (), tokenizer, max_positions=64)


def bytes_of(text):
    """Return the byte tokens of a text. The id of a byte is its value in both vocabularies."""
    return list(text.encode())


RUNS = st.sampled_from(
    [*map(bytes_of, CHARACTERS), *([t] for t in (*WORDS, SPECIAL_ID, 0xFF, 0xE2, 0x82, 0xAC))]
)
TOKENS = st.lists(RUNS, max_size=8).map(lambda runs: [token for run in runs for token in run])
"""Complete characters, parts of them, invalid bytes, words and special tokens."""
PROMPTS = {"a word": [256, WORD], "an emoji in bytes": [WORD, *bytes_of("🙂€")]}
FAST = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_join_to_the_text_of_all_tokens(kind, prompt):
    target, prompt = pretrained(kind), PROMPTS[prompt]

    @FAST
    @given(TOKENS, st.sets(st.integers(0, 40)))
    @example([*bytes_of("€"), 0xFF, WORD], set())  # `tokenizers` replaces the complete character as well
    @example([*bytes_of("€"), SPECIAL_ID, 0xFF, WORD], set())  # a special token does not end a run of bytes
    @example([0xE2, 0x82], set())  # the text stops inside a character
    def check(tokens, joined_with_next):
        detokenizer = Detokenizer(target, prompt)
        pieces, chunk = [], []
        for place, token in enumerate(tokens):
            chunk.append(token)
            if place not in joined_with_next:
                pieces.append(detokenizer.feed(chunk))
                chunk = []
        pieces.append(detokenizer.feed(chunk, last=True))
        prompt_text, full_text = target.decode(prompt), target.decode([*prompt, *tokens])
        # If an invalid byte follows a prompt that ends in bytes, `tokenizers` would replace the prompt's characters.
        if not full_text.startswith(prompt_text):
            prompt_text, full_text = "", target.decode(tokens)
        assert prompt_text + "".join(pieces) == full_text

    check()


@pytest.mark.parametrize("stop", ["€", "dog", "é🙂"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_cuts_the_text_of_all_tokens(kind, stop):
    target = pretrained(kind)

    @FAST
    @given(TOKENS)
    @example([WORD, *bytes_of("€"), 0xFF])
    @example([*bytes_of("é🙂"), WORD])
    def check(tokens):
        text = RowText(target, Request(prompt_tokens=(WORD,), max_new_tokens=40, stop_strings=(stop,)))
        pieces = [text.feed([token]) for token in tokens]
        pieces.append(text.feed([], last=True))
        # The tokens end with the first one that completes the stop string.
        prefixes = [target.decode([WORD, *tokens[:n]]).removeprefix("dog") for n in range(len(tokens) + 1)]
        ends = [n for n, prefix in enumerate(prefixes) if stop in prefix]
        if ends:
            assert text.stopped and text.count == ends[0]
            assert "".join(pieces) == prefixes[ends[0]].partition(stop)[0]
        else:
            assert not text.stopped and "".join(pieces) == prefixes[-1]

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_ends_inside_a_character_adds_nothing_to_the_text(kind):
    target = pretrained(kind)
    for prompt in ([WORD, 0xE2], [WORD, 0xE2, 0x82]):
        detokenizer = Detokenizer(target, prompt)
        tokens = [0xAC, WORD]
        pieces = [detokenizer.feed([token]) for token in tokens]
        assert "".join(pieces) == target.decode(tokens) == "\N{REPLACEMENT CHARACTER}dog"
