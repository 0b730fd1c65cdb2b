"""Each layer function, compared with its formula in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from mars_jax.models.layers import dense, embed, rms_norm
from tests.helpers import normal


def wide(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("lead", [(1, 1), (2, 3), (5,)])
@pytest.mark.parametrize(
    "dtype, tolerance", [("float32", 1e-5), ("bfloat16", 2**-5)]
)  # bfloat16: 8 bits of ~4
def test_dense_is_x_times_w_transposed_plus_bias(lead, dtype, tolerance):
    x, w, b = normal(0, *lead, 7, dtype=dtype), normal(1, 5, 7, dtype=dtype), normal(2, 5, dtype=dtype)
    expected = wide(x) @ wide(w).T + wide(b)
    out = jax.jit(dense)(x, w, b)
    assert out.dtype == x.dtype and out.shape == (*lead, 5)
    np.testing.assert_allclose(wide(out), expected, atol=tolerance)
    float32_out = dense(x, w, b, dtype=jnp.float32)
    assert float32_out.dtype == jnp.float32
    np.testing.assert_allclose(wide(float32_out), expected, atol=1e-5)


def test_dense_is_differentiable_in_both_modes_and_maps():
    x, w = normal(0, 3, 7), normal(1, 5, 7)
    check_grads(dense, (x, w), order=1, modes=("fwd", "rev"), rtol=1e-2)
    np.testing.assert_allclose(jax.vmap(dense, (None, 0))(x, jnp.stack([w, -w]))[1], -dense(x, w), atol=1e-6)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_dense_lowers_for_accelerators_without_the_cpu_forms(platform):
    traced = jax.jit(dense).trace(normal(0, 1, 7), normal(1, 5, 7))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "dot_general" in text and "optimization_barrier" not in text


def test_rms_norm_is_computed_in_float32():
    x, scale = normal(0, 2, 3, 8, dtype="bfloat16") * 100, normal(1, 8, dtype="bfloat16")
    expected = wide(x) / np.sqrt(np.mean(wide(x) ** 2, -1, keepdims=True) + 1e-6) * wide(scale)
    out = rms_norm(x, scale, 1e-6)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(wide(out), expected, rtol=2**-8)  # one rounding to 8 bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embed_takes_rows_exactly_and_clips_padding(dtype):
    table = normal(0, 5, 3, dtype=dtype)
    ids = jnp.asarray([[0, 4, -1, 9]], jnp.int32)
    np.testing.assert_array_equal(embed(table, ids)[0], table[jnp.asarray([0, 4, 0, 4])])
    gradient = jax.grad(lambda t: jnp.sum(embed(t, ids).astype(jnp.float32)))(table)
    np.testing.assert_array_equal(gradient[:, 0], np.asarray([2, 0, 0, 0, 2], np.float32))
