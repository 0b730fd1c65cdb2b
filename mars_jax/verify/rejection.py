"""Speculative sampling with the true q of a sampled draft: token-wise and block verification, for chains.

B batch, N nodes (K = N - 1 drafted), V vocabulary. p is the softmax of the processed target logits, q that of
`tree.draft_logits`, or the one-hot of the drafted token where they are None. Oracle: exact enumeration of
tiny vocabularies in tests/verify/test_rejection.py.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.errors import MarsError
from mars_jax.core.sampling import at_tokens, inverse_cdf, is_greedy, node_uniforms, process
from mars_jax.core.types import Controls, DraftTree, Verdict
from mars_jax.verify.exact import Exact
from mars_jax.verify.stops import is_stop


@dataclasses.dataclass(frozen=True)
class Rejection:
    """See `rejection`."""

    block: bool

    @property
    def name(self) -> str:
        return "block" if self.block else "rejection"

    def __call__(self, keys: Array, tree: DraftTree, logits: Array, controls: Controls) -> Verdict:
        return self.relax(keys, tree, logits, controls, None)

    def relax(
        self, keys: Array, tree: DraftTree, logits: Array, controls: Controls, relaxable: Array | None
    ) -> Verdict:
        """As the call; the edge before which the rule stops is also taken where `relaxable` bool[B, N].

        The token the rule would have emitted there is drawn first. The edge is relaxed unless that token is a
        stop token of the row (it is emitted, as in the strict rule), equals the drafted token, or the run of
        relaxed edges is at its limit. Verification then starts afresh behind the relaxed token, block
        verification with a fresh block. The uniforms of a fresh start are keyed by the node it starts at, so
        the first stretch, all there is without relaxation, draws the same ones with and without it.

        What follows a relaxed token is the target's own continuation, exactly so token-wise. Where a block
        stops depends on the tokens drafted behind the stop, so that these are no longer samples of q, and the
        fresh block is lossless only nearly.
        """
        if not tree.is_chain:
            raise MarsError(
                "rejection needs a chain of drafted tokens and got a tree: verify trees with exact()."
            )
        # With p one-hot, accepting with p / q and emitting the residual is what exact does, without the sums.
        return jax.lax.cond(
            jnp.all(is_greedy(controls)),
            lambda: Exact().relax(keys, tree, logits, controls, relaxable),
            lambda: self._sampled(keys, tree, logits, controls, relaxable),
        )

    def _sampled(
        self, keys: Array, tree: DraftTree, logits: Array, controls: Controls, relaxable: Array | None
    ) -> Verdict:
        batch, n = tree.tokens.shape
        ratios = _Ratios.of(tree, process(logits, controls))
        stop_of = _block_stop if self.block else _token_stop

        def stretch(start: Array) -> tuple[Array, Array]:
            """From node `start` i32[B]: the node where the rule stops, and the token it emits there."""
            stretch_keys = jax.vmap(jax.random.fold_in)(keys, start)
            accept_keys, draw_keys = (
                jax.vmap(jax.random.fold_in, (0, None))(stretch_keys, i) for i in (0, 1)
            )
            stop, scale = stop_of(ratios, node_uniforms(accept_keys, n), start)
            return stop, inverse_cdf(
                ratios.residual(stop, scale),
                jax.vmap(functools.partial(jax.random.uniform, dtype=jnp.float32))(draw_keys),
            )

        def verdict(stop: Array, token: Array, relaxed: Array) -> Verdict:
            path = jnp.minimum(jnp.arange(n, dtype=jnp.int32)[None], stop[:, None])
            return Verdict(path=path, num_accepted=stop, next_token=token, relaxed=relaxed)

        nothing = jnp.zeros((batch, n - 1), bool)
        stop, token = stretch(jnp.zeros((batch,), jnp.int32))
        if relaxable is None or n == 1:
            return verdict(stop, token, nothing)

        def overridable(start: Array, stop: Array, token: Array, run: Array) -> tuple[Array, Array]:
            edge = jnp.minimum(stop + 1, n - 1)[:, None]
            run = jnp.where(stop > start, 0, run)  # accepted edges in between end the run
            drafted = jnp.take_along_axis(tree.tokens, edge, axis=1)[:, 0]
            allowed = jnp.take_along_axis(relaxable, edge, axis=1)[:, 0] & (stop < ratios.length)
            allowed = (
                allowed & (drafted != token) & ~is_stop(token, controls) & (run < controls.max_relaxed_run)
            )
            return allowed, run

        def go_on(carry):
            start, stop, token, run, relaxed = carry
            take, run = overridable(start, stop, token, run)
            relaxed = relaxed | (take[:, None] & (jnp.arange(n - 1, dtype=jnp.int32)[None] == stop[:, None]))
            start = jnp.where(take, stop + 1, start)
            new_stop, new_token = stretch(start)
            return (
                start,
                jnp.where(take, new_stop, stop),
                jnp.where(take, new_token, token),
                jnp.where(take, run + 1, run),
                relaxed,
            )

        def unfinished(carry):
            start, stop, token, run, _ = carry
            return jnp.any(overridable(start, stop, token, run)[0])

        origin = jnp.zeros((batch,), jnp.int32)
        _, stop, token, _, relaxed = jax.lax.while_loop(
            unfinished, go_on, (origin, stop, token, origin, nothing)
        )
        return verdict(stop, token, relaxed)


@dataclasses.dataclass(frozen=True)
class _Ratios:
    """What both rules read: p and q at the drafted tokens, and the distributions behind them."""

    tree: DraftTree
    length: Array  # i32[B]; drafted tokens before the first padding node
    log_p: Array  # f32[B, N, V]; processed target logits, unnormalised
    log_q: Array | None
    norm_p: Array  # f32[B, N]; logsumexp
    norm_q: Array | None
    ratio: Array  # f32[B, K]; p / q of node i + 1 at node i, in [0, inf]

    @staticmethod
    def of(tree: DraftTree, log_p: Array) -> _Ratios:
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
        """Weights f32[B, V] of the emitted token: (scale p - q)+ at node `stop`, and p behind the last
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
    # 0 / 0 is r = 1 with p = q behind it: the prefix is certain, and so is a longer one.
    h = jnp.where(
        node == ratios.length[:, None], r, jnp.where(over > 0, left / jnp.where(over > 0, over, 1.0), 1.0)
    )
    keep = (uniforms < h) & (node <= ratios.length[:, None]) & (node > start[:, None])
    stop = jnp.max(jnp.where(keep, node, start[:, None]), axis=1)
    return stop, jnp.take_along_axis(r, stop[:, None], axis=1)[:, 0]


def rejection(block: bool = False) -> Rejection:
    """Accept drafted tokens so that the output follows the target exactly, whatever q is; chains only.

    Token-wise (2211.17192, 2302.01318): accept x with min(1, p / q), else emit a sample of norm((p - q)+); a
    sample of p follows when all are accepted. `block=True` (2403.10444) decides on the block as a whole:
    never fewer accepted tokens in expectation. Padding nodes shorten the row's chain. Rows with temperature 0
    are exact.

    Raises (when called): MarsError where the tree is not a chain.

    >>> from mars_jax.core.controls import make_controls
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.eye(4, dtype=jnp.float32)[None, 1:4]
    >>> keys = jax.random.split(jax.random.key(0), 1)
    >>> verdict = rejection()(keys, chain(jnp.asarray([[0, 1, 3]], jnp.int32)), z, make_controls(1, limit=9))
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
    ([1], [2])
    """
    return Rejection(block=block)
