"""Sampling with temperature, top-k, top-p and min-p, using one uniform number per node; log-probabilities of tokens.

Drafters and rules call the same functions, so that the draft distribution q is processed exactly like the target
distribution p. Dimensions: B batch, N nodes, P path nodes, V vocabulary. Tested against the warpers of transformers and
a sort-based reference (tests/core/test_sampling.py), and against teacher forcing with transformers (tests/serve).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

import kernels_pallas
from kernels_pallas import TopKEntries, sharded_top_k
from mars_jax.core.axes import over_vocabulary
from mars_jax.core.sums import total
from mars_jax.core.types import Controls, DraftTree

T = TypeVar("T")

BLOCK = 128
"""Tokens per partial sum. This is the lane width of a TPU, and it divides 32000, 128256 and 151936, so the usual
vocabularies need no padding."""


_NEG_INF_ORDER = -2139095041  # _to_order(-inf)


def is_greedy(controls: Controls) -> Array:
    """Return bool[B], True in rows with temperature 0 or a subnormal temperature, which XLA flushes to 0."""
    if controls.temperature is None:
        return jnp.ones(controls.limit.shape, bool)
    return controls.temperature < jnp.finfo(jnp.float32).tiny


def divisor(controls: Controls) -> Array:
    """Return the number by which the logits are divided, f32[B]: the temperature, or 1 in greedy rows."""
    if controls.temperature is None:
        return jnp.ones(controls.limit.shape, jnp.float32)
    return jnp.where(is_greedy(controls), 1.0, controls.temperature)


def if_greedy(controls: Controls, greedy: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """Call `greedy()` if every row is greedy, else `otherwise()`; compile only `greedy` if the temperature is None."""
    if controls.temperature is None:
        return greedy()
    return jax.lax.cond(jnp.all(is_greedy(controls)), greedy, otherwise)


def process(logits: Array, controls: Controls) -> Array:
    """Return the processed logits f32[B, N, V], whose softmax is the distribution from which tokens are drawn.

    Apply temperature, top-k, top-p (relative to the mass that top-k keeps) and min-p, in this order. The logits of
    excluded tokens become `-inf`, and each node's logits are shifted so that the largest is 0. In a row with
    temperature 0, only the most probable token remains (ties go to the smallest id), with the logit 0. The logits of
    such a row are never divided by the temperature.

    All three filters are thresholds on the raw logit z, so tokens that tie with the last kept token are also kept:
    top-k keeps `z >= k-th largest`, top-p keeps `mass(z' > z) < top_p`, and min-p keeps `p >= min_p * max(p)`. Without
    ties, the warpers of transformers keep the same tokens if they are applied in this order.

    Args:
      logits: f32[B, N, V]; raw logits. `-inf` marks forbidden tokens, and every node must have at least one allowed
        token.
      controls: temperature, top_k, top_p and min_p, [B] each. Filters that no row uses are skipped.

    >>> from mars_jax.core.controls import make_controls
    >>> z = jnp.log(jnp.asarray([[[0.5, 0.25, 0.25, 0.125]]]))
    >>> jnp.exp(process(z, make_controls(1, limit=8, temperature=1.0, top_k=3)))[0, 0].tolist()
    [1.0, 0.5, 0.5, 0.0]
    """
    z = logits.astype(jnp.float32)
    greedy = is_greedy(controls)

    def one_hot() -> Array:
        ids = jnp.arange(z.shape[-1], dtype=jnp.int32)[None, None]
        return jnp.where(ids == argmax(z)[..., None], jnp.float32(0), jnp.float32(-jnp.inf))

    def mixed() -> Array:
        # Process greedy rows at temperature 1, and then replace their logits with those of a one-hot distribution.
        warped = _warp(z, controls, ~greedy)
        return jax.lax.cond(
            jnp.any(greedy),
            lambda: jnp.where(greedy[:, None, None], one_hot(), warped),
            lambda: warped,
        )

    return if_greedy(controls, one_hot, mixed)


def _warp(z: Array, controls: Controls, active: Array) -> Array:
    """Apply temperature and filters to logits `z` f32[B, N, V] in rows that are not greedy (`active` bool[B]).

    Each filter is a threshold on the logits, which is found without sorting.
    """
    vocab = z.shape[-1]
    top = jnp.max(z, axis=-1, keepdims=True)
    # Subtract the largest logit before dividing, because division by a small temperature could overflow.
    assert controls.temperature is not None  # otherwise every row is greedy
    temperature = jnp.where(active, controls.temperature, 1.0)[:, None, None]
    scaled = (z - top) / temperature

    use_k = active & (controls.top_k > 0) & (controls.top_k < vocab)
    use_p = active & (controls.top_p < 1)
    use_min = active & (controls.min_p > 0)
    # Temperature does not change the order of the logits, so the filters can compare the raw logits z. Top-p applies to
    # the tokens that top-k keeps.
    scaled = jax.lax.cond(
        jnp.any(use_k),
        lambda: jnp.where(_top_k_kept(z, top, controls.top_k, use_k), scaled, -jnp.inf),
        lambda: scaled,
    )
    scaled = jax.lax.cond(
        jnp.any(use_p),
        lambda: jnp.where(_top_p_kept(z, top, jnp.exp(scaled), controls.top_p, use_p), scaled, -jnp.inf),
        lambda: scaled,
    )
    # The largest scaled logit is 0, so the threshold min_p * max(p) on probabilities is the threshold log(min_p) on
    # scaled logits.
    min_p_floor = jnp.where(use_min, jnp.log(controls.min_p), -jnp.inf)[:, None, None]
    return jnp.where(scaled >= min_p_floor, scaled, -jnp.inf)


def _top_k_kept(z: Array, top: Array, top_k: Array, use: Array) -> Array:
    """Return bool[B, N, V], True for logits not below the top_k-th largest; all True in rows without top-k."""
    k = top_k[:, None]

    def keeps_enough(threshold: Array) -> Array:
        return jnp.sum(z >= threshold[..., None], axis=-1, dtype=jnp.int32) >= k

    # The k-th largest logit is the largest threshold that keeps k tokens. Start the search at the float above the
    # largest logit, a threshold that keeps no token.
    kth_order, _ = _bisect(keeps_enough, _to_order(top[..., 0]) + 1, use)
    return (z >= _from_order(kth_order)[..., None]) | ~use[:, None, None]


def _top_p_kept(z: Array, top: Array, weights: Array, top_p: Array, use: Array) -> Array:
    """Return bool[B, N, V], True for tokens with less than top_p of the mass above them; all True without top-p.

    Despite rounding, a masked sum is monotone in its mask, so bisection is exact.
    """
    # The weights are not normalised, so compare with top_p times their sum.
    target_mass = top_p[:, None] * jnp.sum(weights, axis=-1)

    def mass_reached(threshold: Array) -> Array:
        return jnp.sum(jnp.where(z > threshold[..., None], weights, 0.0), axis=-1) >= target_mass

    # Find the lowest threshold with less than top_p of the mass above it. No mass is above the largest logit.
    _, threshold_order = _bisect(mass_reached, _to_order(top[..., 0]), use)
    return (z >= _from_order(threshold_order)[..., None]) | ~use[:, None, None]


class _Bounds(NamedTuple):
    """Loop carry of `_bisect`: floats mapped by `_to_order`, i32[B, N] each."""

    low: Array  # the predicate is True here; equal to `high` in rows without the filter
    high: Array  # the predicate is False here


def _bisect(holds: Callable[[Array], Array], high: Array, use: Array) -> _Bounds:
    """Find two neighbouring floats, mapped by `_to_order`, between which `holds` changes from True to False.

    `holds` must be True at -inf, False at `high`, and change once. Bisecting the 2**32 floats takes at most 32 passes
    over the vocabulary. It is exact, and several times cheaper than sorting.
    """
    # Rows without the filter start with an empty interval, so they need no passes.
    low = jnp.where(use[:, None], jnp.full_like(high, _NEG_INF_ORDER), high)

    def middle(bounds: _Bounds) -> Array:
        # The floor of the mean: the common bits plus half of the differing bits. Unlike a sum, this cannot overflow.
        return (bounds.low & bounds.high) + ((bounds.low ^ bounds.high) >> 1)

    def unfinished(bounds: _Bounds) -> Array:
        return jnp.any(middle(bounds) != bounds.low)

    def halve(bounds: _Bounds) -> _Bounds:
        mid = middle(bounds)
        goes_up = holds(_from_order(mid))
        # When a row has finished, `mid` equals `low`, so neither bound changes.
        return _Bounds(
            jnp.where(goes_up, mid, bounds.low), jnp.where(goes_up, bounds.high, jnp.maximum(mid, bounds.low))
        )

    return jax.lax.while_loop(unfinished, halve, _Bounds(low, high))


def _to_order(x: Array) -> Array:
    """Map float32 to int32 so that the order is preserved."""
    # Read as integers, the bits of positive floats are in the same order as the floats, and those of negative floats
    # are in reverse order. So flip all bits of negative floats except the sign.
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_order(order: Array) -> Array:
    """Invert `_to_order`."""
    return jax.lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)


def sample(keys: Array, positions: Array, logits: Array, controls: Controls) -> Array:
    """Sample one token per node, i32[B, N], from raw logits f32[B, N, V]. Greedy rows return the argmax.

    The random number of node i in row b depends only on `keys[b]` (key[B]) and `positions[b, i]`. A row therefore
    produces the same tokens in any batch, and the token at a position does not depend on the draft. If all rows are
    greedy, only the argmax is computed.

    >>> from mars_jax.core.controls import make_controls
    >>> keys, positions = jax.random.split(jax.random.key(0), 1), jnp.asarray([[4]])
    >>> sample(keys, positions, jnp.asarray([[[1.0, 3.0]]]), make_controls(1, limit=8)).tolist()
    [[1]]
    """
    return if_greedy(
        controls,
        lambda: argmax(logits),
        lambda: sample_processed(keys, positions, process(logits, controls)),
    )


def argmax(logits: Array) -> Array:
    """Compute the argmax of logits [..., V] as i32[...]. Ties go to the smaller id, as in `jnp.argmax`.

    Compute the maximum of each block, then the argmax over these maxima, and then the argmax within the best block. On
    a CPU, XLA compiles a maximum to vector instructions but an argmax to a scalar loop, so this is 7 to 14 times faster
    at V = 32000 and 128256.
    """
    return over_vocabulary(_shards_argmax, _argmax, logits)


def _shards_argmax(axes: tuple[str, ...], part: Array) -> Array:
    # Device i has the i-th shard, so its token ids begin at i times the shard size.
    ids = _argmax(part) + jax.lax.axis_index(axes) * part.shape[-1]
    # Stack the maximum and its id in one array, so that a single collective suffices. The floats are bitcast to
    # integers, which are copied bit for bit.
    largest = jax.lax.bitcast_convert_type(jnp.max(part, axis=-1).astype(jnp.float32), jnp.int32)
    gathered = jax.lax.all_gather(jnp.stack([largest, ids]), axes)  # i32[parts, 2, ...]
    # The shards are gathered in the order of their token ids, so ties still go to the smaller id.
    best_shard = jnp.argmax(jax.lax.bitcast_convert_type(gathered[:, 0], jnp.float32), axis=0)
    return jnp.take_along_axis(gathered[:, 1], best_shard[None], axis=0, mode="promise_in_bounds")[0]


def _argmax(logits: Array) -> Array:
    # Reshape [..., V] to [..., V / BLOCK, BLOCK]. `jnp.argmax` breaks ties in favour of the first block and the first
    # token.
    blocks = _blocks(logits, -jnp.inf)
    best_block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1).astype(jnp.int32)
    return best_block * BLOCK + jnp.argmax(_block(blocks, best_block), axis=-1).astype(jnp.int32)


def top_k_logits(logits: Array, k: int) -> TopKEntries:
    """Return the k largest logits of f32[..., V] with their ids, and the logsumexp of all logits.

    Ties go to the smaller id, as in `lax.top_k`. If the vocabulary is sharded, each device sends only its k largest
    logits, in one collective.
    """
    return over_vocabulary(
        lambda axes, part: sharded_top_k(part, k, axis=axes),
        functools.partial(kernels_pallas.top_k, k=k),
        logits,
    )


def at_tokens(logits: Array, nodes: Array, tokens: Array) -> Array:
    """Gather the logits at P (node, token) pairs per row, i32[B, P] each, from f32[B, N, V] to f32[B, P]."""

    def pick(logits: Array, nodes: Array, tokens: Array) -> Array:
        return jax.vmap(lambda z, n, t: z[n, t])(logits, nodes, tokens)

    def local(axes: tuple[str, ...], part: Array, nodes: Array, tokens: Array) -> Array:
        # Each token belongs to the shard of one device. The other devices add 0 to the sum.
        local_token = tokens - jax.lax.axis_index(axes) * part.shape[-1]
        is_local = (local_token >= 0) & (local_token < part.shape[-1])
        local_logits = pick(part, nodes, jnp.where(is_local, local_token, 0))
        return jax.lax.psum(jnp.where(is_local, local_logits, 0.0), axes)

    return over_vocabulary(local, pick, logits, nodes, tokens)


def at_drafted(tree: DraftTree, logits: Array) -> Array:
    """Return the logit of each drafted token at its parent, f32[B, N], from logits f32[B, N, V] of all nodes.

    The entries of the root and of padding are garbage.
    """
    return at_tokens(logits, jnp.maximum(tree.parents, 0), jnp.maximum(tree.tokens, 0))


def sample_processed(keys: Array, positions: Array, processed: Array) -> Array:
    """Sample one token per node, as `sample` does, from logits that `process` has already processed."""
    return inverse_cdf(jnp.exp(processed), node_uniforms(keys, positions))


def node_uniforms(keys: Array, positions: Array) -> Array:
    """Draw one uniform number in [0, 1) per node, f32[B, N], from `keys` key[B] and `positions` i32[B, N].

    Entry [b, i] depends only on `keys[b]` and `positions[b, i]`. Nodes at the same depth share a number, which is
    harmless because at most one of them is on the accepted path.
    """

    def uniform(key: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, position), dtype=jnp.float32)

    return jax.vmap(jax.vmap(uniform, in_axes=(None, 0)))(keys, positions)


def inverse_cdf(weights: Array, uniform: Array) -> Array:
    """Sample tokens i32[...] from unnormalised weights f32[..., V] >= 0 by inverting their cumulative distribution.

    `uniform` f32[...] in [0, 1) is the quantile of the token to return. One pass over the vocabulary sums each block.
    The uniform number selects a block, and only this block is scanned. A token of weight 0 is never returned, even if
    sums are rounded.

    >>> inverse_cdf(jnp.asarray([0.0, 1.0, 0.0, 3.0]), jnp.asarray(0.25)).item()
    3
    """

    def local(axes: tuple[str, ...], part: Array, uniform: Array) -> Array:
        """Use the uniform number to select first a shard, then a block in it, then a token."""
        blocks = _blocks(part, 0)
        block_sums = jnp.sum(blocks, axis=-1)
        # f32[..., devices]: the sums of all shards. Every device has all sums, so that all devices select the same
        # shard. `offset` is the total weight of the preceding shards.
        shard_sums = jnp.moveaxis(jax.lax.all_gather(jnp.sum(block_sums, axis=-1), axes), 0, -1)
        target_mass = uniform * jnp.sum(shard_sums, axis=-1)
        shard, offset = _quantile(shard_sums, target_mass)
        device = jax.lax.axis_index(axes)
        token = device * part.shape[-1] + _token_at(blocks, block_sums, target_mass - offset)
        return jax.lax.psum(jnp.where(shard == device, token, 0), axes)

    def whole(weights: Array, uniform: Array) -> Array:
        blocks = _blocks(weights, 0)
        block_sums = jnp.sum(blocks, axis=-1)
        return _token_at(blocks, block_sums, uniform * jnp.sum(block_sums, axis=-1))

    return over_vocabulary(local, whole, weights, uniform)


def _token_at(blocks: Array, sums: Array, target: Array) -> Array:
    """Return the first token whose cumulative weight exceeds `target`, given the blocks and their sums."""
    # Find the first block whose cumulative weight exceeds the target, and then the token in this block.
    crossing_block, offset = _quantile(sums, target)
    token, _ = _quantile(_block(blocks, crossing_block), target - offset)
    return crossing_block * BLOCK + token


def _blocks(values: Array, fill: float) -> Array:
    """Reshape values [..., V] to [..., ceil(V / BLOCK), BLOCK], padded with `fill`."""
    padding = -values.shape[-1] % BLOCK
    if padding:
        values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, padding)], constant_values=fill)
    return values.reshape(*values.shape[:-1], -1, BLOCK)


def _block(blocks: Array, block: Array) -> Array:
    """Select the block with index `block` i32[...] from blocks [..., V / BLOCK, BLOCK]."""
    return jnp.take_along_axis(blocks, block[..., None, None], axis=-2, mode="promise_in_bounds")[..., 0, :]


def _quantile(weights: Array, target: Array) -> tuple[Array, Array]:
    """Return the first index i32[...] whose cumulative weight exceeds `target`, and the total weight before it."""
    n = weights.shape[-1]
    cumulative = jnp.cumsum(weights, axis=-1)
    # A parallel cumsum is not exactly monotone because of rounding, so exclude zero weights explicitly.
    exceeds = (cumulative > target[..., None]) & (weights > 0)
    # If, because of rounding, no cumulative weight exceeds the target, use the last index with a positive weight.
    fallback = n - 1 - jnp.argmax(weights[..., ::-1] > 0, axis=-1).astype(jnp.int32)
    index = jnp.where(jnp.any(exceeds, axis=-1), jnp.argmax(exceeds, axis=-1).astype(jnp.int32), fallback)
    cumulative_at_index = jnp.take_along_axis(cumulative, index[..., None], axis=-1)[..., 0]
    weight_at_index = jnp.take_along_axis(weights, index[..., None], axis=-1)[..., 0]
    return index, cumulative_at_index - weight_at_index


class LogProbs(NamedTuple):
    """Three log-probabilities of each token in nats, f32[B, P] each; see `types.StepInfo`."""

    log_prob: Array
    temperature_log_prob: Array
    processed_log_prob: Array


def log_probs(logits: Array, tokens: Array, controls: Controls, lossless: bool) -> LogProbs:
    """Compute the three log-probabilities of one token at each node.

    Args:
      logits: f32[B, P, V]; raw target logits.
      tokens: i32[B, P]; negative ids are treated as token 0.
      controls: per-request settings.
      lossless: True if the rule is lossless. For a lossy rule, `processed_log_prob` is NaN except in strict rows.

    >>> from mars_jax.core.controls import make_controls
    >>> z = jnp.log(jnp.asarray([[[0.5, 0.25, 0.25]]]))
    >>> controls = make_controls(1, limit=8, temperature=1.0, top_k=1)
    >>> [round(float(x[0, 0]), 4) for x in log_probs(z, jnp.asarray([[0]]), controls, True)]
    [-0.6931, -0.6931, 0.0]
    """
    z = logits.astype(jnp.float32)
    nodes = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    tokens = jnp.maximum(tokens, 0)

    def of_token(z: Array) -> Array:
        top_logit = jnp.max(z, axis=-1)
        # Sum each shard locally, and then all shards with one psum. Summing a sharded vocabulary by halves would
        # exchange data between devices, which may run different numbers of steps.
        exp_sum = over_vocabulary(
            lambda axes, part: jax.lax.psum(total(part), axes), total, jnp.exp(z - top_logit[..., None])
        )
        return at_tokens(z, nodes, tokens) - top_logit - jnp.log(exp_sum)

    # Subtract the largest logit before dividing, because division by a small temperature could overflow.
    scaled_logits = (z - jnp.max(z, axis=-1, keepdims=True)) / divisor(controls)[:, None, None]
    processed_log_prob = of_token(process(z, controls))
    if not lossless:
        processed_log_prob = jnp.where(controls.strict[:, None], processed_log_prob, jnp.nan)
    return LogProbs(of_token(z), of_token(scaled_logits), processed_log_prob)


def top_log_probs(logits: Array, count: int) -> tuple[Array, Array]:
    """Return the ids i32[..., count] and log-probabilities f32[..., count], in nats, of the most probable tokens.

    >>> ids, scores = top_log_probs(jnp.log(jnp.asarray([0.25, 0.5, 0.25])), 2)
    >>> ids.tolist(), [round(float(x), 4) for x in scores]
    ([1, 0], [-0.6931, -1.3863])
    """
    largest = top_k_logits(logits, count)
    return largest.ids, largest.values - largest.logsumexp[..., None]


def entropy(logits: Array) -> Array:
    """Compute the entropy of softmax(logits) in nats, from logits [..., V] to f32[...].

    >>> round(float(entropy(jnp.zeros((4,)))), 4)
    1.3863
    """
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.sum(jnp.where(jnp.isfinite(log_p), jnp.exp(log_p) * log_p, 0.0), axis=-1)
