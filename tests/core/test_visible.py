"""`Visible.dense`: masks compared with their definition, slot by slot in Python, with and without windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.core.types import Visible

B, N, R, S = 3, 5, 8, 20


@pytest.mark.parametrize("window", [None, 1, 2, 4])
@pytest.mark.parametrize("rows", ["nodes", "region", "whole buffer"])
def test_a_mask_is_its_definition(rows, window):
    """Positions of tree nodes differ from their slots, and the region extends before and after the written slots."""
    rng = np.random.default_rng(4)
    count = {"nodes": N, "region": R, "whole buffer": S}[rows]
    first = np.zeros(B, int) if rows == "whole buffer" else rng.integers(0, S - R, B)
    slot = first + (2 if rows == "region" else 0)
    positions = first[:, None] + rng.integers(0, 4, (B, N))
    allowed = rng.random((B, N, count)) < 0.7
    of_rows = positions if rows == "nodes" else first[:, None] + rng.integers(0, 4, (B, count))
    visible = Visible(
        first=jnp.asarray(first, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        slot=jnp.asarray(slot, jnp.int32),
        seen=jnp.asarray(allowed),
        seen_positions=None if rows == "nodes" else jnp.asarray(of_rows, jnp.int32),
    )
    mask = np.asarray(jax.jit(lambda v: v.dense(S, window))(visible))
    for b, n, s in np.ndindex(B, N, S):
        row = s - first[b]
        key = s if row < 0 else of_rows[b, row] if row < count else None
        expected = row < 0 or (row < count and allowed[b, n, row])
        if expected and window is not None:
            expected = key > positions[b, n] - window
        assert mask[b, n, s] == expected, (b, n, s)


@pytest.mark.parametrize("window", [None, 2])
def test_tokens_in_a_row_see_what_comes_before_them(window):
    visible = Visible.causal(jnp.asarray([0, 3, 7], jnp.int32), N)
    mask = np.asarray(visible.dense(S, window))
    assert visible.positions[1].tolist() == [3, 4, 5, 6, 7]
    for b, n, s in np.ndindex(B, N, S):
        position = int(visible.positions[b, n])
        assert mask[b, n, s] == (s <= position and (window is None or s > position - window))
