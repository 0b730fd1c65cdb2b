"""Table of the drafters by name: their capabilities, specs and draft shapes. Does not import jax."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mars_jax.core.errors import MarsError, check_count, did_you_mean
from mars_jax.core.home import check_path
from mars_jax.core.limits import TREE_NODES

MIXTURE_LENGTH = 3
"""Length of a chain for a mixture of experts. Different nodes read different experts: with 128 experts and 8 per token,
a chain of 3 reads 23% of them and a tree of 60 nodes 98%."""


HEAD_EMBED = ("own", "target")
"""Embedding that a head uses: its own if the checkpoint contains one, or always the target's."""


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """A tree whose shape follows the drafter's confidence (EAGLE-2 2406.16858, section 4).

    At each of `depth` levels the `top_k` most probable nodes, by the product of the drafter's probabilities from the
    root, get their `top_k` most probable children. The `nodes` - 1 most probable of all children are kept.

    Raises:
      MarsError: a size below 1, or more than `TREE_NODES` nodes.
    """

    top_k: int = 10  # nodes expanded at each level, and children of each
    depth: int = 7  # D, levels
    nodes: int = 60  # including the root

    def __post_init__(self):
        for name, least in {"top_k": 1, "depth": 1, "nodes": 2}.items():
            check_count(f"{name} of a dynamic tree", getattr(self, name), least, TREE_NODES)
        # Drafted nodes cost work even if few of them are kept.
        check_nodes(
            "the tree", f"{self.top_k}-{self.depth}-{self.nodes}", max(self.nodes, self.top_k * self.depth)
        )

    @property
    def candidates(self) -> int:
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def num_nodes(self) -> int:
        """N: `nodes`, or fewer if there are not enough candidates."""
        return min(self.nodes, self.candidates + 1)

    @property
    def rows(self) -> int:
        """Cache rows written while the tree grows."""
        return (self.depth - 1) * self.top_k


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftRow:
    """A row of `DRAFTERS`."""

    name: str
    help: str
    loader: str  # "module:function", from `drafters.asked.Asked` to the drafter with its weights
    head: bool = False  # reads the target's features; checked against the target's config
    path: bool = False  # spec includes a checkpoint, as NAME:PATH
    file: bool = False  # spec includes a file instead, as NAME:FILE
    trees: bool = False  # drafts static trees
    dynamic: bool = False  # drafts dynamic trees
    samples: bool = False  # has a distribution and draws from it for rejection
    stops: bool = False  # supports draft_stop
    length: int | None = None  # default chain length; None: fixed by the drafter, or no draft
    resizes: bool = False  # drafts chains of any length over one state, so that each step can choose a length
    grows: bool = False  # drafts a dynamic tree by default
    trusts: bool = False  # accepts some of its drafts without the target, so no rule is lossless with it
    # Drafts a whole block at once; its usual tree is as deep as the block, whose length is in the checkpoint.
    block: bool = False
    copies: bool = False  # copies earlier text, so a lossy rule accepts repetitions
    embeds: bool = False  # its checkpoint may contain an embedding, which head_embed replaces
    learns: bool = False  # `lab.training.online` trains it on its rejected drafts
    # For a head with a published shape in `mars-jax plan`: its name there, and "module:class" of its config.
    outlined: tuple[str, str] | None = None
    paper: str = ""

    @property
    def spec(self) -> str:
        """Form of its spec.

        >>> DRAFTERS["model"].spec
        'model:PATH'
        """
        return f"{self.name}:{'FILE' if self.file else 'PATH'}" if self.path else self.name

    @property
    def factory(self) -> str:
        """Name of a head's factory, (config, target, length, tree=...) -> Drafter, in the module of its loader.

        >>> DRAFTERS["eagle"].factory
        'mars_jax.drafters.eagle:eagle'
        """
        return f"{self.loader.partition(':')[0]}:{self.name}"

    def usual(self, *, mixture: bool, sample: bool = False) -> tuple[int | None, Dynamic | None]:
        """Return the default draft, if neither a length nor a tree is requested: a chain length, or a tree.

        Args:
          mixture: the target is a mixture of experts.
          sample: the draft is sampled, so it is a chain.

        >>> DRAFTERS["model"].usual(mixture=False), DRAFTERS["eagle"].usual(mixture=True)
        ((5, None), (3, None))
        """
        # Drafts that need no verification do not make the target read experts in vain.
        short = mixture and not self.trusts
        length = self.length and min(self.length, MIXTURE_LENGTH if short else self.length)
        if self.block and mixture:
            length = MIXTURE_LENGTH
        return length, Dynamic() if self.grows and not (mixture or sample) else None

    def as_json(self) -> dict[str, Any]:
        """Return the row for `--list-drafters --json`."""
        return dataclasses.asdict(self)


