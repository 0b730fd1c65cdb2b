"""Attention pattern of nodes, described without a dense mask. B batch, N nodes, R rows, S cache slots.

Oracle: masks built slot by slot in Python (tests/core/test_visible.py).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from kernels_pallas.tree_attention.operands import dense_mask, region
from mars_jax.core import struct


@struct.dataclass(kw_only=True)
class Visible:
    """The slots that each of N nodes may attend to, and the slots to which the nodes' own rows are written.

    Every slot before `first` is committed, holds the token of the same position, and is visible to all nodes. Row r is
    slot `first + r`; node i attends to it if `seen[b, i, r]`. A slot that is visible to no node is never read. Kernels
    use this form directly; `dense` builds the mask for all other code.

    In the example, one token is committed, and the root of a draft has two children, which do not attend to each other.

    >>> seen = jnp.asarray([[[True, False, False], [True, True, False], [True, False, True]]])
    >>> slot = jnp.asarray([1], jnp.int32)
    >>> visible = Visible(first=slot, positions=jnp.asarray([[1, 2, 2]], jnp.int32), slot=slot, seen=seen)
    >>> visible.dense(4)[0].astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """

    first: Array  # i32[B]; number of committed slots
    positions: Array  # i32[B, N]; positions of the nodes
    slot: Array  # i32[B]; the nodes' rows are written at slot .. slot + N - 1
    seen: Array | None = None  # bool[B, N, R]; None: causal, R == N and node i attends to rows 0 .. i
    seen_positions: Array | None = None  # i32[B, R]; positions of the rows; None: the rows are the nodes
    # i32[B]; number of leading nodes that are tokens of a prompt, the others are padding; None: the nodes are a draft.
    # Only recurrent layers use this field.
    count: Array | None = None
    # i32[B, N]; document of each node, if rows start at slot 0 and hold several documents, which `seen` separates.
    # None: a row is one sequence. Only recurrent layers use this field.
    documents: Array | None = None

    @staticmethod
    def causal(first: Array, n: int) -> Visible:
        """Describe n consecutive tokens after the committed ones: token i has position and slot `first + i`."""
        positions = first[:, None] + jnp.arange(n, dtype=jnp.int32)[None]
        return Visible(first=first, positions=positions, slot=first)

    def dense(self, slots: int, window: int | None = None) -> Array:
        """Build the attention mask bool[B, N, S] over a cache of `slots` slots.

        Args:
          slots: S.
          window: mask keys that are `window` or more positions before the query; None masks none.

        >>> Visible.causal(jnp.asarray([1], jnp.int32), 2).dense(4)[0].astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 1, 0]]
        """
        visible_rows, last_hidden = region(self.seen, self.positions, self.seen_positions, window)
        return dense_mask(self.first, self.positions.shape[1], slots, visible_rows, last_hidden)
