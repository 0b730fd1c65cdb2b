"""Attention of nodes, described without a mask. B batch, N nodes, R rows, S cache slots.

Oracle: masks made slot by slot in Python (tests/core/test_visible.py).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from kernels_pallas import mask
from mars_jax.core import struct


@struct.dataclass(kw_only=True)
class Visible:
    """The slots that each of N nodes may attend to, and the slots to which the nodes' own rows are written.

    Every slot before `first` is committed, holds the token of its own position, and is seen by all nodes. Rows are
    counted from slot `first` on, and node i sees row r where `seen[b, i, r]`. A slot that no node sees is never read. A
    kernel can work from this without a mask; `dense` makes the mask for all other code.

    One token is committed, and the root of a draft has two children, which do not see each other:

    >>> seen = jnp.asarray([[[True, False, False], [True, True, False], [True, False, True]]])
    >>> slot = jnp.asarray([1], jnp.int32)
    >>> made = Visible(first=slot, positions=jnp.asarray([[1, 2, 2]], jnp.int32), slot=slot, seen=seen)
    >>> made.dense(4)[0].astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """

    first: Array  # i32[B]; slots that are committed
    positions: Array  # i32[B, N]; of the nodes
    slot: Array  # i32[B]; the nodes' rows are written at slot .. slot + N - 1
    seen: Array | None = None  # bool[B, N, R]; None: as of `causal`, R == N and node i sees the rows 0 .. i
    seen_positions: Array | None = None  # i32[B, R]; of the rows from `first` on; None: they are the nodes

    @staticmethod
    def causal(first: Array, n: int) -> Visible:
        """N tokens in a row after the committed ones: token i stands at position and slot `first + i`."""
        positions = first[:, None] + jnp.arange(n, dtype=jnp.int32)[None]
        return Visible(first=first, positions=positions, slot=first)

    def dense(self, slots: int, window: int | None = None) -> Array:
        """The attention mask bool[B, N, S] over a cache of `slots` slots.

        Args:
          slots: S.
          window: keys `window` or more positions before the query are masked; None masks none.

        >>> Visible.causal(jnp.asarray([1], jnp.int32), 2).dense(4)[0].astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 1, 0]]
        """
        inside, after = mask.region(self.seen, self.positions, self.seen_positions, window)
        return mask.dense(self.first, self.positions.shape[1], slots, inside, after)
