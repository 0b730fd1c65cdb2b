"""Attention patterns of nodes, described without a dense mask.

Dimensions: B batch, N nodes, R rows, S cache slots. Tested against masks that are built slot by slot in Python
(tests/core/test_visible.py).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from kernels_pallas.tree_attention.operands import dense_mask, region
from mars_jax.core import struct


@struct.dataclass(kw_only=True)
class Visible:
    """The cache slots to which each of N nodes attends, and the slots to which the nodes' cache entries are written.

    Every slot s before `first` is committed, contains the token at position s, and is visible to all nodes. Row r is
    slot `first + r`, and node i attends to it if `seen[b, i, r]` is True. A slot that no node attends to is never read.
    Kernels use this description directly; `dense` builds the mask for other code.

    In the example, one token is cached, and the root of a draft has two children, which do not attend to each other.

    >>> seen = jnp.asarray([[[True, False, False], [True, True, False], [True, False, True]]])
    >>> slot = jnp.asarray([1], jnp.int32)
    >>> visible = Visible(first=slot, positions=jnp.asarray([[1, 2, 2]], jnp.int32), slot=slot, seen=seen)
    >>> visible.dense(4)[0].astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """

    first: Array  # i32[B]; number of committed slots before the nodes
    positions: Array  # i32[B, N]; positions of the nodes
    slot: Array  # i32[B]; the nodes' cache entries are written to slot .. slot + N - 1
    seen: Array | None = None  # bool[B, N, R]; None for R == N and causal attention to rows 0 .. i
    seen_positions: Array | None = None  # i32[B, R]; positions of rows; None if rows are the nodes
    # i32[B]; for a prompt, the number of nodes that are tokens; the nodes after them are padding. None if the nodes are
    # a draft. Only recurrent layers use this field.
    count: Array | None = None
    # i32[B, N]; index of each node's document, for rows that start at slot 0 and contain several documents, which
    # `seen` separates. None if each row is one sequence. Only recurrent layers use this field.
    documents: Array | None = None

    @staticmethod
    def causal(first: Array, n: int) -> Visible:
        """Return the causal pattern of n consecutive tokens. Token i has position and slot `first + i`."""
        positions = first[:, None] + jnp.arange(n, dtype=jnp.int32)[None]
        return Visible(first=first, positions=positions, slot=first)

    def dense(self, slots: int, window: int | None = None) -> Array:
        """Build the attention mask bool[B, N, S] for a cache.

        Args:
          slots: S, the number of slots in the cache.
          window: size of the sliding window: mask keys that are `window` or more positions before the query. None
            disables the window.

        >>> Visible.causal(jnp.asarray([1], jnp.int32), 2).dense(4)[0].astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 1, 0]]
        """
        visible_rows, last_hidden = region(self.seen, self.positions, self.seen_positions, window)
        return dense_mask(self.first, self.positions.shape[1], slots, visible_rows, last_hidden)
