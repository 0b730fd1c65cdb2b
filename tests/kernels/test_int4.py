"""The kernel for 4-bit products, compared with the product of the dequantised matrix in numpy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.dispatch import with_gradient_of
from kernels_pallas.int4 import mosaic, shapes, xla
from tests.helpers import slow_but
from tests.helpers.implementations import RACES, assert_no_races

CHIPS = {"float32": "TPU v5 lite", "bfloat16": "TPU v6 lite", "two cores": "TPU v5"}


def matrix(rng, inputs, outputs, size):
    """Return values, scales (some below 0, one float16's least) and offsets of a 4-bit matrix, and the matrix."""
    groups = inputs // size
    values = rng.integers(-8, 8, (groups, size, outputs))
    scale = rng.normal(size=(groups, outputs)).astype(np.float16) / 8
    scale[0, :3] = 6e-8, 3e-5, 0
    offset = rng.normal(size=(groups, outputs)).astype(np.float32)
    wide = values * scale.astype(np.float64)[:, None] + offset[:, None]
    stored = jnp.asarray(values, jnp.int4), jnp.asarray(scale), jnp.asarray(offset)
    return stored, wide.reshape(inputs, outputs)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    "rows, inputs, outputs, size",
    slow_but(
        [(1, 128, 128, 128), (60, 640, 256, 128), (5, 256, 256, 32), (16, 384, 128, 64), (20, 256, 128, 32),
         (60, 384, 256, 64)],
        (60, 640, 256, 128), (5, 256, 256, 32), (20, 256, 128, 32),
    ),
)  # fmt: skip
def test_it_is_the_product_of_the_dequantised_matrix(rows, inputs, outputs, size, chip, monkeypatch):
    monkeypatch.setattr(mosaic, "INNER", 256)  # several blocks in both dimensions
    monkeypatch.setattr(mosaic, "WEIGHTS", (128 * 256, 128 * 256))
    rng = np.random.default_rng(rows + inputs)
    stored, wide = matrix(rng, inputs, outputs, size)
    x = jnp.asarray(rng.normal(size=(rows, inputs)) + 0.5, jnp.bfloat16)
    assert shapes.supports_product(rows, inputs, outputs, size)
    product = mosaic.dense_int4(x, *stored, chip=CHIPS[chip], interpret=True)
    exact = np.asarray(x, np.float64) @ wide
    # With few rows, or groups as deep as a matrix unit, scales apply after the product; else weights round to bfloat16.
    by_group = size == 128 or rows * 128 // size <= shapes.ROWS
    rounded = 2.0**-14 if by_group else 2.0**-8
    size_of = np.abs(np.asarray(x, np.float64)) @ np.abs(wide)
    assert np.all(np.abs(np.asarray(product) - exact) <= rounded * size_of)


def test_the_kernel_has_the_gradient_of_the_product():
    rng = np.random.default_rng(1)
    stored, wide = matrix(rng, 128, 128, 128)
    x = jnp.asarray(rng.normal(size=(3, 128)), jnp.bfloat16)

    kernel = functools.partial(mosaic.dense_int4, chip="TPU v5 lite", interpret=True)

    def total(x):
        return with_gradient_of(xla.dense_int4, kernel)(x, *stored).sum()

    np.testing.assert_allclose(
        jax.grad(total)(x).astype(np.float32), np.tile(wide.sum(1), (3, 1)), rtol=2**-7, atol=0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize("rows, size", [(3, 128), (3, 32), (24, 32)])
def test_nothing_races(rows, size, monkeypatch):
    monkeypatch.setattr(mosaic, "INNER", 128)
    monkeypatch.setattr(mosaic, "WEIGHTS", (128 * 128, 128 * 128))
    rng = np.random.default_rng(0)
    stored, wide = matrix(rng, 256, 256, size)
    x = jnp.asarray(rng.normal(size=(rows, 256)), jnp.bfloat16)
    product = mosaic.dense_int4(x, *stored, chip="TPU v6 lite", interpret=RACES)
    np.testing.assert_allclose(product, np.asarray(x, np.float64) @ wide, atol=0.5)
    assert_no_races()


def test_float16_numbers_are_decoded_to_the_bit():
    every = np.arange(1 << 16, dtype=np.uint16)
    every = every[np.isfinite(every.view(np.float16))]
    decoded = jax.jit(mosaic._float32)(jnp.asarray(every))
    np.testing.assert_array_equal(decoded, every.view(np.float16).astype(np.float32))
