"""Shapes of drafts: chains, static trees (SpecInfer 2305.09781) and dynamic trees (EAGLE-2 2406.16858)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jax import Array

from mars_jax.core.drafter import Drafter
from mars_jax.utils.errors import MarsError, check_count, check_switch, did_you_mean, short_repr
from mars_jax.utils.limits import DRAFT_TOKENS, TREE_NODES


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """A tree whose shape follows the drafter's confidence (EAGLE-2 2406.16858, section 4).

    A node's score is the product of the drafter's probabilities along its path from the root. At each of `depth`
    levels, the `top_k` most probable children are drafted for each of the `top_k` nodes with the highest scores. The
    `nodes` - 1 drafted children with the highest scores are kept.

    Raises:
      MarsError: a size is too small, or there are more than `TREE_NODES` nodes.
    """

    top_k: int = 10  # number of nodes expanded at each level, and number of children drafted for each of them
    depth: int = 7  # D, number of levels below the root
    nodes: int = 60  # number of nodes to keep, including the root

    def __post_init__(self):
        for name, least in {"top_k": 1, "depth": 1, "nodes": 2}.items():
            check_count(f"{name} of a dynamic tree", getattr(self, name), least, TREE_NODES)
        # Also limit the number of expanded nodes, because it takes time to expand a node even if it is not kept.
        check_nodes(
            "the tree", f"{self.top_k}-{self.depth}-{self.nodes}", max(self.nodes, self.top_k * self.depth)
        )

    @property
    def candidates(self) -> int:
        """The number of drafted nodes: k at level 1, and k children of each of k nodes at every later level."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def num_nodes(self) -> int:
        """N, the number of nodes: `nodes`, or fewer if there are not enough candidates."""
        return min(self.nodes, self.candidates + 1)

    @property
    def rows(self) -> int:
        """The number of cache rows written while the tree grows."""
        return (self.depth - 1) * self.top_k


