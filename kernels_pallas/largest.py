"""The k largest logits of a row and the logsumexp of the row in one read, as a drafter needs them.

R rows, V vocabulary, W parts of a vocabulary. Oracle: `jax.lax.top_k` (tests/kernels/test_largest.py).

`jax.lax.top_k` is a full sort on a TPU, which compiles slowly, and a scalar loop on a CPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import mosaic
from kernels_pallas.blocks import LANES, top_k_fits
from kernels_pallas.dispatch import dispatch
from kernels_pallas.stats import bits

Axis = str | tuple[str, ...]
BLOCK = 64
"""Tokens per block; blocks are first compared by their maxima. Ten blocks are fewer than 1,024 tokens: up to that size
XLA sorts on a GPU, which is faster than its search of more tokens."""


class TopK(NamedTuple):
    """The k largest entries of a row, ordered by larger value, then smaller id, and the row's logsumexp."""

    values: Array  # f32[..., k]; the largest first
    ids: Array  # i32[..., k]; token ids of `values`
    logsumexp: Array  # f32[...]; over the whole row


def top_k(logits: Array, k: int, *, implementation: str | None = None, interpret: Any = False) -> TopK:
    """Return the k largest of logits [..., V], bfloat16 or float32, with their ids, and the logsumexp of the row.

    Args:
      logits: `-inf` for masked tokens, which are treated like any other entry.
      k: 1 to V.
      implementation: "pallas_tpu", "xla", "reference", or None, which selects the kernel on a TPU if it fits, and
        otherwise "xla". Not differentiable.
      interpret: as in `margin_stats`.

    Raises:
      ValueError: unknown implementation, or one that this operation does not have.

    >>> found = top_k(jnp.asarray([1.0, 3.0, 2.0]), 2)
    >>> found.ids.tolist(), found.values.tolist()
    ([1, 2], [3.0, 2.0])
    """
    xla = functools.partial(_xla, k=k)
    forms = {"reference": functools.partial(_reference, k=k), "xla": xla, "partitioned": xla}
    kernel = functools.partial(_top_k_kernel, k=k)
    forms["pallas_tpu"] = kernel if _takes(logits, k, implementation) else xla
    return dispatch(implementation, None, interpret, (logits,), forms)


def sharded_top_k(
    part: Array, k: int, *, axis: Axis, implementation: str | None = None, interpret: Any = False
) -> TopK:
    """Compute `top_k` of a vocabulary sharded over `axis` in equal parts. Call it inside `shard_map`.

    One collective sends the k largest entries of each part to all devices, and every device joins them.

    Args:
      part: [..., V / devices]; may have fewer than k tokens.
      k: 1 to V.
      axis: mesh axis, or axes, that shard the vocabulary.
      implementation, interpret: as in `top_k`.
    """

    def form(part: Array, blocks: None = None, interpret: Any = None) -> TopK:
        del blocks
        parts = lax.all_gather(packed_top_k(part, k, interpret=interpret), axis)
        return join_top_k(parts, k, part.shape[-1], interpret=interpret)

    kernel: Any = functools.partial(form, interpret=False)
    kernel.trial = functools.partial(_top_k_of_parts, k=k)
    forms = {"reference": form, "xla": form, "partitioned": form}
    forms["pallas_tpu"] = kernel if _takes(part, k, implementation) else form
    return dispatch(implementation, None, interpret, (part,), forms)


def packed_top_k(logits: Array, k: int, *, interpret: Any = None) -> Array:
    """Compute `top_k` packed into one array for a collective, see `pack`.

    If `interpret` is None, XLA computes i32[2, ..., k + 1]. Otherwise the kernel, with this `interpret` option,
    computes i32[2, ..., 128].
    """
    if interpret is None:
        return pack(_xla(logits, min(k, logits.shape[-1])), k)
    return _packed_kernel(logits, interpret, k=k)


