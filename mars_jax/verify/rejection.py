"""Speculative sampling with the true q of a sampled draft: token-wise and block verification, for chains.

B batch, N nodes (K = N - 1 drafted), V vocabulary. p is the softmax of the processed target logits, q that of
`tree.draft_logits`, or the one-hot of the drafted token where they are None. Oracle: exact enumeration of
tiny vocabularies in tests/verify/test_rejection.py.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.controls import is_stop
from mars_jax.core.errors import MarsError
from mars_jax.core.evidence import Evidence
from mars_jax.core.sampling import at_tokens, inverse_cdf, is_greedy, node_uniforms, process
from mars_jax.core.tree import Allowance
from mars_jax.core.types import DraftTree, Verdict
from mars_jax.verify.exact import Exact


@flax.struct.dataclass
class Rejection:
    """Accept drafted tokens so that the output follows the target exactly, whatever q is; chains only.

    Token-wise (2211.17192, 2302.01318): accept x with min(1, p / q), else emit a sample of norm((p - q)+); a
    sample of p follows when all are accepted. `block=True` (2403.10444) decides on the block as a whole:
    never fewer accepted tokens in expectation. Padding nodes shorten the row's chain. Rows with temperature 0
    are exact.
    """

    block: bool = flax.struct.field(pytree_node=False, default=False)
    lossless: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("chain",)

    @property
    def name(self) -> str:
        return "block" if self.block else "rejection"

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Rejection]:
        return self.relax(evidence, None), self

    def relax(self, evidence: Evidence, allowed: Allowance | None) -> Verdict:
        """As the call; the edge before which the rule stops is also taken where `allowed` says so.

        Not where the token that the rule would emit instead is a stop token. From the relaxed token on the
        rule starts afresh, so the tokens after it are verified as if they were a draft of their own. In blocks the
        rest of the draft has taken part in deciding the stop, so that these are no longer samples of q, and the
        fresh block is lossless only nearly.
        """
        check_chain(evidence.tree, self.name)
        # With p one-hot, accepting with p / q and emitting the residual is what exact does, without the sums.
        return jax.lax.cond(
            jnp.all(is_greedy(evidence.controls)),
            lambda: Exact().relax(evidence, allowed),
            lambda: verify_chain(evidence, process(evidence.logits, evidence.controls), allowed, self.block),
        )


def check_chain(tree: DraftTree, rule: str) -> None:
    """Raise MarsError for a tree that is no chain."""
    if not tree.is_chain:
        raise MarsError(f"{rule} needs a chain of drafted tokens and got a tree: verify trees with exact().")


class _Walked(NamedTuple):
    """Where a row stands while a lossy rule overrides the stops of rejection, [B] each but `relaxed`."""

    start: Array  # i32; the node from which the rule has started afresh
    stop: Array  # i32; the node where it stops
    token: Array  # i32; what it emits there
    run: Array  # i32; relaxed edges in a row
    spent: Array  # f32
    relaxed: Array  # bool[B, K]


def verify_chain(evidence: Evidence, log_v: Array, allowed: Allowance | None, block: bool) -> Verdict:
    """Verify a chain against the distribution of log_v, by rejection.

    Args:
      evidence: of the step.
      log_v: f32[B, N, V]; processed logits of what the output is to follow: the target's, or another distribution.
      allowed: the edges that may be relaxed where the rule stops.
      block: by blocks instead of token by token.
    """
    tree, stop_tokens = evidence.tree, evidence.controls.stop_tokens
    batch, n = tree.tokens.shape
    ratios = _Ratios.of(tree, log_v)
    accept_keys, draw_keys = jnp.unstack(jax.vmap(jax.random.split)(evidence.keys), axis=1)

    def stretch(start: Array) -> tuple[Array, Array]:
        """From node `start` i32[B]: the node where the rule stops, and the token it emits there."""
        if block:
            # A block decides on all of its numbers at once, so that the next one may see none of them again.
            keys = jax.vmap(jax.random.fold_in)(accept_keys, evidence.start + start)
            stop, scale = _block_stop(ratios, node_uniforms(keys, evidence.positions), start)
        else:
            stop, scale = _token_stop(ratios, node_uniforms(accept_keys, evidence.positions), start)
        drawn = node_uniforms(draw_keys, (evidence.start + stop)[:, None])[:, 0]
        return stop, inverse_cdf(ratios.residual(stop, scale), drawn)

    def verdict(stop: Array, token: Array, relaxed: Array) -> Verdict:
        path = jnp.minimum(jnp.arange(n, dtype=jnp.int32)[None], stop[:, None])
        return Verdict(path=path, num_accepted=stop, next_token=token, relaxed=relaxed)

    origin, nothing = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, n - 1), bool)
    stop, token = stretch(origin)
    if allowed is None or n == 1:
        return verdict(stop, token, nothing)

    def override(at: _Walked) -> tuple[Array, Array, Array]:
        """bool[B]: the edge after the stop is taken all the same; and the run and the sum that it would join."""
        edge = jnp.minimum(at.stop + 1, n - 1)[:, None]
        run = jnp.where(at.stop > at.start, 0, at.run)  # accepted edges in between end the run
        drafted = jnp.take_along_axis(tree.tokens, edge, axis=1)[:, 0]
        take = jnp.take_along_axis(allowed.edges, edge, axis=1)[:, 0] & (at.stop < ratios.length)
        take &= (drafted != at.token) & ~is_stop(at.token, stop_tokens) & (run < allowed.max_run)
        if allowed.max_relaxed is not None:
            take &= jnp.sum(at.relaxed, axis=1, dtype=jnp.int32) < allowed.max_relaxed
        spent = at.spent
        if allowed.cost is not None and allowed.budget is not None:
            spent = spent + jnp.take_along_axis(allowed.cost, edge, axis=1)[:, 0]
            take &= spent <= allowed.budget
        return take, run, spent

    def go_on(at: _Walked) -> _Walked:
        take, run, spent = override(at)
        start = jnp.where(take, at.stop + 1, at.start)
        stop, token = stretch(start)
        here = jnp.arange(n - 1, dtype=jnp.int32)[None] == at.stop[:, None]
        return _Walked(
            start=start,
            stop=jnp.where(take, stop, at.stop),
            token=jnp.where(take, token, at.token),
            run=jnp.where(take, run + 1, run),
            spent=jnp.where(take, spent, at.spent),
            relaxed=at.relaxed | (take[:, None] & here),
        )

    begin = _Walked(origin, stop, token, origin, jnp.zeros((batch,), jnp.float32), nothing)
    end = jax.lax.while_loop(lambda at: jnp.any(override(at)[0]), go_on, begin)
    return verdict(end.stop, end.token, end.relaxed)


@dataclasses.dataclass(frozen=True)
class _Ratios:
    """What both rules read: p and q at the drafted tokens, and their distributions."""

    tree: DraftTree
    length: Array  # i32[B]; drafted tokens before the first padding node
    log_p: Array  # f32[B, N, V]; processed target logits, unnormalised
    log_q: Array | None
    norm_p: Array  # f32[B, N]; logsumexp
    norm_q: Array | None
    ratio: Array  # f32[B, K]; p / q of node i + 1 at node i, in [0, inf]

    @staticmethod
    def of(tree: DraftTree, log_p: Array) -> _Ratios:
        """Of a tree and the processed logits f32[B, N, V] that its tokens are verified against."""
        drafted = tree.tokens[:, 1:]
        nodes = jnp.broadcast_to(jnp.arange(drafted.shape[1], dtype=jnp.int32), drafted.shape)
        length = jnp.sum(jnp.cumprod((drafted >= 0).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        norm_p = jax.nn.logsumexp(log_p, axis=-1)
        log_q, norm_q = tree.draft_logits, None

        def at_drafted(logits: Array, norm: Array) -> Array:
            picked = at_tokens(logits, nodes, jnp.maximum(drafted, 0))
            # A q rounded above 1 would refuse a token that is certain.
            return jnp.minimum(picked - norm[:, :-1], 0.0)

        ratio = at_drafted(log_p, norm_p)
        if log_q is not None:
            norm_q = jax.nn.logsumexp(log_q, axis=-1)
            ratio = ratio - at_drafted(log_q, norm_q)
        # NaN is a token that neither p nor q allows: refused.
        return _Ratios(tree, length, log_p, log_q, norm_p, norm_q, jnp.nan_to_num(jnp.exp(ratio)))

    def p(self) -> Array:
        """f32[B, K, V]"""
        return jnp.exp(self.log_p[:, :-1] - self.norm_p[:, :-1, None])

    def q(self) -> Array:
        """f32[B, K, V]"""
        if self.log_q is None or self.norm_q is None:
            ids = jnp.arange(self.log_p.shape[-1], dtype=jnp.int32)[None, None]
            return (self.tree.tokens[:, 1:, None] == ids).astype(jnp.float32)
        return jnp.exp(self.log_q[:, :-1] - self.norm_q[:, :-1, None])

    def residual(self, stop: Array, scale: Array) -> Array:
        """Weights f32[B, V] of the emitted token: (scale p - q)+ at node `stop`, and p after the last
        token."""

        def row(values: Array) -> Array:
            return jnp.take_along_axis(values, stop.reshape((-1,) + (1,) * (values.ndim - 1)), axis=1)[:, 0]

        p = jnp.exp(row(self.log_p) - row(self.norm_p)[:, None])
        if self.log_q is None or self.norm_q is None:
            refused = row(jnp.pad(self.tree.tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1))
            q = (refused[:, None] == jnp.arange(p.shape[-1], dtype=jnp.int32)[None]).astype(jnp.float32)
        else:
            q = jnp.exp(row(self.log_q) - row(self.norm_q)[:, None])
        weights = jnp.maximum(scale[:, None] * p - q, 0.0)
        # Where p equals q up to rounding nothing may be left; then p itself is within rounding of right.
        use_p = (stop >= self.length) | ~(jnp.sum(weights, axis=-1) > 0)
        return jnp.where(use_p[:, None], p, weights)


def _token_stop(ratios: _Ratios, uniforms: Array, start: Array) -> tuple[Array, Array]:
    """Leviathan et al. 2211.17192, Algorithm 1; Chen et al. 2302.01318. -> (stop i32[B], scale of p
    f32[B])."""
    edge = jnp.arange(ratios.ratio.shape[1], dtype=jnp.int32)[None]
    accepted = (uniforms[:, 1:] < ratios.ratio) & (edge < ratios.length[:, None])
    accepted = accepted | (edge < start[:, None])
    stop = jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return stop, jnp.ones(start.shape, jnp.float32)


def _block_stop(ratios: _Ratios, uniforms: Array, start: Array) -> tuple[Array, Array]:
    """Block verification, Sun et al. 2403.10444, Algorithm 2. -> (stop i32[B], scale of p f32[B]).

    r is the running min(r p / q, 1); the longest prefix i with u_i < h_i is kept, not the first failure.
    """
    n = ratios.ratio.shape[1] + 1
    node = jnp.arange(n, dtype=jnp.int32)[None]
    r = [jnp.ones(start.shape, jnp.float32)]
    for i in range(n - 1):
        r.append(jnp.where(i < start, 1.0, jnp.minimum(r[-1] * ratios.ratio[:, i], 1.0)))
    r = jnp.stack(r, axis=1)  # f32[B, N]
    left = jnp.sum(jnp.maximum(r[:, :-1, None] * ratios.p() - ratios.q(), 0.0), axis=-1)
    left = jnp.pad(left, ((0, 0), (0, 1)))
    over = left + 1.0 - r
    # 0 / 0 is r = 1 with p = q after it: the prefix is certain, and so is a longer one.
    h = jnp.where(
        node == ratios.length[:, None], r, jnp.where(over > 0, left / jnp.where(over > 0, over, 1.0), 1.0)
    )
    keep = (uniforms < h) & (node <= ratios.length[:, None]) & (node > start[:, None])
    stop = jnp.max(jnp.where(keep, node, start[:, None]), axis=1)
    return stop, jnp.take_along_axis(r, stop[:, None], axis=1)[:, 0]


def rejection(block: bool = False) -> Rejection:
    """Speculative sampling; see `Rejection`.

    Args:
      block: decide on the block as a whole.

    Raises (when called): MarsError where the tree is not a chain.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.eye(4, dtype=jnp.float32)[None, 1:4]
    >>> verdict, _ = rejection()(verify.evidence(chain(jnp.asarray([[0, 1, 3]], jnp.int32)), z))
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
    ([1], [2])
    """
    return Rejection(block=block)
