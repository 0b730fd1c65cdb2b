"""Arguments and return type of the functions that load a drafter; see `registry.register`."""

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
    """A drafter, its weights, and the properties that code outside the decoding step needs."""

    drafter: Drafter  # methods and sizes, without weights
    params: PyTree  # weights of the drafter, for `Params.draft`
    # i32[U]; target token id of each draft token, if the draft vocabulary differs from the target's. `guide.narrowed`
    # uses these ids to restrict a constraint's tables to the draft vocabulary.
    draft_ids: Array | None = None
    sizes: DraftSizes | None = None  # draft lengths that each step chooses from; see `drafters.sized`
    # Function that runs a batch and yields its decoding steps, used instead of `refill.advance`. Finished rows are then
    # not refilled with new prompts.
    steps: Steps | None = None
    max_positions: int | None = None  # longest context that the drafter was trained for

    def decoder(self, target: LanguageModel, verify: Rule) -> Decoder:
        """Return a decoder that pairs this drafter with a target.

        Raises:
          MarsError: the rule is lossy and the draft length adaptive; see also `speculative_decoder`.
        """
        if self.sizes is not None:
            return self.sizes.decoder(target, verify)
        return speculative_decoder(target, self.drafter, verify)


class DraftSizes(Protocol):
    """The interface of a drafter that chooses its draft length; implemented by `drafters.sized.SizedDrafter`."""

    @property
    def lengths(self) -> tuple[int, ...]: ...

    def decoder(self, target: LanguageModel, verify: Rule) -> Decoder: ...


class Asked(NamedTuple):
    """The checked arguments of `drafters.load`, with defaults filled in from the drafter's definition."""

    target: Pretrained
    path: str  # checkpoint of the drafter; "" if it has none
    length: int | None  # chain length; None: the length that the checkpoint defines, or no chain
    tree: Sequence[int] | Dynamic | None
    sample: bool
    dtype: str | None
    head_embed: str = "own"  # one of `registry.HEAD_EMBED`

    @property
    def shape(self) -> dict[str, Any]:
        """Keyword arguments `tree` and `sample` for the constructor of a drafter with weights."""
        return {"tree": self.tree, "sample": self.sample}

    @property
    def chain(self) -> int:
        """The chain length, for a drafter whose definition has a default length."""
        assert self.length is not None
        return self.length

    @property
    def heads_dtype(self) -> str:
        """Dtype of a head's weights: the requested dtype, or by default the target's."""
        return self.dtype or self.target.params["embed"].dtype.name

    def placed(self, params: PyTree, config: Any) -> PyTree:
        """Return a head's weights, sharded over the target's mesh if it has one."""
        return params if self.target.mesh is None else place(params, config, self.target.mesh)
