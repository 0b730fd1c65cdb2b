"""A registry of drafters by name. A drafter's class and the arguments of `register` define its capabilities.

Command-line flags, lists, error messages and checks are derived from this registry. Other packages can add drafters as
plugins, in the same way as rules (see `verify.definition`).

Tests: tests/test_tables.py.
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
"""Default limit on the chain length if the target is a mixture of experts. Each draft token activates different
experts: with 128 experts and 8 per token, a chain of 3 loads 23% of them, and a tree of 60 nodes loads 98%."""
HEAD_EMBED = ("own", "target")
"""Choices of embedding for a head: its own if the checkpoint contains one, or always the target's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftDefinition:
    """The registry entry of a drafter."""

    name: str  # the name before the colon in a spec
    cls: type[Drafter]  # class of the drafter
    load: Callable[[Asked], LoadedDrafter]  # function that builds the drafter with its weights
    help: str  # one-sentence description without a period
    path: str = ""  # placeholder for the path in a spec: PATH for a checkpoint, FILE for a file, "" for none
    own: bool = False  # the path may be omitted if the weights are in the target's checkpoint
    head: bool = False  # reads the target's features and is checked against the target's config
    static: bool = False  # drafts static trees but no dynamic ones
    grows: bool = False  # drafts a dynamic tree by default
    # Drafts a whole block in one forward pass. By default it drafts a tree as deep as the block.
    block: bool = False
    copies: bool = False  # copies earlier tokens, so a lossy rule accepts more repetitions
    embeds: bool = False  # the checkpoint may contain an embedding; head_embed="target" replaces it
    learns: bool = False  # `lab.training.online` can train the drafter on its rejected tokens
    # For heads that `mars-jax plan` lists: name of the head's published shape, and class of its config.
    outlined: tuple[str, type] | None = None
    paper: str = ""  # source, such as an arXiv number

    @property
    def spec(self) -> str:
        """The pattern of the drafter's spec.

        >>> definition("model").spec
        'model:PATH'
        """
        if self.own:
            return f"{self.name}[:{self.path}]"
        return f"{self.name}:{self.path}".removesuffix(":")

    def accepts(self, path: str) -> bool:
        """Return whether a spec of this drafter may have the given path; "" means no path."""
        return bool(path) == bool(self.path) or (self.own and not path)

    @property
    def length(self) -> int | None:
        """Default chain length; None if the checkpoint defines the length or the drafter drafts nothing."""
        length = self._defaults.get("num_draft_tokens")
        return length if isinstance(length, int) else None

    @property
    def samples(self) -> bool:
        """True if the drafter can sample its drafts and return q, as rejection sampling requires."""
        return "sample" in self._defaults

    @property
    def trees(self) -> bool:
        """True if the drafter can draft static trees."""
        return "tree" in self._defaults

    @property
    def dynamic(self) -> bool:
        """True if the drafter can draft dynamic trees."""
        return self.trees and not self.static

    @property
    def stops(self) -> bool:
        """True if the drafter supports early stopping by `draft_stop`."""
        return self.cls.stops is True

    @property
    def trusts(self) -> bool:
        """True if the drafter itself accepts some of its draft tokens, which makes every rule lossy."""
        return self.cls.trusts is True

    @property
    def resizes(self) -> bool:
        """True if one draft state works for chains of any length, so that each step can choose a length."""
        return self.cls.resizes is True

    @property
    def _defaults(self) -> dict[str, object]:
        return {f.name: f.default for f in dataclasses.fields(self.cls) if f.init}  # pyright: ignore[reportArgumentType]

    def usual(self, *, mixture: bool, chain: bool = False) -> tuple[int | None, Dynamic | None]:
        """Return the default chain length and tree, for a request that specifies neither.

        Args:
          mixture: whether the target is a mixture of experts.
          chain: whether the draft must be a chain, because it is sampled, its length is adaptive, or the target has
            recurrent layers.

        >>> definition("model").usual(mixture=False), definition("eagle").usual(mixture=True)
        ((5, None), (3, None))
        """
        length = self.length
        # Trusted tokens are never rejected, so loading experts for them is never wasted.
        if mixture and length is not None and not self.trusts:
            length = min(length, MIXTURE_LENGTH)
        if mixture and self.block:
            length = MIXTURE_LENGTH
        if self.grows and not (mixture or chain):
            return length, Dynamic()
        return length, None

    def as_json(self) -> JsonObject:
        """Return the definition as JSON, for `--list-drafters --json`."""
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
    """Register a drafter, so that specs can refer to it by `name`.

    Args:
      name: name of the drafter, without a colon.
      cls: dataclass of the drafter. The default of its field `num_draft_tokens` is the default chain length. The
        drafter can draft trees if the class has a field `tree`, and sample its drafts if it has a field `sample`.
      load: function that builds the drafter and its weights from the arguments of `drafters.load`.
      help: one-sentence description; default: the first line of the class's docstring.
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
    """Return the definitions of all drafters, keyed by name. Drafters from plugins come last.

    >>> [*definitions()][:4], "medusa" in definitions()
    (['none', 'ngram', 'model', 'eagle'], True)
    """
    load_plugins()
    return {name: _DRAFTERS[name] for name in ("none", "ngram", "model", "eagle")} | _DRAFTERS


def definition(name: str) -> DraftDefinition:
    """Return the definition of a drafter. If the name is unknown, load the plugins first."""
    return _DRAFTERS.get(name) or definitions()[name]


class DraftSpec(NamedTuple):
    """A parsed drafter spec: `eagle:PATH` is ("eagle", "PATH"), and `ngram` is ("ngram", "")."""

    kind: str  # name of the drafter
    path: str  # the drafter's checkpoint or file; "" if the spec has no path

    @property
    def definition(self) -> DraftDefinition:
        """The registry entry of the drafter."""
        return definition(self.kind)

    @property
    def checkpoint(self) -> str:
        """The checkpoint in the spec; "" if the spec has no path or its path is a file."""
        return "" if self.definition.path == "FILE" else self.path


def draft_words(names: Iterable[str] | None = None) -> str:
    """Return a list of spec patterns, by default those of all drafters, as text for help and error messages.

    >>> draft_words(["ngram", "model", "eagle"])
    'ngram, model:PATH or eagle:PATH'
    """
    *earlier_specs, last_spec = (definition(name).spec for name in names or definitions())
    return " or ".join(filter(None, (", ".join(earlier_specs), last_spec)))


def drafters_that(capability: str) -> str:
    """Return `draft_words` for the drafters that have a given capability, such as "trees"."""
    return draft_words(names_that(capability))


def names_that(capability: str) -> list[str]:
    """Return the names of the drafters that have a given capability, such as "learns"."""
    return [name for name, entry in definitions().items() if getattr(entry, capability)]


def published_heads() -> dict[str, type]:
    """Return the config classes of the heads that `mars-jax plan` lists, keyed by the name of the head's shape."""
    return dict(entry.outlined for entry in definitions().values() if entry.outlined)


def parse_draft(spec: str, *, shown: str = "the drafter", among: Iterable[str] | None = None) -> DraftSpec:
    """Split a drafter spec into the drafter's name and path, and check both.

    Args:
      spec: a spec such as "ngram" or "eagle:PATH"; the path may contain colons.
      shown: name of the argument in error messages.
      among: names of the allowed drafters; default: all.

    Raises:
      MarsError: the drafter is unknown, or the path is missing, superfluous or invalid.

    >>> parse_draft("eagle:owner/name")
    DraftSpec(kind='eagle', path='owner/name')
    """
    if not isinstance(spec, str):
        raise MarsError(f"{shown} is of type {type(spec).__name__}: expected {draft_words(among)}.")
    kind, colon, path = spec.partition(":")
    if among is None:
        # Load the plugins only if no registered drafter has this name.
        is_known = kind in _DRAFTERS or kind in definitions()
    else:
        among = list(among)
        is_known = kind in among
    if not is_known or (colon and not path) or not definition(kind).accepts(path):
        suggestion = did_you_mean(kind, among or definitions())
        raise MarsError(f"{shown} is {spec}{suggestion}: expected {draft_words(among)}.")
    check_path(path, shown)
    return DraftSpec(kind, path)
