"""Truncation of a verdict before drafted tokens to which an edit or a constraint gives probability 0.

B batch, N nodes, D depth. Oracle: the same cut node by node in Python (tests/core/test_cut.py).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from mars_jax.core.evidence import Evidence
from mars_jax.core.pick import leading, pick
from mars_jax.core.sampling import at_drafted, at_tokens, sample
from mars_jax.core.tree import gather_path
from mars_jax.core.types import Verdict


def impossible(evidence: Evidence) -> Array:
    """Return bool[B, N]: nodes whose token has a logit of -inf at their parent; never the root or padding.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[0.0, -jnp.inf], [0.0, 0.0]]])
    >>> impossible(verify.evidence(chain(jnp.asarray([[0, 1]], jnp.int32)), z)).tolist()
    [[False, True]]
    """
    tree = evidence.tree
    return (at_drafted(tree, evidence.logits) == -jnp.inf) & (tree.tokens >= 0) & (tree.depths > 0)


def cut(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Truncate the verdict at the first `impossible` node, and draw the next token there from the target.

    So bans and constraints hold under any rule, including randomized and user-written ones, and a step still adds a
    token. A `next_token` with a logit of -inf is also replaced by a draw from the target. Lossless rules produce
    neither.
    """
    accepted, place = verdict.num_accepted, jnp.arange(verdict.path.shape[1], dtype=jnp.int32)[None]
    # Edge d leads from path[d] to path[d + 1]; only the first `accepted` of them were taken.
    wrong = pick(impossible(evidence), verdict.path[:, 1:]) & (place[:, :-1] < accepted[:, None])
    num_accepted = jnp.minimum(leading(~wrong), accepted)
    last = pick(verdict.path, num_accepted[:, None])  # i32[B, 1]
    # Draws are keyed by position, so this is the token that autoregression would draw there.
    target_token = sample(
        evidence.keys, pick(evidence.positions, last), gather_path(evidence.logits, last), evidence.controls
    )[:, 0]
    # A rule may choose a next token that the request forbids; the logits of the last node show it.
    is_forbidden = at_tokens(evidence.logits, last, verdict.next_token[:, None])[:, 0] == -jnp.inf
    return dataclasses.replace(
        verdict,
        path=jnp.where(place <= num_accepted[:, None], verdict.path, last),
        num_accepted=num_accepted,
        next_token=jnp.where((num_accepted < accepted) | is_forbidden, target_token, verdict.next_token),
        relaxed=verdict.relaxed & (place[:, :-1] < num_accepted[:, None]),
    )
