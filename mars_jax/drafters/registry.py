"""Definitions of drafters by name. A drafter's class and the arguments of `register` define its capabilities.

Flags, lists, messages and checks use the definitions. Drafters from other packages are plugins, as rules are
(`verify.definition`).

Oracle: tests/test_tables.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from mars_jax.core.drafter import Drafter
from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.tree_shapes import Dynamic
from mars_jax.utils.errors import MarsError, did_you_mean
from mars_jax.utils.paths import check_path
from mars_jax.utils.plugins import load_plugins
from mars_jax.utils.types import JsonObject
from mars_jax.utils.user_code import summary

MIXTURE_LENGTH = 3
"""Chain length for a mixture of experts. Different nodes read different experts: with 128 experts and 8 per token, a
chain of 3 reads 23% of them and a tree of 60 nodes 98%."""
HEAD_EMBED = ("own", "target")
"""Embedding that a head uses: its own if the checkpoint contains one, or always the target's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftDefinition:
    """A drafter that users can name."""

    name: str  # without a colon
    cls: type[Drafter]  # its class
    load: Callable[[Asked], LoadedDrafter]  # builds it with its weights
    help: str  # one sentence without a period
    path: str = ""  # placeholder in its spec: PATH for a checkpoint, FILE, or nothing
    own: bool = False  # may omit the path: the weights are then in the target's checkpoint
    head: bool = False  # reads the target's features; checked against the target's config
    static: bool = False  # its trees are static only
    grows: bool = False  # drafts a dynamic tree by default
    # Drafts a whole block at once; its usual tree is as deep as the block, whose length is in the checkpoint.
    block: bool = False
    copies: bool = False  # copies earlier text, so a lossy rule accepts repetitions
    embeds: bool = False  # its checkpoint may contain an embedding, which head_embed replaces
    learns: bool = False  # `lab.training.online` trains it on its rejected drafts
    # For a head whose published shape is in `mars-jax plan`: the shape's name, and the class of the head's config.
    outlined: tuple[str, type] | None = None
    paper: str = ""  # the source, such as an arXiv number

    @property
    def spec(self) -> str:
        """The form of its spec.

        >>> definition("model").spec
        'model:PATH'
        """
        if self.own:
            return f"{self.name}[:{self.path}]"
        return f"{self.name}:{self.path}".removesuffix(":")

    def accepts(self, path: str) -> bool:
        """Return whether its spec may have this path, which is empty if the spec has none."""
        return bool(path) == bool(self.path) or (self.own and not path)

    @property
    def length(self) -> int | None:
        """Default chain length; None: fixed by its weights, or there is no draft."""
        length = self._defaults.get("num_draft_tokens")
        return length if isinstance(length, int) else None

    @property
    def samples(self) -> bool:
        """True if it can draw from its distribution, for rejection."""
        return "sample" in self._defaults

    @property
    def trees(self) -> bool:
        """True if it drafts static trees."""
        return "tree" in self._defaults

    @property
    def dynamic(self) -> bool:
        """True if it drafts dynamic trees."""
        return self.trees and not self.static

    @property
    def stops(self) -> bool:
        """True if it respects draft_stop."""
        return self.cls.stops is True

    @property
    def trusts(self) -> bool:
        """True if it accepts some of its drafts without the target, so that no rule is lossless with it."""
        return self.cls.trusts is True

    @property
    def resizes(self) -> bool:
        """True if it drafts chains of any length from one state, so that each step can choose a length."""
        return self.cls.resizes is True

    @property
    def _defaults(self) -> dict[str, object]:
        return {f.name: f.default for f in dataclasses.fields(self.cls) if f.init}  # pyright: ignore[reportArgumentType]

    def usual(self, *, mixture: bool, chain: bool = False) -> tuple[int | None, Dynamic | None]:
        """Return the chain length and the tree of the default draft, for a request with neither.

        Args:
          mixture: the target is a mixture of experts.
          chain: the draft must be a chain: it is sampled, or the target has recurrent layers.

        >>> definition("model").usual(mixture=False), definition("eagle").usual(mixture=True)
        ((5, None), (3, None))
        """
        length = self.length
        # A draft that needs no verification never makes the target read experts in vain.
        if mixture and length is not None and not self.trusts:
            length = min(length, MIXTURE_LENGTH)
        if mixture and self.block:
            length = MIXTURE_LENGTH
        if self.grows and not (mixture or chain):
            return length, Dynamic()
        return length, None

    def as_json(self) -> JsonObject:
        """Return the definition for `--list-drafters --json`."""
        facts = ("name", "spec", "help", "head", "trees", "dynamic", "samples", "stops", "length", "resizes")
        facts += ("grows", "trusts", "block", "copies", "embeds", "learns", "paper")
        return {field_name: getattr(self, field_name) for field_name in facts}


