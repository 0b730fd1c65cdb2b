"""The operations `top_k` and `sharded_top_k`: the k largest logits of each row, and the logsumexp of the row.

Tested against `reference.top_k` and against `jax.lax.top_k` (tests/kernels/test_top_k.py).

Dimensions: V vocabulary, W vocabulary parts.
"""

from __future__ import annotations

import functools
from typing import Any

from jax import Array, lax

from kernels_pallas.common import LANES, Axis, Interpret
from kernels_pallas.dispatch import Form, dispatch
from kernels_pallas.top_k import reference, xla
from kernels_pallas.top_k.reference import TopKEntries, pack, unpack
from kernels_pallas.top_k.shapes import fits_in_vmem


def top_k(
    logits: Array, k: int, *, implementation: str | None = None, interpret: Interpret = False
) -> TopKEntries:
    """Return the k largest logits of each row, their token ids, and the logsumexp of the row.

    The result has no gradient.

    Args:
      logits: bfloat16 or float32 [..., V]. Masked tokens are `-inf`, which is treated like any other value.
      k: number of entries, from 1 to V.
      implementation: "pallas_tpu", "xla", "reference", or None. None selects the kernel on a TPU if a row fits in fast
        memory, and "xla" otherwise.
      interpret: as in `margin_stats`.

    Raises:
      ValueError: the implementation is unknown.

    >>> import jax.numpy as jnp
    >>> largest = top_k(jnp.asarray([1.0, 3.0, 2.0]), 2)
    >>> largest.ids.tolist(), largest.values.tolist()
    ([1, 2], [3.0, 2.0])
    """
    forms = {"reference": functools.partial(reference.top_k, k=k)}
    forms |= dict.fromkeys(("xla", "partitioned", "pallas_tpu"), functools.partial(xla.top_k, k=k))
    if _runs_kernel(logits, k, implementation):
        forms["pallas_tpu"] = functools.partial(_top_k_kernel, k=k)
    return dispatch(implementation, interpret, (logits,), forms)


def sharded_top_k(
    part: Array, k: int, *, axis: Axis, implementation: str | None = None, interpret: Interpret = False
) -> TopKEntries:
    """Compute `top_k` of logits whose vocabulary is sharded. Call this function inside `shard_map`.

    One all-gather sends the k largest entries of each shard to all devices, and every device merges them.

    Args:
      part: [..., V / devices]; this device's shard of the logits, which may have fewer than k tokens.
      k: number of entries, from 1 to V.
      axis: mesh axis or axes that shard the vocabulary in equal parts.
      implementation, interpret: as in `top_k`.
    """

    def form(part: Array, interpret: Interpret | None = None) -> TopKEntries:
        # Pack the values, the ids and the logsumexp into one integer array, so that one all-gather is enough.
        parts = lax.all_gather(packed_top_k(part, k, interpret=interpret), axis)
        return join_top_k(parts, k, part.shape[-1], interpret=interpret)

    forms: dict[str, Form] = dict.fromkeys(("reference", "xla", "partitioned", "pallas_tpu"), form)
    if _runs_kernel(part, k, implementation):
        kernel: Any = functools.partial(form, interpret=False)
        # The kernel is compiled on trial in a thread that has no mesh, so the trial compiles a function without the
        # all-gather.
        kernel.trial = functools.partial(_top_k_of_parts, k=k)
        forms["pallas_tpu"] = kernel
    return dispatch(implementation, interpret, (part,), forms)


def packed_top_k(logits: Array, k: int, *, interpret: Interpret | None = None) -> Array:
    """Compute `top_k`, packed into one array for an all-gather (see `reference.pack`).

    If `interpret` is None, XLA computes the result, i32[2, ..., k + 1]. Otherwise the kernel computes it, as
    i32[2, ..., 128], and `interpret` is the kernel's option.
    """
    if interpret is None:
        return pack(xla.top_k(logits, min(k, logits.shape[-1])), k)
    from kernels_pallas.top_k import mosaic

    leading_dims, vocab = logits.shape[:-1], logits.shape[-1]
    return mosaic.top_k(logits.reshape(-1, vocab), k, interpret=interpret).reshape(2, *leading_dims, LANES)


def join_top_k(parts: Array, k: int, size: int, *, interpret: Interpret | None = None) -> TopKEntries:
    """Merge the results for W equal parts of a vocabulary into the `top_k` of the whole vocabulary.

    Args:
      parts: i32[W, 2, ..., lanes]; entry i is `packed_top_k` of the tokens from `i * size` to `(i + 1) * size - 1`.
      k, interpret: as in `packed_top_k`.
      size: number of tokens per part.
    """
    if interpret is None:
        return xla.join(parts, k, size)
    from kernels_pallas.top_k import mosaic

    # The kernel accepts only one dimension of rows, so flatten all leading dimensions.
    flat_parts = parts.reshape(parts.shape[0], 2, -1, LANES)
    return unpack(mosaic.join(flat_parts, k, size, interpret=interpret).reshape(parts.shape[1:]), k)


def _runs_kernel(logits: Array, k: int, implementation: str | None) -> bool:
    """Return whether to use the kernel: the rows fit in fast memory, or the caller named the kernel.

    If the caller named the kernel and the rows do not fit, the kernel raises an error.
    """
    return implementation == "pallas_tpu" or fits_in_vmem(logits.shape[-1], k)


def _top_k_kernel(logits: Array, interpret: Interpret = False, *, k: int) -> TopKEntries:
    return unpack(packed_top_k(logits, k, interpret=interpret), k)


def _top_k_of_parts(part: Array, *, k: int) -> TopKEntries:
    """Run both kernels of `sharded_top_k` without the all-gather between them."""
    return join_top_k(packed_top_k(part, k, interpret=False)[None], k, part.shape[-1], interpret=False)
