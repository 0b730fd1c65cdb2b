"""The input of loading a drafter, and its result. The rows of `specs.DRAFTERS` name the functions that load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jax import Array

from mars_jax.core.decoder import Decoder, speculative_decoder
from mars_jax.core.drafter import Drafter
from mars_jax.core.types import DecodeState, LanguageModel, Params, PyTree, StepInfo
from mars_jax.drafters.tree_shapes import Dynamic
from mars_jax.hub.pretrained import Pretrained
from mars_jax.placement.shardings import place

Steps = Callable[[Decoder, Params, DecodeState], Iterator[tuple[DecodeState, StepInfo]]]


class LoadedDrafter(NamedTuple):
    """A drafter and its weights, and what a pair is to know of it beyond a step."""

    drafter: Drafter  # its functions
    params: PyTree  # its weights, which go into `Params.draft`
    # Where it drafts from a vocabulary of its own: the target's tokens i32[U] of that, for which `guide.narrowed`
    # prepares a constraint's tables.
    draft_ids: Array | None = None
    # The same drafter with a chain of so many tokens, over the same state; None: it drafts no chains of any length.
    resized: Callable[[int], Drafter] | None = None
    sizes: Sizes | None = None  # each step drafts one of several; see `drafters.sized`
    # Makes the steps of a batch in place of `decode.stream`; rows then do not refill.
    steps: Steps | None = None
    max_positions: int | None = None  # the longest text that its weights were trained for

    def decoder(self, target: LanguageModel, verify: Any) -> Decoder:
        """The decoder of a target with this drafter.

        Raises:
          MarsError: as `speculative_decoder`; a lossy rule with an adaptive draft length.
        """
        if self.sizes is not None:
            return self.sizes.decoder(target, self.drafter, verify)
        return speculative_decoder(target, self.drafter, verify)


class Sizes(Protocol):
    """Drafts of several sizes over one state; `drafters.sized.Sizes`."""

    drafters: tuple[Drafter, ...]

    def decoder(self, target: LanguageModel, longest: Drafter, verify: Any) -> Decoder: ...


class Asked(NamedTuple):
    """The arguments of `drafters.load`, checked against the drafter's row in `specs` and completed from it."""

    target: Pretrained
    path: str  # of its checkpoint, "" where it has none
    length: int | None  # of a chain; None: as many as it has, or none at all
    tree: Sequence[int] | Dynamic | None
    sample: bool
    dtype: str | None
    head_embed: str = "own"  # of `specs.HEAD_EMBED`

    @property
    def shape(self) -> dict[str, Any]:
        """`tree` and `sample`, which every factory with weights takes."""
        return {"tree": self.tree, "sample": self.sample}

    @property
    def chain(self) -> int:
        """The length of a chain, of a drafter whose row names one."""
        assert self.length is not None
        return self.length

    def resized(self, made: Callable[..., Drafter]) -> Callable[[int], Drafter]:
        """`LoadedDrafter.resized` of a factory (length, tree=, sample=) of drafters."""
        return lambda length: made(length, tree=None, sample=self.sample)

    @property
    def heads_dtype(self) -> str:
        """The dtype of the weights of heads, which compute with what the target gives them."""
        return self.dtype or self.target.params["embed"].dtype.name

    def placed(self, params: PyTree, config: Any) -> PyTree:
        """Weights of heads on the target's mesh."""
        return params if self.target.mesh is None else place(params, config, self.target.mesh)