def join_top_k(parts: Array, k: int, size: int, *, interpret: Any = None) -> TopK:
    """Compute the `top_k` of a vocabulary from the results of its parts.

    Args:
      parts: i32[W, 2, ..., lanes]; entry i is `packed_top_k` of tokens `[i * size, (i + 1) * size)`.
      k, interpret: as for `packed_top_k`.
      size: tokens of a part.
    """
    if interpret is not None:
        flat = parts.reshape(parts.shape[0], 2, -1, LANES)
        return unpack(mosaic.topk_tpu.join(flat, k, size, interpret=interpret).reshape(parts.shape[1:]), k)
    part_tops = unpack(parts, k, axis=1)  # [W, ..., k] each
    first = jnp.arange(parts.shape[0], dtype=jnp.int32) * size
    ids = part_tops.ids + first.reshape((-1,) + (1,) * (part_tops.ids.ndim - 1))
    # Parts are in the order of their ids, so ties still go to the smaller id.
    # [W, ..., k] -> [..., W, k] -> [..., W * k].
    values, ids = (jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1) for x in (part_tops.values, ids))
    best, place = lax.top_k(values, k)
    ids = jnp.take_along_axis(ids, place, axis=-1, mode="promise_in_bounds")
    # The logsumexp of the vocabulary is the logsumexp of the parts' values, [W, ...].
    return TopK(best, ids, jax.nn.logsumexp(part_tops.logsumexp, axis=0))


def pack(found: TopK, k: int) -> Array:
    """Pack into i32[2, ..., k + 1]: the bits of the k values followed by the logsumexp, and the ids.

    Floats are sent as integers, so that no device alters their bits. If there are fewer than k tokens, the remaining
    values are -inf.
    """

    def lanes(x: Array, fill: float) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, k - x.shape[-1])], constant_values=fill)

    total = found.logsumexp[..., None]
    values = jnp.concatenate([lanes(found.values, -jnp.inf), total], axis=-1)
    return jnp.stack(
        [bits(values), jnp.concatenate([lanes(found.ids, 0), jnp.zeros_like(bits(total))], axis=-1)]
    )


def unpack(packed: Array, k: int, axis: int = 0) -> TopK:
    """Invert `pack`. `axis` is the dimension of size two."""
    values, ids = (lax.index_in_dim(packed, i, axis, keepdims=False) for i in (0, 1))
    values = lax.bitcast_convert_type(values, jnp.float32)
    return TopK(values[..., :k], ids[..., :k], values[..., k])


def _takes(logits: Array, k: int, implementation: str | None) -> bool:
    """Return True if the kernel should run: it fits, or it was named explicitly, so that it raises if it does not."""
    return implementation == "pallas_tpu" or top_k_fits(logits.shape[-1], k)


def _top_k_kernel(logits: Array, blocks: None = None, interpret: Any = False, *, k: int) -> TopK:
    del blocks  # there is one size: whole rows
    return unpack(_packed_kernel(logits, interpret, k=k), k)


def _top_k_of_parts(part: Array, *, k: int) -> TopK:
    """Run both kernels without the collective between them."""
    return join_top_k(packed_top_k(part, k, interpret=False)[None], k, part.shape[-1], interpret=False)


def _packed_kernel(logits: Array, interpret: Any = False, *, k: int) -> Array:
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    return mosaic.topk_tpu.top_k(logits.reshape(-1, vocab), k, interpret=interpret).reshape(2, *lead, LANES)


def _reference(logits: Array, k: int) -> TopK:
    z = logits.astype(jnp.float32)
    return TopK(*lax.top_k(z, k), jax.nn.logsumexp(z, axis=-1))


def _xla(logits: Array, k: int) -> TopK:
    """Search only the k blocks with the largest maxima; they contain the k largest entries.

    Ties cannot change the result: a tied entry outside of these blocks has a larger id than enough tied entries inside.
    """
    z = logits.astype(jnp.float32)
    if z.shape[-1] < 4 * k * BLOCK:
        return _reference(z, k)
    missing = -z.shape[-1] % BLOCK
    blocks = jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, missing)], constant_values=-jnp.inf) if missing else z
    blocks = blocks.reshape(*z.shape[:-1], -1, BLOCK)
    # At most k blocks contain the k largest entries, and each such block has one of the k largest maxima. i32[..., k].
    _, best = lax.top_k(jnp.max(blocks, axis=-1), k)
    best = jnp.sort(best, axis=-1)  # candidates in the order of their ids
    candidates = jnp.take_along_axis(blocks, best[..., None], axis=-2, mode="promise_in_bounds")
    values, place = lax.top_k(candidates.reshape(*candidates.shape[:-2], -1), k)
    # Convert an index into the k * BLOCK candidates to a token id.
    block = jnp.take_along_axis(best, place // BLOCK, axis=-1, mode="promise_in_bounds")
    return TopK(values, block * BLOCK + place % BLOCK, jax.nn.logsumexp(z, axis=-1))