_DRAFTERS: dict[str, DraftDefinition] = {}


def register(
    name: str,
    cls: type[Drafter],
    load: Callable[[Asked], LoadedDrafter],
    *,
    help: str = "",
    **facts: Any,
) -> None:
    """Make a drafter available by `name`.

    Args:
      name: without a colon.
      cls: its class. The default of its field `num_draft_tokens` is the usual chain length. The drafter drafts trees if
        the class has a field `tree`, and draws its drafts if the class has a field `sample`.
      load: function that builds it, with its weights, from the arguments of `drafters.load`.
      help: one sentence; default: the first line of the class's docstring.
      **facts: the other fields of `DraftDefinition`.

    Raises:
      MarsError: another drafter has this name, or the name contains a colon.
    """
    if ":" in name or (name in _DRAFTERS and _DRAFTERS[name].cls.__qualname__ != cls.__qualname__):
        raise MarsError(
            f"the name of a drafter is {name}: give one without a colon that no other drafter has."
        )
    _DRAFTERS[name] = DraftDefinition(name=name, cls=cls, load=load, help=help or summary(cls), **facts)


def definitions() -> Mapping[str, DraftDefinition]:
    """Return the definitions of all drafters by name, those of plugins last.

    >>> [*definitions()][:4], "medusa" in definitions()
    (['none', 'ngram', 'model', 'eagle'], True)
    """
    load_plugins()
    return {name: _DRAFTERS[name] for name in ("none", "ngram", "model", "eagle")} | _DRAFTERS


def definition(name: str) -> DraftDefinition:
    """Return the definition of a drafter. Looking up an unknown name loads the plugins first."""
    return _DRAFTERS.get(name) or definitions()[name]


class DraftSpec(NamedTuple):
    """A parsed drafter spec: `eagle:PATH` is ("eagle", "PATH"), and `ngram` is ("ngram", "")."""

    kind: str  # name of the drafter
    path: str  # its checkpoint or file; "" if it has none

    @property
    def definition(self) -> DraftDefinition:
        """The definition of the drafter."""
        return definition(self.kind)

    @property
    def checkpoint(self) -> str:
        """Checkpoint in the spec; "" if there is none."""
        return "" if self.definition.path == "FILE" else self.path


def draft_words(names: Iterable[str] | None = None) -> str:
    """Return the forms of drafter specs, for help and errors; by default, of all drafters.

    >>> draft_words(["ngram", "model", "eagle"])
    'ngram, model:PATH or eagle:PATH'
    """
    *earlier_specs, last_spec = (definition(name).spec for name in names or definitions())
    return " or ".join(filter(None, (", ".join(earlier_specs), last_spec)))


def drafters_that(capability: str) -> str:
    """Return `draft_words` of the drafters with a capability, such as "trees"."""
    return draft_words(names_that(capability))


def names_that(capability: str) -> list[str]:
    """Return the names of the drafters with a capability, such as "learns"."""
    return [name for name, entry in definitions().items() if getattr(entry, capability)]


def published_heads() -> dict[str, type]:
    """Return the config class of each head with a published shape in `mars-jax plan`, keyed by the shape's name."""
    return dict(entry.outlined for entry in definitions().values() if entry.outlined)


def parse_draft(spec: str, *, shown: str = "the drafter", among: Iterable[str] | None = None) -> DraftSpec:
    """Parse a drafter spec into kind and path.

    Args:
      spec: such as "ngram" or "eagle:PATH"; a path may contain colons.
      shown: name of the argument in messages.
      among: allowed kinds; default: all.

    Raises:
      MarsError: an unknown kind, a missing or superfluous path, or an invalid path.

    >>> parse_draft("eagle:owner/name")
    DraftSpec(kind='eagle', path='owner/name')
    """
    if not isinstance(spec, str):
        raise MarsError(f"{shown} is of type {type(spec).__name__}: expected {draft_words(among)}.")
    kind, colon, path = spec.partition(":")
    if among is None:
        # Load the plugins only if the library has no drafter of this name.
        is_known = kind in _DRAFTERS or kind in definitions()
    else:
        among = list(among)
        is_known = kind in among
    if not is_known or (colon and not path) or not definition(kind).accepts(path):
        suggestion = did_you_mean(kind, among or definitions())
        raise MarsError(f"{shown} is {spec}{suggestion}: expected {draft_words(among)}.")
    check_path(path, shown)
    return DraftSpec(kind, path)
