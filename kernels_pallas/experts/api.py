"""The operation `dense_by_expert_int8`: rows sorted by expert, each times its expert's int8 matrix.

R rows, K inner and N outer width, X experts. Oracle: each row times its dequantised matrix (tests/models/test_moe.py).
"""

from __future__ import annotations

from jax import Array

from kernels_pallas.common import Interpret
from kernels_pallas.dispatch import dispatch
from kernels_pallas.experts import xla


def dense_by_expert_int8(
    x: Array,
    values: Array,
    scale: Array,
    sizes: Array,
    *,
    implementation: str | None = None,
    platform: str | None = None,
    interpret: Interpret = False,
) -> Array:
    """Multiply x [R, K] by values i8[X, N, K], scaled by `scale` f32[X, N]: f32[R, N]. Differentiable.

    Args:
      x: rows sorted by expert, bfloat16 or float32.
      sizes: i32[X]; number of rows per expert. Results of rows beyond their sum are undefined.
      implementation: "pallas_tpu", "xla", or None, which selects the kernel on a TPU and otherwise "xla".
      platform: as in `dispatch`.
      interpret: as in `margin_stats`.

    >>> import jax.numpy as jnp
    >>> x, values = jnp.ones((3, 1)), jnp.asarray([[[1]], [[2]]], jnp.int8)
    >>> dense_by_expert_int8(x, values, jnp.ones((2, 1)), jnp.asarray([1, 2], jnp.int32)).tolist()
    [[1.0], [2.0], [2.0]]
    """
    # Imported at the first call, because it imports Pallas.
    from kernels_pallas.experts import mosaic

    forms = {"xla": xla.dense_by_expert_int8, "pallas_tpu": mosaic.dense_by_expert_int8}
    operands = (x, values, scale, sizes)
    return dispatch(implementation, interpret, operands, forms, platform=platform, differentiable=True)
