"""A relaxed rule that bounds the total regret of a phrase of drafted tokens. B batch, N nodes.

Tested against the same sums, computed path by path in Python, in tests/contrib/test_phrases.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from mars_jax.core import struct
from mars_jax.core.drafter import Drafter
from mars_jax.core.sampling import at_tokens
from mars_jax.core.types import DraftTree
from mars_jax.utils.errors import MarsError
from mars_jax.verify import Evidence, Exact, Relaxed, at_parent, register
from mars_jax.verify.ranges import WHOLE, nats


@register("phrase", paper="after 2511.22972")
@struct.dataclass(kw_only=True)
class Phrase(Relaxed):
    """Also accept drafted phrases that score slightly below the target's own choices, within a bound in nats.

    A drafted token is accepted if the regrets of this token and of the next `window` tokens sum to less than `bound`.

    The regret of a token is the log-probability of the target's best token at that position minus its own. So the sum
    measures how far the drafted phrase is from the target's choices along the draft. (Comparing it with the target's
    own continuation would take another forward pass.) In a tree, the sum is the smallest over all paths below the
    token. A mismatch whose phrase extends past the end of the draft is rejected. FLy (`fly`) instead requires that the
    following tokens are the target's own. All other decisions are the same as under `exact()`. The rule is lossy. With
    bound = 0, it equals `exact()` bit for bit.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[0.0, 1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 9.0], [0.0, 0.0, 0.0, 9.0]]])
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 2, 3]], jnp.int32)), z)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 1)(evidence)[0].num_accepted[0])
    >>> [int(accepted(Phrase(bound=b, window=1))) for b in (0.6, 0.4)]
    [2, 0]
    """

    # f32[] or [B]; nats
    bound: Any = struct.setting(
        default=1.0,
        ranges=nats("a finite number of at least 0 (0 is strict)", (0.25, 0.5, 1.0, 2.0, 4.0)),
        help="bound on the total regret of the phrase, in nats; 0 never relaxes",
    )
    # i32[] or [B]; number of tokens after the relaxed one
    window: Any = struct.setting(
        default=2,
        kind=int,
        ranges=WHOLE,
        help="number of tokens in the phrase after the relaxed one; drafts must be longer",
    )
    base: ClassVar[Exact] = Exact()

    def check_drafter(self, drafter: Drafter) -> None:
        """Raise MarsError if the drafter's drafts are not longer than the window."""
        check_window("phrase", self.window, drafter)

    def relaxable(self, evidence: Evidence) -> Array:
        return stretch(evidence.tree, regrets(evidence), self.window) < self.bound[:, None]


def check_window(rule: str, window: ArrayLike, drafter: Drafter) -> None:
    """Raise MarsError if a drafter's drafts are not longer than the window of a rule that looks ahead."""
    min_window = int(np.min(np.asarray(window)))
    if drafter.max_depth <= min_window:
        raise MarsError(
            f"window is {min_window}, and this draft is {drafter.max_depth} tokens deep, so that the rule {rule} could "
            "relax nothing: draft deeper, or give a smaller window."
        )


def regrets(evidence: Evidence) -> Array:
    """Return the regret of the token at each node, f32[B, N], in nats; inf for padding and the root."""
    tree = evidence.tree
    token_logit = at_tokens(evidence.logits, jnp.maximum(tree.parents, 0), jnp.maximum(tree.tokens, 0))
    shortfall = at_parent(tree, evidence.stats.top1) - token_logit
    return jnp.where((tree.tokens >= 0) & (tree.depths > 0), shortfall, jnp.inf)


def stretch(tree: DraftTree, costs: Array, window: Array) -> Array:
    """Return f32[B, N], the minimum sum of `costs` f32[B, N] over a node and a path of `window` i32[B] nodes below it.

    The sum is inf if no path below the node is that long.

    >>> from mars_jax.core.tree import chain
    >>> costs = jnp.asarray([[jnp.inf, 1.0, 2.0, 4.0]])
    >>> stretch(chain(jnp.zeros((1, 4), jnp.int32)), costs, jnp.asarray([1])).tolist()
    [[inf, 3.0, 6.0, inf]]
    """
    to_parents = jax.vmap(lambda sums, parents: jnp.full_like(sums, jnp.inf).at[parents].min(sums))
    parents = jnp.maximum(tree.parents, 0)
    # After iteration `length`, sums[:, n] is the minimum sum over node n and a path of `length` nodes below it.
    sums = window_sums = costs
    for length in range(1, tree.max_depth):
        sums = costs + to_parents(jnp.where(tree.depths > 0, sums, jnp.inf), parents)
        window_sums = jnp.where((window == length)[:, None], sums, window_sums)
    return jnp.where((window < tree.max_depth)[:, None], window_sums, jnp.inf)
