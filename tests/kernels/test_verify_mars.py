"""`verify.mars` and `margin_accept` are one rule: bit for bit the same verdicts, for every implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import AcceptControls, margin_accept
from mars_jax import verify
from mars_jax.controls import make_controls
from mars_jax.types import DraftTree, keys_from_seeds
from tests.kernels.implementations import compiled
from tests.kernels.test_accept import TestXla as AcceptCases


@pytest.mark.parametrize(
    ("name", "margin"), [("mosaic", "ratio"), ("reference", "gap"), ("reference", "prob_ratio")]
)
def test_greedy_verdicts_are_the_same_bits(name, margin):
    batch, depth = 6, 4
    rule = jax.jit(verify.mars(margin=margin))
    kernel = compiled(margin_accept, name, ("max_depth", "margin"))
    for seed in range(3):
        (logits, tokens, parents, _, row), _ = AcceptCases().case(seed, batch, 10, depth, 50)
        controls = make_controls(
            batch,
            limit=9,
            theta=row.theta,
            strict=row.strict,
            max_relaxed_run=row.max_relaxed_run,
            stop_tokens=row.stop_tokens,
        )
        tree = DraftTree(
            tokens=tokens, parents=parents, depths=jnp.zeros_like(tokens), max_depth=depth, is_chain=False
        )
        keys = keys_from_seeds(jnp.arange(batch, dtype=jnp.uint32))
        want = rule(keys, tree, logits, controls)
        row = AcceptControls(controls.theta, controls.strict, controls.max_relaxed_run, controls.stop_tokens)
        got = kernel(logits, tokens, parents, None, row, max_depth=depth, margin=margin)
        for field in ("path", "num_accepted", "next_token", "relaxed"):
            np.testing.assert_array_equal(getattr(got, field), getattr(want, field), err_msg=field)
