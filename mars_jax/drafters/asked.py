"""Arguments and result of the functions that load a drafter; see `registry.register`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jax import Array

from mars_jax.core.decoder import Decoder, speculative_decoder
from mars_jax.core.drafter import Drafter
from mars_jax.core.rule import Rule
from mars_jax.core.types import DecodeState, LanguageModel, Params, PyTree, StepInfo
from mars_jax.drafters.tree_shapes import Dynamic
from mars_jax.hub.pretrained import Pretrained
from mars_jax.models.shardings import place

Steps = Callable[[Decoder, Params, DecodeState], Iterator[tuple[DecodeState, StepInfo]]]


class LoadedDrafter(NamedTuple):
    """A drafter with its weights, and the facts about it that matter outside a step."""

    drafter: Drafter  # its methods and sizes
    params: PyTree  # its weights, which go into `Params.draft`
    # i32[U]; the target's id of each draft token, if the draft vocabulary differs from the target's. `guide.narrowed`
    # prepares a constraint's tables for it.
    draft_ids: Array | None = None
    sizes: DraftSizes | None = None  # the lengths to choose from in each step; see `drafters.sized`
    # Yields the steps of a batch, in place of `refill.advance`. Rows then do not refill.
    steps: Steps | None = None
    max_positions: int | None = None  # the longest context that its weights were trained for

    def decoder(self, target: LanguageModel, verify: Rule) -> Decoder:
        """Return the decoder for a target with this drafter.

        Raises:
          MarsError: as for `speculative_decoder`; a lossy rule with an adaptive draft length.
        """
        if self.sizes is not None:
            return self.sizes.decoder(target, verify)
        return speculative_decoder(target, self.drafter, verify)


class DraftSizes(Protocol):
    """A drafter with several lengths; implemented by `drafters.sized.SizedDrafter`."""

    @property
    def lengths(self) -> tuple[int, ...]: ...

    def decoder(self, target: LanguageModel, verify: Rule) -> Decoder: ...


class Asked(NamedTuple):
    """The arguments of `drafters.load`, checked against the drafter's definition and completed from it."""

    target: Pretrained
    path: str  # checkpoint of the draft; "" if it has none
    length: int | None  # chain length; None: the drafter's own, or no chain
    tree: Sequence[int] | Dynamic | None
    sample: bool
    dtype: str | None
    head_embed: str = "own"  # one of `registry.HEAD_EMBED`

    @property
    def shape(self) -> dict[str, Any]:
        """Keyword arguments for the shape of a drafter with weights."""
        return {"tree": self.tree, "sample": self.sample}

    @property
    def chain(self) -> int:
        """Chain length of a drafter that has a default length."""
        assert self.length is not None
        return self.length

    @property
    def heads_dtype(self) -> str:
        """Dtype of a head's weights: by default the dtype of the target, whose features it reads."""
        return self.dtype or self.target.params["embed"].dtype.name

    def placed(self, params: PyTree, config: Any) -> PyTree:
        """Return a head's weights, placed on the target's mesh."""
        return params if self.target.mesh is None else place(params, config, self.target.mesh)
