"""The k largest logits of a row and the logsumexp of all, in one read: what a drafter needs of its vocabulary.

R rows, V vocabulary, W parts of a vocabulary. Oracle: `jax.lax.top_k` (tests/kernels/test_largest.py).

`jax.lax.top_k` is a full sort on a TPU, which takes long to compile, and a scalar loop on a CPU.
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
"""Tokens of a block whose maximum is looked at first. Ten blocks are fewer than 1,024 tokens, which XLA sorts faster
on a GPU than it searches more."""


class TopK(NamedTuple):
    """In the order (larger value, then smaller id)."""

    values: Array  # f32[..., k]; the largest first
    ids: Array  # i32[..., k]; their places
    logsumexp: Array  # f32[...]; of the whole row


def top_k(logits: Array, k: int, *, implementation: str | None = None, interpret: Any = False) -> TopK:
    """The k largest of logits [..., V], bfloat16 or float32, with their ids, and the logsumexp of the row.

    Args:
      logits: `-inf` where a token is masked; such entries are entries like any other.
      k: 1 to V.
      implementation: "pallas_tpu", "xla", "reference", or None, which is the kernel on a TPU, where it fits, and else
        "xla". No gradient flows.
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
    """Inside `shard_map`: the `top_k` of a vocabulary whose i-th part, of equal sizes, is on device i of `axis`.

    The k largest of each part travel, in one collective, and every device joins them.

    Args:
      part: [..., V / devices]; may have fewer than k tokens.
      k: 1 to V.
      axis: mesh axis, or axes, over which the vocabulary is divided.
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
    """`top_k` in one array to send, see `pack`: by XLA i32[2, ..., k + 1], and by the kernel, where `interpret` is its
    option and not None, i32[2, ..., 128]."""
    if interpret is None:
        return pack(_xla(logits, min(k, logits.shape[-1])), k)
    return _packed_kernel(logits, interpret, k=k)


def join_top_k(parts: Array, k: int, size: int, *, interpret: Any = None) -> TopK:
    """The `top_k` of a vocabulary from those of its parts.

    Args:
      parts: i32[W, 2, ..., lanes], from `packed_top_k` of tokens `[i * size, (i + 1) * size)` each, in this order.
      k, interpret: as there.
      size: tokens of a part.
    """
    if interpret is not None:
        flat = parts.reshape(parts.shape[0], 2, -1, LANES)
        return unpack(mosaic.topk_tpu.join(flat, k, size, interpret=interpret).reshape(parts.shape[1:]), k)
    part_tops = unpack(parts, k, axis=1)  # [W, ..., k] each
    first = jnp.arange(parts.shape[0], dtype=jnp.int32) * size
    ids = part_tops.ids + first.reshape((-1,) + (1,) * (part_tops.ids.ndim - 1))
    # Parts come in the order of their ids, so ties still go to the smaller id.
    # [W, ..., k] -> [..., W, k] -> [..., W * k].
    values, ids = (jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1) for x in (part_tops.values, ids))
    best, place = lax.top_k(values, k)
    ids = jnp.take_along_axis(ids, place, axis=-1, mode="promise_in_bounds")
    # The logsumexp of a union is that of the parts' own, [W, ...].
    return TopK(best, ids, jax.nn.logsumexp(part_tops.logsumexp, axis=0))


def pack(found: TopK, k: int) -> Array:
    """i32[2, ..., k + 1]: the bits of the values with the logsumexp after the k-th, and the ids.

    Floats travel as integers, whose bits no device touches. Where there are fewer than k tokens, the other values are
    -inf.
    """

    def lanes(x: Array, fill: float) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, k - x.shape[-1])], constant_values=fill)

    total = found.logsumexp[..., None]
    values = jnp.concatenate([lanes(found.values, -jnp.inf), total], axis=-1)
    return jnp.stack(
        [bits(values), jnp.concatenate([lanes(found.ids, 0), jnp.zeros_like(bits(total))], axis=-1)]
    )


def unpack(packed: Array, k: int, axis: int = 0) -> TopK:
    """The inverse of `pack`, whose dimension of two is `axis`."""
    values, ids = (lax.index_in_dim(packed, i, axis, keepdims=False) for i in (0, 1))
    values = lax.bitcast_convert_type(values, jnp.float32)
    return TopK(values[..., :k], ids[..., :k], values[..., k])


def _takes(logits: Array, k: int, implementation: str | None) -> bool:
    """True where the kernel is to run: it fits, or was named and then says itself that it does not."""
    return implementation == "pallas_tpu" or top_k_fits(logits.shape[-1], k)


def _top_k_kernel(logits: Array, blocks: None = None, interpret: Any = False, *, k: int) -> TopK:
    del blocks  # there is one size: whole rows
    return unpack(_packed_kernel(logits, interpret, k=k), k)


def _top_k_of_parts(part: Array, *, k: int) -> TopK:
    """Both kernels without what travels between them."""
    return join_top_k(packed_top_k(part, k, interpret=False)[None], k, part.shape[-1], interpret=False)


def _packed_kernel(logits: Array, interpret: Any = False, *, k: int) -> Array:
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    return mosaic.topk_tpu.top_k(logits.reshape(-1, vocab), k, interpret=interpret).reshape(2, *lead, LANES)


def _reference(logits: Array, k: int) -> TopK:
    z = logits.astype(jnp.float32)
    return TopK(*lax.top_k(z, k), jax.nn.logsumexp(z, axis=-1))


def _xla(logits: Array, k: int) -> TopK:
    """Search the k blocks of the largest maxima, where the k largest are.

    A tie outside of the chosen blocks has a larger id than as many ties within as can be wanted.
    """
    z = logits.astype(jnp.float32)
    if z.shape[-1] < 4 * k * BLOCK:
        return _reference(z, k)
    missing = -z.shape[-1] % BLOCK
    blocks = jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, missing)], constant_values=-jnp.inf) if missing else z
    blocks = blocks.reshape(*z.shape[:-1], -1, BLOCK)
    # At most k blocks hold the k largest, and each of those has one of the k largest maxima. i32[..., k].
    _, best = lax.top_k(jnp.max(blocks, axis=-1), k)
    best = jnp.sort(best, axis=-1)  # candidates in the order of their ids
    candidates = jnp.take_along_axis(blocks, best[..., None], axis=-2, mode="promise_in_bounds")
    values, place = lax.top_k(candidates.reshape(*candidates.shape[:-2], -1), k)
    # A place among the k * BLOCK candidates is a place in its block and the number of that block.
    block = jnp.take_along_axis(best, place // BLOCK, axis=-1, mode="promise_in_bounds")
    return TopK(values, block * BLOCK + place % BLOCK, jax.nn.logsumexp(z, axis=-1))
