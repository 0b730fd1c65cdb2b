"""Draft shapes: chains, static trees (SpecInfer 2305.09781), dynamic trees (EAGLE-2 2406.16858)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array

from mars_jax.core.errors import MarsError, check_count, short_repr
from mars_jax.core.limits import DRAFT_TOKENS
from mars_jax.specs import Dynamic
from mars_jax.specs.drafts import check_branching


@dataclasses.dataclass(frozen=True)
class Static:
    """A chain or tree of fixed shape: every node of depth l has `branching[l]` children.

    Raises:
      MarsError: a level without nodes, or more than `TREE_NODES` nodes.
    """

    branching: tuple[int, ...]

    def __post_init__(self):
        if not self.branching or min(self.branching) < 1:
            raise MarsError(
                f"a draft of shape {self.branching} has a level without nodes: give at least 1 draft token and at "
                "least 1 child at each level."
            )
        check_branching("the draft", self.branching, self.branching)

    @property
    def is_chain(self) -> bool:
        return max(self.branching) == 1

    @property
    def depth(self) -> int:
        return len(self.branching)

    @property
    def top_k(self) -> int:
        return max(self.branching)

    @property
    def num_nodes(self) -> int:
        return 1 + int(np.sum(np.cumprod(self.branching)))

    @property
    def rows(self) -> int:
        return self.num_nodes - 1


Shape = Static | Dynamic


def shape_of(num_draft_tokens: int, tree: Sequence[int] | Dynamic | None, vocab_size: int) -> Shape:
    """Return the draft shape of a drafter's arguments: `tree`, or a chain if it is None.

    Raises:
      MarsError: a level without nodes, too many tokens or nodes, or a node with more children than there are tokens.
    """
    if tree is None:
        check_count("num_draft_tokens", num_draft_tokens, most=DRAFT_TOKENS)
        return Static((1,) * num_draft_tokens)
    tree = checked_tree(tree)
    shape = tree if isinstance(tree, Dynamic) else Static(tree)
    if shape.top_k > vocab_size:
        raise MarsError(
            f"a node cannot have {shape.top_k} children in a vocabulary of {vocab_size} tokens: give fewer."
        )
    return shape


def checked_tree(tree: Any) -> tuple[int, ...] | Dynamic:
    """Return `Dynamic`, or the number of children per node at each depth as a tuple.

    Raises:
      MarsError: another type, an empty sequence, or a number below 1.
    """
    if isinstance(tree, Dynamic):
        return tree
    sizes = tree.tolist() if isinstance(tree, np.ndarray | Array) else tree
    numbers = isinstance(sizes, list | tuple) and all(
        isinstance(n, int | np.integer) and n > 0 for n in sizes
    )
    if not numbers or not sizes:
        raise MarsError(
            f"tree is {short_repr(tree)}: expected the children per node at each depth, such as (4, 2, 2), or "
            "Dynamic(...)."
        )
    return tuple(map(int, sizes))


def describe(shape: Shape, sample: bool) -> str:
    """Return a shape as it appears in a drafter's name."""
    if isinstance(shape, Dynamic):
        text = f"dynamic {shape.top_k}-{shape.depth}-{shape.num_nodes}"
    else:
        text = str(shape.depth) if shape.is_chain else "-".join(map(str, shape.branching))
    return f"{text}, sampled" if sample else text
