"""No draft: plain autoregression as a tree of one node."""

from __future__ import annotations

import jax.numpy as jnp

from mars_jax.core.tree import chain
from mars_jax.core.types import Drafter


def none() -> Drafter:
    """A drafter whose tree is the root alone, so that every step emits one token.

    >>> none().num_nodes
    1
    """
    return _NONE


def _propose(params, keys, state, tokens, length, controls):
    root = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
    return chain(root), state


# One instance: equal drafters share what was compiled for them.
_NONE = Drafter(
    init=lambda params, tokens, length: (),
    propose=_propose,
    update=lambda params, state, tree, verdict, output, length: state,
    num_nodes=1,
    max_depth=0,
    name="none",
)
