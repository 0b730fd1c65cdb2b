"""Speculative sampling: verify sampled drafts using the probabilities from which they were sampled.

p is the softmax of the processed target logits. q is the softmax of `tree.draft_logits`, or the one-hot distribution of
the drafted token if `draft_logits` is None.

Tested against exact enumeration of tiny vocabularies (tests/verify/test_rejection.py) and of trees
(tests/verify/test_siblings.py).

Dimensions: B batch, N nodes, K = N - 1 drafted tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.pick import leading, pick_one
from mars_jax.core.rule import Evidence, Rule
from mars_jax.core.sampling import at_tokens, if_greedy, inverse_cdf, node_uniforms, process
from mars_jax.core.tree import Allowance, following
from mars_jax.core.types import DraftTree, Verdict
from mars_jax.utils.errors import MarsError
from mars_jax.verify import siblings
from mars_jax.verify.definition import register
from mars_jax.verify.exact import Exact
from mars_jax.verify.override import overridden


def block_setting() -> bool:
    """Declare the dataclass field that selects block verification."""
    return struct.setting(
        default=False, kind=bool, help="verify whole blocks instead of tokens; chains only", flag=True
    )


@register("rejection", paper="2211.17192, 2302.01318; siblings: 2305.09781; block: 2403.10444")
@struct.dataclass(kw_only=True)
class Rejection(Rule):
    """Speculative sampling, which uses the probabilities q from which the draft was sampled.

    The output follows the target's distribution exactly, for any q.

    Token by token (arXiv 2211.17192, 2302.01318): accept a drafted token x with probability min(1, p(x) / q(x)), and
    otherwise emit a sample from norm((p - q)+). If all tokens are accepted, emit a sample from p. In a tree, siblings
    are drawn without replacement and tried in order, each against the residuals of p and q that remain after the
    siblings before it (see `siblings`).

    With `block=True` (arXiv 2403.10444), the drafted tokens of a chain are verified together. The expected number of
    accepted tokens is then at least as large as with token-by-token verification. Padding nodes shorten the draft. Rows
    at temperature 0 use `exact`.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.eye(4, dtype=jnp.float32)[None, 1:4]
    >>> verdict, _ = rejection()(verify.evidence(chain(jnp.asarray([[0, 1, 3]], jnp.int32)), z))
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
    ([1], [2])
    """

    block: bool = block_setting()  # verify all drafted tokens of a chain together
    lossless: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("draft", "q")

    @property
    def name(self) -> str:
        return "block" if self.block else "rejection"

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Rejection]:
        return self.relax(evidence, None), self

    def relax(self, evidence: Evidence, allowed: Allowance | None) -> Verdict:
        """Verify like `__call__`, but instead of stopping, take an edge in `allowed` and continue.

        The edge is not taken if the rule would emit a stop token instead. The rule restarts after the relaxed token,
        and verifies the tokens below it as a new draft. With `block=True`, the verification of the new draft is only
        approximately lossless: its tokens influenced the position at which the first block stopped, so they are no
        longer samples from q.
        """
        if self.block:
            check_chain(evidence.tree, self.name)
        # If all rows are greedy, p is one-hot and rejection is equivalent to `exact`. Use `exact` then, because it
        # needs no sums over the vocabulary.
        return if_greedy(
            evidence.controls,
            lambda: Exact().relax(evidence, allowed),
            lambda: verify_draft(evidence, process(evidence.logits, evidence.controls), allowed, self.block),
        )


rejection = Rejection


def check_chain(tree: DraftTree, rule: str) -> None:
    """Check that the draft is a chain.

    Raises:
      MarsError: the draft is a tree.
    """
    if not tree.is_chain:
        raise MarsError(
            f"{rule} needs a chain of drafted tokens and got a tree: verify trees with exact() or rejection()."
        )


def verify_draft(evidence: Evidence, log_v: Array, allowed: Allowance | None, block: bool) -> Verdict:
    """Verify a draft by rejection sampling, so that the output follows a given distribution.

    Args:
      evidence: evidence of the step.
      log_v: f32[B, N, V]; processed logits of the distribution that the output must follow, such as the target's.
      allowed: edges that may be relaxed when the rule would stop; None allows no edges.
      block: verify whole blocks instead of single tokens; chains only.
    """
    # Use different keys to accept tokens and to sample the next token, because the sample from the residual must not
    # depend on the random number that caused the rejection.
    accept_keys, draw_keys = jnp.unstack(jax.vmap(jax.random.split)(evidence.keys), axis=1)
    if not evidence.tree.is_chain:
        tree_stretch = siblings.sibling_stretch(evidence, log_v, accept_keys, draw_keys)
        return overridden(evidence, tree_stretch, allowed)
    ratios = _Ratios.of(evidence.tree, log_v)

    # In a chain, node ids are depths, so node `start` is at position `evidence.start + start`.
    def stretch(start: Array) -> tuple[Array, Array]:
        if block:
            # The decision about a block depends on all of its random numbers, so the next block must use different
            # ones.
            block_keys = jax.vmap(jax.random.fold_in)(accept_keys, evidence.start + start)
            stop, scale = _block_stop(ratios, node_uniforms(block_keys, evidence.positions), start)
        else:
            stop, scale = _token_stop(ratios, node_uniforms(accept_keys, evidence.positions), start)
        draw_uniform = node_uniforms(draw_keys, (evidence.start + stop)[:, None])[:, 0]
        return stop, inverse_cdf(ratios.residual(stop, scale), draw_uniform)

    return overridden(evidence, stretch, allowed)


@dataclasses.dataclass(frozen=True)
class _Ratios:
    """Distributions p and q along a chain, and the ratio p / q of each drafted token."""

    tree: DraftTree
    length: Array  # i32[B]; number of drafted tokens before the first padding node
    log_p: Array  # f32[B, N, V]; processed target logits, not normalised
    log_q: Array | None  # f32[B, N, V]; draft logits, not normalised; None for a deterministic draft
    norm_p: Array  # f32[B, N]; logsumexp of log_p
    norm_q: Array | None  # f32[B, N]; logsumexp of log_q
    ratio: Array  # f32[B, K]; entry i is p / q for the token of node i + 1, in [0, inf]

    @staticmethod
    def of(tree: DraftTree, log_p: Array) -> _Ratios:
        """Compute the ratios of a chain, given the processed target logits f32[B, N, V]."""
        drafted = tree.tokens[:, 1:]
        nodes = jnp.broadcast_to(jnp.arange(drafted.shape[1], dtype=jnp.int32), drafted.shape)
        norm_p = jax.nn.logsumexp(log_p, axis=-1)
        log_q, norm_q = tree.draft_logits, None

        def at_drafted(logits: Array, norm: Array) -> Array:
            drafted_logit = at_tokens(logits, nodes, jnp.maximum(drafted, 0))
            # The logits of node i predict the token of node i + 1, and the last logits predict no node, so drop the
            # last entry of `norm`. Limit the result to log 1: if rounding made q exceed 1, a token with probability 1
            # could be rejected.
            return jnp.minimum(drafted_logit - norm[:, :-1], 0.0)

        # In a deterministic draft, q(x) is 1 for each drafted token x, so log(p / q) is log p.
        log_ratio = at_drafted(log_p, norm_p)
        if log_q is not None:
            norm_q = jax.nn.logsumexp(log_q, axis=-1)
            log_ratio = log_ratio - at_drafted(log_q, norm_q)
        # The ratio is NaN if the token has probability 0 under both p and q. Replace it with 0, to reject the token.
        return _Ratios(
            tree, leading(drafted >= 0), log_p, log_q, norm_p, norm_q, jnp.nan_to_num(jnp.exp(log_ratio))
        )

    def p(self) -> Array:
        """Return the distributions p against which the drafted tokens are verified, f32[B, K, V]."""
        return jnp.exp(self.log_p[:, :-1] - self.norm_p[:, :-1, None])

    def q(self) -> Array:
        """Return the distributions q from which the drafted tokens were sampled, f32[B, K, V]."""
        if self.log_q is None or self.norm_q is None:
            ids = jnp.arange(self.log_p.shape[-1], dtype=jnp.int32)[None, None]
            return (self.tree.tokens[:, 1:, None] == ids).astype(jnp.float32)
        return jnp.exp(self.log_q[:, :-1] - self.norm_q[:, :-1, None])

    def residual(self, stop: Array, scale: Array) -> Array:
        """Return the weights f32[B, V] from which the next token is sampled: (scale p - q)+ at node `stop`.

        If all drafted tokens were accepted, the weights are p.
        """
        p = jnp.exp(pick_one(self.log_p, stop) - pick_one(self.norm_p, stop)[:, None])
        # Compute q at the same node. For a deterministic draft, q is the one-hot distribution of the drafted token.
        if self.log_q is None or self.norm_q is None:
            next_token = pick_one(following(self.tree), stop)
            q = (next_token[:, None] == jnp.arange(p.shape[-1], dtype=jnp.int32)[None]).astype(jnp.float32)
        else:
            q = jnp.exp(pick_one(self.log_q, stop) - pick_one(self.norm_q, stop)[:, None])
        weights = jnp.maximum(scale[:, None] * p - q, 0.0)
        # If no token was rejected, the bonus token is sampled from p. If p equals q up to rounding, the residual may be
        # zero everywhere, and sampling from p is correct up to rounding.
        use_p = (stop >= self.length) | ~(jnp.sum(weights, axis=-1) > 0)
        return jnp.where(use_p[:, None], p, weights)


def _token_stop(ratios: _Ratios, uniforms: Array, start: Array) -> tuple[Array, Array]:
    """Find the node where token-wise rejection stops (Leviathan et al., arXiv 2211.17192, Algorithm 1).

    Chen et al., arXiv 2302.01318, describe the same algorithm.

    Returns:
      The node i32[B], and the factor f32[B] by which p is scaled in the residual.
    """
    edge = jnp.arange(ratios.ratio.shape[1], dtype=jnp.int32)[None]
    # Edge i leads to node i + 1, and uses the random number u of that node's position. Since u < 1, the test u < p / q
    # is equivalent to u < min(1, p / q).
    is_accepted = (uniforms[:, 1:] < ratios.ratio) & (edge < ratios.length[:, None])
    # The edges up to node `start` have been taken already.
    is_accepted = is_accepted | (edge < start[:, None])
    return leading(is_accepted), jnp.ones(start.shape, jnp.float32)


def _block_stop(ratios: _Ratios, uniforms: Array, start: Array) -> tuple[Array, Array]:
    """Find the node where block verification stops (Sun et al., arXiv 2403.10444, Algorithm 2).

    Accept the longest prefix i with u_i < h_i, even if shorter prefixes fail this test.

    Returns:
      The node i32[B], and the factor f32[B] by which p is scaled in the residual.
    """
    n = ratios.ratio.shape[1] + 1
    node = jnp.arange(n, dtype=jnp.int32)[None]
    # Given the values of the first i drafted tokens, r_i of the paper is the probability that at least these i tokens
    # are accepted: r_0 = 1 and r_i = min(r_(i - 1) p / q, 1) for the token of node i. If the rule restarts at node
    # `start`, r_start = 1.
    r = [jnp.ones(start.shape, jnp.float32)]
    for i in range(n - 1):
        r.append(jnp.where(i < start, 1.0, jnp.minimum(r[-1] * ratios.ratio[:, i], 1.0)))
    r = jnp.stack(r, axis=1)  # f32[B, N]
    # m_i of the paper, f32[B, K], is the sum of (r_i p - q)+ over the next token. Node N - 1 has no next token.
    m = jnp.sum(jnp.maximum(r[:, :-1, None] * ratios.p() - ratios.q(), 0.0), axis=-1)
    m = jnp.pad(m, ((0, 0), (0, 1)))
    # h_i = m_i / (m_i + 1 - r_i), and h_K = r_K at the last drafted token. If h_i is 0 / 0, then r_i = 1, and p = q for
    # the next token, so r_(i + 1) = 1. Prefix i + 1 then always passes the test, and the value of h_i does not matter.
    divisor = m + 1.0 - r
    h = jnp.where(
        node == ratios.length[:, None],
        r,
        jnp.where(divisor > 0, m / jnp.where(divisor > 0, divisor, 1.0), 1.0),
    )
    # Take the longest prefix that passes the test. If none passes, stop at `start`.
    passes = (uniforms < h) & (node <= ratios.length[:, None]) & (node > start[:, None])
    stop = jnp.max(jnp.where(passes, node, start[:, None]), axis=1)
    return stop, pick_one(r, stop)
