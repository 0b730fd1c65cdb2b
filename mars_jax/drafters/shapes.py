"""Shapes of drafts: chains, static trees (SpecInfer 2305.09781), dynamic trees (EAGLE-2 2406.16858)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mars_jax.core.errors import MarsError


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """A tree whose shape follows the drafter's confidence (EAGLE-2 2406.16858, section 4).

    At each of `depth` levels the `top_k` likeliest nodes, by the product of the drafter's probabilities from the
    root, get their `top_k` likeliest children; of all children `nodes` - 1 are kept, the likeliest.

    Raises:
      MarsError: a size below 1.
    """

    top_k: int = 10
    depth: int = 7
    nodes: int = 60  # the root included

    def __post_init__(self):
        if min(self.top_k, self.depth, self.nodes - 1) < 1:
            raise MarsError(f"a dynamic tree of {self}: give at least 1 child, 1 level and 2 nodes.")

    @property
    def candidates(self) -> int:
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def num_nodes(self) -> int:
        """N: `nodes`, or what there can be."""
        return min(self.nodes, self.candidates + 1)

    @property
    def rows(self) -> int:
        """Cache rows that growing it writes."""
        return (self.depth - 1) * self.top_k


@dataclasses.dataclass(frozen=True)
class Static:
    """A tree, or a chain, of a fixed shape: every node of depth l has `branching[l]` children.

    Raises:
      MarsError: a level without nodes.
    """

    branching: tuple[int, ...]

    def __post_init__(self):
        if not self.branching or min(self.branching) < 1:
            raise MarsError(
                f"a draft of shape {self.branching} has a level without nodes: give at least 1 draft token and at "
                "least 1 child at each level."
            )

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
    """The shape that a drafter's arguments name: a chain, unless `tree` says otherwise.

    Raises:
      MarsError: a level without nodes, or a node with more children than there are tokens.
    """
    if isinstance(tree, Dynamic):
        shape: Shape = tree
    else:
        shape = Static(tuple(tree) if tree is not None else (1,) * num_draft_tokens)
    if shape.top_k > vocab_size:
        raise MarsError(f"a node cannot have {shape.top_k} children in a vocabulary of {vocab_size} tokens.")
    return shape


def describe(shape: Shape, sample: bool) -> str:
    """A shape in a drafter's name."""
    if isinstance(shape, Dynamic):
        return f"dynamic {shape.top_k}-{shape.depth}-{shape.num_nodes}"
    text = str(shape.depth) if shape.is_chain else "-".join(map(str, shape.branching))
    return f"{text}, sampled" if sample else text


def check_sample(shape: Shape, sample: bool) -> None:
    """Raise MarsError for a tree that is to be sampled."""
    if sample and (isinstance(shape, Dynamic) or not shape.is_chain):
        raise MarsError(
            "sample=True drafts chains only: leave `tree` out, or draft the tree without sampling."
        )
