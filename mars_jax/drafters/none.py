"""A drafter that drafts nothing: plain autoregressive decoding."""

from __future__ import annotations

import dataclasses

from mars_jax.core.drafter import Drafter, DraftInput
from mars_jax.core.tree import chain, last_token
from mars_jax.core.types import DraftTree, Params, PyTree
from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.registry import register


@dataclasses.dataclass(frozen=True)
class NoDraft(Drafter):
    """Plain autoregression.

    The draft tree consists of the root only, so every step emits one token.

    >>> none().num_nodes
    1
    """

    max_depth = 0

    @property
    def name(self) -> str:
        return "none"

    def propose(self, params: Params, state: PyTree, inputs: DraftInput) -> tuple[DraftTree, PyTree]:
        return chain(last_token(inputs)), state


none = NoDraft


def load_none(arguments: Asked) -> LoadedDrafter:
    """Make a `none` drafter."""
    return LoadedDrafter(none(), ())


register("none", NoDraft, load_none)
