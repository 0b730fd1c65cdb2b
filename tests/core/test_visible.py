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
    seen = rng.random((B, N, count)) < 0.7
    of_rows = positions if rows == "nodes" else first[:, None] + rng.integers(0, 4, (B, count))
    given = Visible(
        first=jnp.asarray(first, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        slot=jnp.asarray(slot, jnp.int32),
        seen=jnp.asarray(seen),
        seen_positions=None if rows == "nodes" else jnp.asarray(of_rows, jnp.int32),
    )
    mask = np.asarray(jax.jit(lambda visible: visible.dense(S, window))(given))
    for b, n, s in np.ndindex(B, N, S):
        row = s - first[b]
        key = s if row < 0 else of_rows[b, row] if row < count else None
        want = row < 0 or (row < count and seen[b, n, row])
        if want and window is not None:
            want = key > positions[b, n] - window
        assert mask[b, n, s] == want, (b, n, s)


@pytest.mark.parametrize("window", [None, 2])
def test_tokens_in_a_row_see_what_comes_before_them(window):
    given = Visible.causal(jnp.asarray([0, 3, 7], jnp.int32), N)
    mask = np.asarray(given.dense(S, window))
    assert given.positions[1].tolist() == [3, 4, 5, 6, 7]
    for b, n, s in np.ndindex(B, N, S):
        at = int(given.positions[b, n])
        assert mask[b, n, s] == (s <= at and (window is None or s > at - window))
