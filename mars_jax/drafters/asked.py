"""What a drafter is loaded from, and what loading gives. The rows of `specs.DRAFTERS` name who does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mars_jax.core.types import Decoder, DecodeState, Drafter, Params, PyTree, StepInfo
from mars_jax.drafters.tree_shapes import Dynamic
from mars_jax.hub.pretrained import Pretrained
from mars_jax.placement.shardings import place

Steps = Callable[[Decoder, Params, DecodeState], Iterator[tuple[DecodeState, StepInfo]]]


class LoadedDrafter(NamedTuple):
    """A drafter and its weights."""

    drafter: Drafter
    params: PyTree
    steps: Steps | None = (
        None  # makes the steps of a batch in place of `decode.stream`; rows then do not refill
    )


class Asked(NamedTuple):
    """The arguments of `drafters.load`, checked against the drafter's row in `specs` and completed from it."""

    target: Pretrained
    path: str  # of its checkpoint, "" where it has none
    length: int | None  # of a chain; None: as many as it has, or none at all
    tree: Sequence[int] | Dynamic | None
    sample: bool
    dtype: str | None

    @property
    def shape(self) -> dict[str, Any]:
        """`tree` and `sample`, which every factory with weights takes."""
        return {"tree": self.tree, "sample": self.sample}

    @property
    def chain(self) -> int:
        """The length of a chain, of a drafter whose row names one."""
        assert self.length is not None
        return self.length

    @property
    def heads_dtype(self) -> str:
        """Of the weights of heads: they compute with what the target gives them."""
        return self.dtype or self.target.params["embed"].dtype.name

    def placed(self, params: PyTree, config: Any) -> PyTree:
        """Weights of heads on the target's mesh."""
        return params if self.target.mesh is None else place(params, config, self.target.mesh)