@dataclasses.dataclass(frozen=True)
class Static:
    """A chain or a tree of fixed shape, in which every node at depth l has `branching[l]` children.

    Raises:
      MarsError: a level has no nodes, or there are more than `TREE_NODES` nodes.
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
        # Level l has branching[0] * ... * branching[l] nodes; the root adds one.
        return 1 + int(np.sum(np.cumprod(self.branching)))

    @property
    def rows(self) -> int:
        # The root is excluded: the drafter has already processed it when the tree starts to grow.
        return self.num_nodes - 1


Shape = Static | Dynamic


def checked_tree(tree: object) -> tuple[int, ...] | Dynamic:
    """Check a tree argument. Return a `Dynamic`, or the children per node at each depth as a tuple.

    Raises:
      MarsError: the tree has the wrong type, is empty, or contains a number below 1.
    """
    if isinstance(tree, Dynamic):
        return tree
    sizes = tree.tolist() if isinstance(tree, np.ndarray | Array) else tree
    if (
        isinstance(sizes, list | tuple)
        and sizes
        and all(isinstance(size, int | np.integer) and size > 0 for size in sizes)
    ):
        return tuple(map(int, sizes))
    raise MarsError(
        f"tree is {short_repr(tree)}: expected the children per node at each depth, such as (4, 2, 2), or "
        "Dynamic(...)."
    )


def parse_tree(text: str, *, shown: str = "--tree") -> tuple[int, ...] | Dynamic:
    """Parse a tree argument: the children per node at each depth, or the sizes of a dynamic tree.

    Raises:
      MarsError: the text is not a valid tree such as "4-2-2-1" or "dynamic", or the tree is too large.

    >>> parse_tree("4-2-2-1"), parse_tree("dynamic:8-6-40")
    ((4, 2, 2, 1), Dynamic(top_k=8, depth=6, nodes=40))
    """
    if text == "dynamic":
        return Dynamic()
    is_dynamic = text.startswith("dynamic:")
    parts = text.removeprefix("dynamic:").split("-")
    are_counts = all(part.isascii() and part.isdigit() and len(part) < 5 and int(part) for part in parts)
    if not are_counts or (is_dynamic and len(parts) != 3):
        suggestion = did_you_mean(text.partition(":")[0], ("dynamic",))
        raise MarsError(
            f"{shown} is {text}{suggestion}: expected the children per node at each depth, such as 4-2-2-1; or "
            "dynamic; or dynamic with its children, depth and nodes, such as dynamic:8-6-40."
        )
    sizes = tuple(int(part) for part in parts)
    if is_dynamic:
        if sizes[2] < 2:
            raise MarsError(f"{shown} is {text}: expected at least 2 nodes, the first being the root.")
        top_k, depth, nodes = sizes
        check_nodes(shown, text, max(nodes, top_k * depth))  # Dynamic's own error would not name the flag
        return Dynamic(*sizes)
    check_branching(shown, text, sizes)
    return sizes


def check_branching(shown: str, shape: object, branching: Sequence[int]) -> None:
    """Raise MarsError if a tree with `branching[l]` children per node at depth l has more than `TREE_NODES` nodes."""
    num_nodes, level_nodes = 1, 1
    for num_children in branching:
        level_nodes *= num_children
        num_nodes += level_nodes
        check_nodes(shown, shape, num_nodes)


def check_nodes(shown: str, shape: object, nodes: int) -> None:
    """Raise MarsError if a tree has more than `TREE_NODES` nodes. The message quotes the tree's shape."""
    if nodes > TREE_NODES:
        raise MarsError(f"{shown} is {shape}, more than {TREE_NODES} nodes: choose a smaller tree.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapedDrafter(Drafter):
    """Base class of drafters that can draft trees as well as chains."""

    # Children per node at each depth; None: a chain.
    tree: Sequence[int] | Dynamic | None = dataclasses.field(default=None, compare=False)
    sample: bool = False  # sample the draft tokens, and pass their true distribution q to the rule
    # Computed from the tree, or from the chain's length.
    shape: Shape = dataclasses.field(init=False, repr=False)

    stops = True

    def _set_shape(self, num_draft_tokens: int, vocab_size: int) -> None:
        """Check and store the shape; subclasses call this in `__post_init__`.

        Raises:
          MarsError: a level has no nodes, the draft is too long or has too many nodes, a node has more children than
            there are tokens, or `sample` is not a bool.
        """
        check_switch("sample", self.sample)
        if self.tree is None:
            check_count("num_draft_tokens", num_draft_tokens, most=DRAFT_TOKENS)
            object.__setattr__(self, "shape", Static((1,) * num_draft_tokens))
            return
        tree = checked_tree(self.tree)
        shape = tree if isinstance(tree, Dynamic) else Static(tree)
        if shape.top_k > vocab_size:
            raise MarsError(
                f"a node cannot have {shape.top_k} children in a vocabulary of {vocab_size} tokens: give fewer."
            )
        object.__setattr__(self, "tree", tree)
        object.__setattr__(self, "shape", shape)

    def resized(self, length: int) -> ShapedDrafter:
        return dataclasses.replace(self, num_draft_tokens=length, tree=None)  # pyright: ignore[reportCallIssue]

    @property
    def is_chain(self) -> bool:
        return isinstance(self.shape, Static) and self.shape.is_chain

    @property
    def max_depth(self) -> int:
        return self.shape.depth

    @property
    def num_nodes(self) -> int:
        return self.shape.num_nodes

    @property
    def name(self) -> str:
        if isinstance(self.shape, Dynamic):
            shape_text = f"dynamic {self.shape.top_k}-{self.shape.depth}-{self.shape.num_nodes}"
        elif self.shape.is_chain:
            shape_text = str(self.shape.depth)
        else:
            shape_text = "-".join(map(str, self.shape.branching))
        if self.sample:
            shape_text += ", sampled"
        return f"{self.kind}({shape_text})"

    @property
    def kind(self) -> str:
        """The kind of drafter, which is the first part of `name`."""
        return type(self).__name__.lower()
