"""Sums of rows: compared with `math.fsum`, and bitwise equal for any number of rows."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.core.sums import total


@pytest.mark.parametrize("width", [1, 7, 576])
def test_a_row_has_the_same_sum_among_any_number_of_rows(width):
    x = np.exp(np.random.default_rng(0).normal(size=(16, width))).astype(np.float32)
    exact = [math.fsum(row) for row in x]
    sums = np.asarray(jax.jit(total)(x))
    np.testing.assert_allclose(sums, exact, rtol=1e-6)
    for rows in (1, 2, 5):
        np.testing.assert_array_equal(jax.jit(total)(x[:rows]), sums[:rows])


def test_its_gradient_is_ones_whatever_stands_before_the_last_axis():
    x = jnp.ones((2, 3, 5))
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(total(x)))(x), x)
    assert total(x[0, 0]).shape == () and total(x).shape == (2, 3)
