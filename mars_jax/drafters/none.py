"""No draft: plain autoregression as a tree of one node."""

from __future__ import annotations

from mars_jax.core.drafter import Drafter, DraftInput
from mars_jax.core.tree import chain, last_token
from mars_jax.core.types import DraftTree, Params, PyTree
from mars_jax.drafters.asked import Asked, LoadedDrafter


def none() -> Drafter:
    """Return a drafter whose tree is only the root, so that every step emits one token.

    >>> none().num_nodes
    1
    """
    return _NONE


def _propose(params: Params, state: PyTree, inputs: DraftInput) -> tuple[DraftTree, PyTree]:
    return chain(last_token(inputs)), state


# One instance, because equal drafters share their compiled programs.
_NONE = Drafter(
    init=lambda params, tokens, length: (),
    propose=_propose,
    update=lambda params, state, tree, verdict, output, length: state,
    num_nodes=1,
    max_depth=0,
    name="none",
)


def load_none(asked: Asked) -> LoadedDrafter:
    """Load `none`, for any target."""
    return LoadedDrafter(none(), ())
