"""The operation `dense_int4`: rows times a matrix of 4-bit weights.

R rows, K inputs, N outputs, G groups of `size` inputs. Oracle: numpy in tests/kernels/test_int4.py.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from kernels_pallas.common import Interpret
from kernels_pallas.dispatch import dispatch
from kernels_pallas.int4 import xla
from kernels_pallas.int4.shapes import supports_product


def dense_int4(
    x: Array,
    values: Array,
    scale: Array,
    offset: Array,
    *,
    chip: str = "",
    implementation: str | None = None,
    platform: str | None = None,
    interpret: Interpret = False,
) -> Array:
    """Multiply x [R, K] by the matrix `values * scale + offset`: f32[R, N]. Differentiable.

    Args:
      values: i4[G, size, N]; the kernel also needs bfloat16 rows, and shapes that `supports_product` accepts.
      scale: f16[G, N].
      offset: f32[G, N].
      chip: JAX's name for the TPU, which determines how the kernel scales weights.
      implementation: "pallas_tpu", "xla", or None, which selects the kernel on a TPU if it supports the operands, and
        otherwise "xla".
      platform: as in `dispatch`.
      interpret: as in `margin_stats`.

    >>> values, scale, offset = jnp.ones((1, 32, 2), jnp.int4), jnp.ones((1, 2), jnp.float16), jnp.zeros((1, 2))
    >>> dense_int4(jnp.ones((1, 32)), values, scale, offset).tolist()
    [[32.0, 32.0]]
    """
    (num_rows, inputs), (_, group_size, outputs) = x.shape, values.shape
    is_supported = supports_product(num_rows, inputs, outputs, group_size)
    is_supported &= x.dtype == jnp.bfloat16 and values.dtype == jnp.int4
    forms = {"xla": xla.dense_int4, "pallas_tpu": xla.dense_int4}
    # A named kernel is never replaced: it raises an error if it does not support the operands.
    if is_supported or implementation == "pallas_tpu":
        # Imported at the first call, because it imports Pallas.
        from kernels_pallas.int4 import mosaic

        forms["pallas_tpu"] = functools.partial(mosaic.dense_int4, chip=chip)
    operands = (x, values, scale, offset)
    return dispatch(implementation, interpret, operands, forms, platform=platform, differentiable=True)
