"""Cut a verdict before drafted tokens that an edit or a constraint gives no probability at all.

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
    """bool[B, N]: the nodes whose token has a logit of -inf at their parent; never the root, nor padding.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[0.0, -jnp.inf], [0.0, 0.0]]])
    >>> impossible(verify.evidence(chain(jnp.asarray([[0, 1]], jnp.int32)), z)).tolist()
    [[False, True]]
    """
    tree = evidence.tree
    return (at_drafted(tree, evidence.logits) == -jnp.inf) & (tree.tokens >= 0) & (tree.depths > 0)


def cut(verdict: Verdict, evidence: Evidence) -> Verdict:
    """The verdict up to the first node that is `impossible`, and there the target's own token.

    So bans and constraints hold under any rule, one that accepts by chance and one of a user's included, and a step
    still adds a token. A `next_token` with a logit of -inf gives way to the target's own as well. A lossless rule never
    has either.
    """
    accepted, place = verdict.num_accepted, jnp.arange(verdict.path.shape[1], dtype=jnp.int32)[None]
    # Edge d leads from path[d] to path[d + 1]; only the first `accepted` of them were taken.
    wrong = pick(impossible(evidence), verdict.path[:, 1:]) & (place[:, :-1] < accepted[:, None])
    kept = jnp.minimum(leading(~wrong), accepted)
    last = pick(verdict.path, kept[:, None])  # i32[B, 1]
    # Keyed by the position, so this is the token that autoregression would draw there.
    own = sample(
        evidence.keys, pick(evidence.positions, last), gather_path(evidence.logits, last), evidence.controls
    )[:, 0]
    # A rule may name a token of its own that the request forbids, of which the row of the last node knows.
    never = at_tokens(evidence.logits, last, verdict.next_token[:, None])[:, 0] == -jnp.inf
    return dataclasses.replace(
        verdict,
        path=jnp.where(place <= kept[:, None], verdict.path, last),
        num_accepted=kept,
        next_token=jnp.where((kept < accepted) | never, own, verdict.next_token),
        relaxed=verdict.relaxed & (place[:, :-1] < kept[:, None]),
    )
