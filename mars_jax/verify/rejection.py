"""Speculative sampling with the true q of a sampled draft: token by token, or by blocks along chains.

B batch, N nodes (K = N - 1 drafted), V vocabulary. p is the softmax of the processed target logits. q is the
softmax of `tree.draft_logits`, or the one-hot of the drafted token if they are None. Oracle: exact enumeration of tiny
vocabularies in tests/verify/test_rejection.py, and of trees in tests/verify/test_siblings.py.
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
    """Declare the field that selects block verification."""
    return struct.setting(
        default=False, kind=bool, help="by whole blocks, not by tokens; chains only", flag=True
    )


@register("rejection", paper="2211.17192, 2302.01318; siblings: 2305.09781; block: 2403.10444")
@struct.dataclass(kw_only=True)
class Rejection(Rule):
    """Speculative sampling with the draft's true probabilities.

    The output follows the target exactly, for any q.

    Token-wise (2211.17192, 2302.01318): accept x with probability min(1, p / q), else emit a sample of norm((p - q)+);
    if all tokens are accepted, a sample of p follows. In a tree, siblings drawn without replacement are tried in order,
    each against the residuals of p and q that earlier siblings left; see `siblings`. `block=True` (2403.10444) verifies
    the block as a whole, along chains only, and in expectation never accepts fewer tokens. Padding nodes shorten the
    draft. Rows at temperature 0 follow `exact`.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.eye(4, dtype=jnp.float32)[None, 1:4]
    >>> verdict, _ = rejection()(verify.evidence(chain(jnp.asarray([[0, 1, 3]], jnp.int32)), z))
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
    ([1], [2])
    """

    block: bool = block_setting()  # verify the block as a whole
    lossless: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("draft", "q")

    @property
    def name(self) -> str:
        return "block" if self.block else "rejection"

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Rejection]:
        return self.relax(evidence, None), self

    def relax(self, evidence: Evidence, allowed: Allowance | None) -> Verdict:
        """Verify like `__call__`, but when the rule stops, also take the next edge if `allowed` contains it.

        The edge is not taken if the rule would emit a stop token instead. The rule restarts after the relaxed token and
        verifies the tokens below as a new draft. With blocks, the stop already depended on those tokens, so they are no
        longer samples from q. The new block is then only approximately lossless.
        """
        if self.block:
            check_chain(evidence.tree, self.name)
        # For a one-hot p, acceptance with p / q and the residual reduce to `exact`, without sums over the vocabulary.
        return if_greedy(
            evidence.controls,
            lambda: Exact().relax(evidence, allowed),
            lambda: verify_draft(evidence, process(evidence.logits, evidence.controls), allowed, self.block),
        )


rejection = Rejection


def check_chain(tree: DraftTree, rule: str) -> None:
    """Raise MarsError if the tree is not a chain."""
    if not tree.is_chain:
        raise MarsError(
            f"{rule} needs a chain of drafted tokens and got a tree: verify trees with exact() or rejection()."
        )


def verify_draft(evidence: Evidence, log_v: Array, allowed: Allowance | None, block: bool) -> Verdict:
    """Verify a draft against the distribution of log_v, by rejection.

    Args:
      evidence: evidence of the step.
      log_v: f32[B, N, V]; processed logits of the distribution that the output must follow, such as the target's.
      allowed: the edges that may be relaxed when the rule stops.
      block: verify by blocks instead of token by token; chains only.
    """
    # Acceptance and emission use different keys: the residual draw must not depend on the uniform that rejected.
    accept_keys, draw_keys = jnp.unstack(jax.vmap(jax.random.split)(evidence.keys), axis=1)
    if not evidence.tree.is_chain:
        tree_stretch = siblings.sibling_stretch(evidence, log_v, accept_keys, draw_keys)
        return overridden(evidence, tree_stretch, allowed)
    ratios = _Ratios.of(evidence.tree, log_v)

    # On a chain node ids are depths, so node `start` is at position `evidence.start + start`.
    def stretch(start: Array) -> tuple[Array, Array]:
        if block:
            # A block's decision depends on all of its uniforms, so the next block must not reuse any of them.
            block_keys = jax.vmap(jax.random.fold_in)(accept_keys, evidence.start + start)
            stop, scale = _block_stop(ratios, node_uniforms(block_keys, evidence.positions), start)
        else:
            stop, scale = _token_stop(ratios, node_uniforms(accept_keys, evidence.positions), start)
        draw_uniform = node_uniforms(draw_keys, (evidence.start + stop)[:, None])[:, 0]
        return stop, inverse_cdf(ratios.residual(stop, scale), draw_uniform)

    return overridden(evidence, stretch, allowed)


@dataclasses.dataclass(frozen=True)
class _Ratios:
    """Inputs of token-wise and block verification: p and q at the drafted tokens, and their distributions."""

    tree: DraftTree
    length: Array  # i32[B]; drafted tokens before the first padding node
    log_p: Array  # f32[B, N, V]; processed target logits, unnormalised
    log_q: Array | None
    norm_p: Array  # f32[B, N]; logsumexp of log_p
    norm_q: Array | None
    ratio: Array  # f32[B, K]; entry i is p / q of the token of node i + 1, in [0, inf]

    @staticmethod
    def of(tree: DraftTree, log_p: Array) -> _Ratios:
        """Compute the ratios of a chain's tokens under the processed logits f32[B, N, V]."""
        drafted = tree.tokens[:, 1:]
        nodes = jnp.broadcast_to(jnp.arange(drafted.shape[1], dtype=jnp.int32), drafted.shape)
        norm_p = jax.nn.logsumexp(log_p, axis=-1)
        log_q, norm_q = tree.draft_logits, None

        def at_drafted(logits: Array, norm: Array) -> Array:
            drafted_logit = at_tokens(logits, nodes, jnp.maximum(drafted, 0))
            # Row i of the logits predicts node i + 1, and the last row predicts no node, so use `norm[:, :-1]`, f32[B,
            # K]. Clamp at log 1: if q were rounded above 1, a token with probability 1 could be rejected.
            return jnp.minimum(drafted_logit - norm[:, :-1], 0.0)

        # For a deterministic draft, q is 1 at the drafted token, so log p is log(p / q).
        log_ratio = at_drafted(log_p, norm_p)
        if log_q is not None:
            norm_q = jax.nn.logsumexp(log_q, axis=-1)
            log_ratio = log_ratio - at_drafted(log_q, norm_q)
        # NaN marks a token of probability 0 under both p and q: reject it.
        return _Ratios(
            tree, leading(drafted >= 0), log_p, log_q, norm_p, norm_q, jnp.nan_to_num(jnp.exp(log_ratio))
        )

    def p(self) -> Array:
        """Return p at the nodes that predict drafted tokens, f32[B, K, V]."""
        return jnp.exp(self.log_p[:, :-1] - self.norm_p[:, :-1, None])

    def q(self) -> Array:
        """Return q at the same nodes, f32[B, K, V]."""
        if self.log_q is None or self.norm_q is None:
            ids = jnp.arange(self.log_p.shape[-1], dtype=jnp.int32)[None, None]
            return (self.tree.tokens[:, 1:, None] == ids).astype(jnp.float32)
        return jnp.exp(self.log_q[:, :-1] - self.norm_q[:, :-1, None])

    def residual(self, stop: Array, scale: Array) -> Array:
        """Return weights f32[B, V] of the emitted token: (scale p - q)+ at node `stop`, or p after the last token."""
        p = jnp.exp(pick_one(self.log_p, stop) - pick_one(self.norm_p, stop)[:, None])
        # The draft distribution q at the same node; one-hot if the next token was chosen without sampling.
        if self.log_q is None or self.norm_q is None:
            next_token = pick_one(following(self.tree), stop)
            q = (next_token[:, None] == jnp.arange(p.shape[-1], dtype=jnp.int32)[None]).astype(jnp.float32)
        else:
            q = jnp.exp(pick_one(self.log_q, stop) - pick_one(self.norm_q, stop)[:, None])
        weights = jnp.maximum(scale[:, None] * p - q, 0.0)
        # After the last drafted token no token was rejected, and the bonus token is drawn from p. If p equals q up to
        # rounding, the residual may vanish; then p itself is correct up to rounding.
        use_p = (stop >= self.length) | ~(jnp.sum(weights, axis=-1) > 0)
        return jnp.where(use_p[:, None], p, weights)


