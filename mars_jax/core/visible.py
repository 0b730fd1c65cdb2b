"""What nodes may attend to, said without a mask. B batch, N nodes, R rows, S cache slots.

Oracle: masks made slot by slot in Python (tests/core/test_visible.py).
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jax import Array


@flax.struct.dataclass(kw_only=True)
class Visible:
    """What each of N nodes may attend to, and where the nodes' own rows are written.

    Every slot before `first` is committed, holds the token of its own position, and is seen by all nodes. Of the rows
    from slot `first` on, node i sees row r where `seen[b, i, r]`. What no node sees is never read. A kernel can work
    from this without a mask; `dense` makes the mask for everybody else.
    """

    first: Array  # i32[B]
    positions: Array  # i32[B, N]; of the nodes
    slot: Array  # i32[B]; the nodes' rows are written at slot .. slot + N - 1
    seen: Array | None = None  # bool[B, N, R]; None: R == N, and node i sees the rows 0 .. i
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
        n = self.positions.shape[1]
        slot = jnp.arange(slots, dtype=jnp.int32)
        offset = slot[None] - self.first[:, None]  # i32[B, S]: the row that each slot holds
        recent = None if window is None else self.positions - window  # i32[B, N]; seen keys are after it
        if self.seen is None and self.seen_positions is None:
            seen = offset[:, None, :] <= jnp.arange(n, dtype=jnp.int32)[None, :, None]
            # The nodes are in a row, so that every slot holds its own position.
            return seen if recent is None else seen & (slot[None, None] > recent[:, :, None])
        seen, positions = self.seen, self.seen_positions
        if seen is None:
            seen = jnp.tril(jnp.ones((n, n), bool))[None]
        if recent is not None:
            positions = self.positions if positions is None else positions
            seen = seen & (positions[:, None, :] > recent[:, :, None])
        # A product with a one-hot, not a gather: few nodes, and every platform is good at products.
        if seen.shape[2] == slots:  # then `first` is 0
            return jnp.broadcast_to(seen, (offset.shape[0], *seen.shape[1:]))
        rows = jnp.arange(seen.shape[2], dtype=jnp.int32)
        here = (offset[:, None, :] == rows[None, :, None]).astype(jnp.float32)
        seen = jnp.broadcast_to(seen, (here.shape[0], *seen.shape[1:])).astype(jnp.float32)
        inside = jnp.einsum("bnr,brs->bns", seen, here) > 0
        before = jnp.broadcast_to((offset < 0)[:, None], inside.shape)
        if recent is not None:
            before &= slot[None, None] > recent[:, :, None]
        return before | inside
