"""Replay, compared with a search in Python. Drafts change no token, and a new corpus compiles nothing."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mars_jax as mj
from mars_jax import contrib, drafters, hub
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.drafter import DraftInput
from mars_jax.core.types import NO_TOKEN, Params, keys_from_seeds
from mars_jax.utils.errors import MarsError
from tests.helpers.ngram_oracle import slow_lookup

SIZE, COUNT = 24, 4


def matches(text, past, longest, shortest):
    """Find the best match by brute force: return its length and the position after it."""
    for size in range(min(longest, len(text)), shortest - 1, -1):
        for end in range(len(past) - 1, size - 1, -1):
            if past[end - size : end] == text[len(text) - size :]:
                return size, end
    return 0, None


def slow_replay(text, past, count):
    size, end = matches(text, past, 6, 2)
    own_size, _ = matches(text, text, 3, 1)
    if size > own_size:
        drafted = list(itertools.takewhile(lambda token: token != NO_TOKEN, past[end:]))
        return (drafted + [NO_TOKEN] * count)[:count]
    return slow_lookup(text, count, 3, 1)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=16),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=4),
)
def test_the_longest_match_of_corpus_and_text(text, texts):
    past = contrib.corpus(texts, SIZE)
    buffer = np.full((1, 16), 1, np.int32)
    buffer[0, : len(text)] = text
    keys, controls = keys_from_seeds(jnp.arange(1)), make_controls(1, limit=16)
    length = jnp.asarray([len(text)], jnp.int32)
    draft_request = DraftInput(keys=keys, tokens=jnp.asarray(buffer), length=length, controls=controls)
    tree, _ = contrib.replay(COUNT).propose(Params((), past), (), draft_request)
    assert tree.tokens[0, 1:].tolist() == slow_replay(text, past.tolist(), COUNT)


@pytest.mark.slow
def test_an_earlier_answer_is_drafted_and_changes_nothing(tmp_path):
    target = mj.load("tiny/target", dtype="float32")
    prompts = ["Once upon a time", "The cat"]
    options = {"max_new_tokens": 40, "verify": mj.verify.exact()}
    reference = mj.generate(target, "none", prompts, **options)
    empty = drafters.LoadedDrafter(contrib.replay(8), contrib.corpus([], 512))
    first = mj.generate(target, empty, prompts, **options)
    compiled = decode.run._cache_size()
    sequences = [[*c.request.prompt_tokens, *c.tokens] for c in first.completions]
    second = mj.generate(target, empty._replace(params=contrib.corpus(sequences, 512)), prompts, **options)
    assert decode.run._cache_size() == compiled
    assert reference.tokens == first.tokens == second.tokens
    assert second.metrics.tau > 5 > first.metrics.tau
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt_tokens": c.request.prompt_tokens, "tokens": c.tokens} for c in first.completions]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = drafters.load(f"replay:{file}", target)
    assert [int(i) for i in loaded.params[-len(sequences[1]) :]] == sequences[1]
    with pytest.raises(MarsError, match="cannot be read"):
        drafters.load("replay:nowhere", target)
    with pytest.raises(MarsError, match="min_ngram is 3 and max_ngram 2"):
        contrib.replay(max_ngram=2, min_ngram=3)


@pytest.mark.parametrize("tokens", ["[1.9]", '"123"', "[true]", "[[1]]", "[" * 100_000, "{}", "[null]"])
def test_a_row_whose_tokens_are_no_whole_numbers_is_refused(tmp_path, tokens):
    file = tmp_path / "rows.jsonl"
    for name in ("tokens", "prompt_tokens"):
        file.write_text(f'{{"tokens": [1], "{name}": {tokens}}}\n')
        with pytest.raises(mj.MarsError, match=r"line 1 of '.*rows\.jsonl' is no row with tokens"):
            drafters.load(f"replay:{file}", hub.outline("tiny/target"))