DRAFTERS: dict[str, DraftRow] = {
    row.name: row
    for row in (
        DraftRow(name="none", help="plain autoregression", loader="mars_jax.drafters.none:load_none"),
        DraftRow(
            name="ngram",
            help="copy from the text so far",
            loader="mars_jax.drafters.ngram:load_ngram",
            length=8,
            resizes=True,
            copies=True,
            paper="2304.04487",
        ),
        DraftRow(
            name="model",
            help="a small model, best with the target's tokenizer",
            loader="mars_jax.drafters.model:load_model",
            path=True,
            trees=True,
            dynamic=True,
            samples=True,
            stops=True,
            length=5,
            resizes=True,
            learns=True,
            paper="2211.17192",
        ),
        DraftRow(
            name="eagle",
            help="an EAGLE, EAGLE-2 or EAGLE-3 head of the target",
            loader="mars_jax.drafters.eagle:load_eagle",
            head=True,
            path=True,
            trees=True,
            dynamic=True,
            samples=True,
            stops=True,
            length=5,
            resizes=True,
            grows=True,
            embeds=True,
            learns=True,
            outlined=("eagle3", "mars_jax.models.eagle_head:EagleConfig"),
            paper="2401.15077, 2406.16858, 2503.01840",
        ),
        *importlib.import_module("mars_jax.contrib.draft_rows").DRAFTERS,
    )
}
"""Drafters by name."""


class DraftSpec(NamedTuple):
    """A parsed drafter spec: `eagle:PATH` is ("eagle", "PATH"), and `ngram` is ("ngram", "")."""

    kind: str
    path: str

    @property
    def row(self) -> DraftRow:
        return DRAFTERS[self.kind]

    @property
    def checkpoint(self) -> str:
        """Checkpoint in the spec; "" if there is none."""
        return "" if self.row.file else self.path


def draft_words(names: Iterable[str] = DRAFTERS) -> str:
    """Return the forms of drafter specs, for help and errors.

    >>> draft_words(["ngram", "model", "eagle"])
    'ngram, model:PATH or eagle:PATH'
    """
    *earlier, last = (DRAFTERS[name].spec for name in names)
    return f"{', '.join(earlier)} or {last}" if earlier else last


def drafters_that(what: str) -> str:
    """Return `draft_words` of the drafters with a property, such as "trees"."""
    return draft_words(name for name, row in DRAFTERS.items() if getattr(row, what))


def parse_draft(spec: str, *, shown: str = "the drafter", among: Iterable[str] = DRAFTERS) -> DraftSpec:
    """Parse a drafter spec into kind and path.

    Args:
      spec: such as "ngram" or "eagle:PATH"; a path may contain colons.
      shown: name of the argument in messages.
      among: allowed kinds.

    Raises:
      MarsError: an unknown kind, a missing or superfluous path, or an invalid path.

    >>> parse_draft("eagle:owner/name")
    DraftSpec(kind='eagle', path='owner/name')
    """
    among = list(among)
    if not isinstance(spec, str):
        raise MarsError(f"{shown} is of type {type(spec).__name__}: expected {draft_words(among)}.")
    kind, colon, path = spec.partition(":")
    if kind not in among or DRAFTERS[kind].path != bool(path) or (colon and not path):
        suggestion = did_you_mean(kind, among)
        raise MarsError(f"{shown} is {spec}{suggestion}: expected {draft_words(among)}.")
    check_path(path, shown)
    return DraftSpec(kind, path)


def parse_tree(text: str, *, shown: str = "--tree") -> tuple[int, ...] | Dynamic:
    """Parse the children per node at each depth, or the sizes of a dynamic tree.

    Raises:
      MarsError: not whole numbers of at least 1 joined by "-", or too many nodes.

    >>> parse_tree("4-2-2-1"), parse_tree("dynamic:8-6-40")
    ((4, 2, 2, 1), Dynamic(top_k=8, depth=6, nodes=40))
    """
    if text == "dynamic":
        return Dynamic()
    dynamic = text.startswith("dynamic:")
    parts = text.removeprefix("dynamic:").split("-")
    are_counts = all(part.isascii() and part.isdigit() and len(part) < 5 and int(part) for part in parts)
    if not are_counts or (dynamic and len(parts) != 3):
        suggestion = did_you_mean(text.partition(":")[0], ("dynamic",))
        raise MarsError(
            f"{shown} is {text}{suggestion}: expected the children per node at each depth, such as 4-2-2-1, or "
            "dynamic, or its children, depth and nodes, such as dynamic:8-6-40."
        )
    sizes = tuple(int(part) for part in parts)
    if dynamic:
        if sizes[2] < 2:
            raise MarsError(f"{shown} is {text}: expected at least 2 nodes, the first being the root.")
        top_k, depth, nodes = sizes
        check_nodes(shown, text, max(nodes, top_k * depth))  # Dynamic would not name the flag
        return Dynamic(*sizes)
    check_branching(shown, text, sizes)
    return sizes


def check_branching(shown: str, shape: object, branching: Sequence[int]) -> None:
    """Raise MarsError if a tree with `branching[l]` children per node of depth l has more than `TREE_NODES` nodes."""
    nodes, level = 1, 1
    for width in branching:
        level *= width
        nodes += level
        check_nodes(shown, shape, nodes)


def check_nodes(shown: str, shape: object, nodes: int) -> None:
    """Raise MarsError if a tree has more than `TREE_NODES` nodes; the message quotes its shape."""
    if nodes > TREE_NODES:
        raise MarsError(f"{shown} is {shape}, more than {TREE_NODES} nodes: choose a smaller tree.")
