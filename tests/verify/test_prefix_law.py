"""The law of the first tokens under `exact_prefix`, if the strict base decides on whole blocks."""

import functools

import numpy as np
import pytest

from mars_jax import drafters, verify
from tests.helpers import rule_oracles
from tests.helpers.sampled_siblings import SMALL, TARGET, law, sampled

CHAIN = drafters.language_model(SMALL, 3, sample=True)
LOOSE = {"relaxing": functools.partial(verify.mars, theta=2.3, margin="gap", base=verify.rejection(block=True)),
         "retargeted": functools.partial(verify.mixture, weight=0.2, block=True)}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOOSE)
def test_by_blocks_the_first_tokens_follow_the_target_and_the_next_does_not(kind):
    text, tau = sampled(CHAIN, LOOSE[kind](exact_prefix=2))
    target = rule_oracles.sequence_probabilities(law(TARGET))
    assert rule_oracles.chi_square(text[:, :2], target.sum(2)) > 1e-3
    # The third token deviates by far more than the noise of 12,000 draws.
    assert np.abs(np.bincount(text[:, 2], minlength=6) / len(text) - target.sum((0, 1))).sum() > 0.05
    assert tau > 1.3