def _token_stop(ratios: _Ratios, uniforms: Array, start: Array) -> tuple[Array, Array]:
    """Find the stop by token-wise rejection: Leviathan et al. 2211.17192, Algorithm 1; Chen et al. 2302.01318.

    Returns (stop i32[B], scale of p f32[B]).
    """
    edge = jnp.arange(ratios.ratio.shape[1], dtype=jnp.int32)[None]
    # Edge i leads to node i + 1, and uses the uniform of that node's position. Since u < 1, u < p / q is equivalent to
    # u < min(1, p / q).
    is_accepted = (uniforms[:, 1:] < ratios.ratio) & (edge < ratios.length[:, None])
    # The edges up to node `start` have been taken already.
    is_accepted = is_accepted | (edge < start[:, None])
    return leading(is_accepted), jnp.ones(start.shape, jnp.float32)


def _block_stop(ratios: _Ratios, uniforms: Array, start: Array) -> tuple[Array, Array]:
    """Find the stop by block verification: Sun et al. 2403.10444, Algorithm 2.

    r is the running min(r p / q, 1). Accept the longest prefix i with u_i < h_i, even if shorter ones fail.

    Returns (stop i32[B], scale of p f32[B]).
    """
    n = ratios.ratio.shape[1] + 1
    node = jnp.arange(n, dtype=jnp.int32)[None]
    # r_i of the paper: the probability of keeping at least the first i drafted tokens, given these tokens. Node i holds
    # the i-th, and r_0 = 1. In a stretch that begins at `start`, r is 1 up to that node.
    r = [jnp.ones(start.shape, jnp.float32)]
    for i in range(n - 1):
        r.append(jnp.where(i < start, 1.0, jnp.minimum(r[-1] * ratios.ratio[:, i], 1.0)))
    r = jnp.stack(r, axis=1)  # f32[B, N]
    # m_i of the paper, f32[B, K]: the mass of (r_i p - q)+ at the next token. Node N - 1 has no next token.
    m = jnp.sum(jnp.maximum(r[:, :-1, None] * ratios.p() - ratios.q(), 0.0), axis=-1)
    m = jnp.pad(m, ((0, 0), (0, 1)))
    # h_i = m_i / (m_i + 1 - r_i), and h_K = r_K at the last drafted token. 0 / 0 means that r = 1 and p = q: the prefix
    # is certain to be accepted, and so is a longer one.
    divisor = m + 1.0 - r
    h = jnp.where(
        node == ratios.length[:, None],
        r,
        jnp.where(divisor > 0, m / jnp.where(divisor > 0, divisor, 1.0), 1.0),
    )
    # The longest prefix that passes; the start of the stretch always passes.
    passes = (uniforms < h) & (node <= ratios.length[:, None]) & (node > start[:, None])
    stop = jnp.max(jnp.where(passes, node, start[:, None]), axis=1)
    return stop, pick_one(r, stop)
