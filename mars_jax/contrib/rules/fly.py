"""A relaxed rule that looks ahead at the tokens that follow in the draft. B batch, N nodes.

Tested against the same decisions, made node by node in Python, in tests/verify/test_edges.py.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.contrib.rules.phrase import check_window
from mars_jax.core import struct
from mars_jax.core.drafter import Drafter
from mars_jax.core.sampling import top_k_logits
from mars_jax.core.types import DraftTree
from mars_jax.verify import Evidence, Exact, Range, Relaxed, at_parent, node_stats, register
from mars_jax.verify.exact import target_tokens
from mars_jax.verify.ranges import WHOLE

# Thresholds that `calibrate` and `benchmark` try, from strict to loose.
UNSURE = (1.05, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)


@register("fly", paper="2511.22972")
@struct.dataclass(kw_only=True)
class Fly(Relaxed):
    """Also accept a drafted token if the target is unsure and agrees with the next drafted tokens.

    FLy (arXiv 2511.22972): if the target is unsure, accept any drafted token after which it agrees with the draft.

    The target is unsure if the entropy of its three largest probabilities, not renormalised, is at least `entropy`
    nats. It agrees if it would choose the next `window` drafted tokens itself. A mismatch whose window extends past the
    end of the draft is rejected, so drafts must be longer than the window. All other decisions are those of `exact()`.
    The rule is lossy. With entropy = inf, it equals `exact()` bit for bit.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 9.0, 0.0], [0.0, 0.0, 0.0, 9.0]]])
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 3, 2]], jnp.int32)), z)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 1)(evidence)[0].num_accepted[0])
    >>> [int(accepted(Fly(window=w))) for w in (1, 2)]
    [2, 0]
    """

    # f32[] or [B]; nats
    entropy: Any = struct.setting(
        default=0.3,
        ranges=Range(
            "a number from 0 to ln 3, or inf, which is strict", 0, math.log(3), inf=True, grid=UNSURE
        ),
        help="entropy of the three largest probabilities, in nats, from which the target is unsure; inf never relaxes",
    )
    # i32[] or [B]; tokens
    window: Any = struct.setting(
        default=6,
        kind=int,
        ranges=WHOLE,
        help="number of following draft tokens that must be the target's own; drafts must be longer",
    )
    base: ClassVar[Exact] = Exact()

    def check_drafter(self, drafter: Drafter) -> None:
        """Raise MarsError if the drafter's drafts are not longer than the window."""
        check_window("fly", self.window, drafter)

    def relaxable(self, evidence: Evidence) -> Array:
        tree = evidence.tree
        logsumexp = node_stats(evidence.logits, logsumexp=True).logsumexp
        assert logsumexp is not None
        top_probs = jnp.exp(top_k_logits(evidence.logits, 3).values - logsumexp[..., None])
        is_unsure = jnp.sum(jax.scipy.special.entr(top_probs), axis=-1) >= self.entropy[:, None]
        # bool[B, N]; True at nodes whose token is the target's choice.
        is_native = (tree.tokens == at_parent(tree, target_tokens(evidence))) & (tree.depths > 0)
        return at_parent(tree, is_unsure) & (followed(tree, is_native) >= self.window[:, None])


def followed(tree: DraftTree, native: Array) -> Array:
    """Return i32[B, N]: for each node, the length of the longest path of `native` (bool[B, N]) nodes below it.

    >>> from mars_jax.core.tree import chain
    >>> followed(chain(jnp.zeros((1, 4), jnp.int32)), jnp.asarray([[False, False, True, True]])).tolist()
    [[0, 2, 1, 0]]
    """
    to_parents = jax.vmap(lambda lengths, parents: jnp.zeros_like(lengths).at[parents].max(lengths))
    # After d iterations, `path_length` counts paths of up to d edges.
    path_length = jnp.zeros(native.shape, jnp.int32)
    for _ in range(tree.max_depth):
        longer_path = jnp.where(native, path_length + 1, 0)
        path_length = to_parents(longer_path, jnp.maximum(tree.parents, 0))
    return path_length
