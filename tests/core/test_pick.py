"""Both forms of `pick` and `scatter_integers`, compared with numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.core import pick as module
from mars_jax.core.pick import pick


@pytest.mark.parametrize("form", [pick, module._gather, module._compare])
@pytest.mark.parametrize("dtype", [np.int32, np.float32, bool])
@pytest.mark.parametrize("shape", [(2, 7), (2, 7, 3), (3, 1)])
def test_values_at_places(form, dtype, shape):
    rng = np.random.default_rng(0)
    values = rng.integers(-5, 5, shape).astype(dtype)
    places = rng.integers(0, shape[1], (shape[0], 4)).astype(np.int32)
    index = places.reshape(places.shape + (1,) * (len(shape) - 2))
    np.testing.assert_array_equal(
        form(jnp.asarray(values), jnp.asarray(places)), np.take_along_axis(values, index, axis=1)
    )


@pytest.mark.parametrize("form", [module._gather, module._compare])
def test_values_that_are_not_picked_are_not_read(form):
    """The broken numbers of a row do not affect other values."""
    values = jnp.asarray([[1.0, jnp.nan, -jnp.inf, jnp.inf]])
    np.testing.assert_array_equal(form(values, jnp.asarray([[0, 2]])), [[1.0, -np.inf]])


@pytest.mark.parametrize("form", [module._scatter, module._compare_put])
@pytest.mark.parametrize("size", [9, module.SMALL])
def test_values_are_put_at_places(form, size):
    rng = np.random.default_rng(1)
    places = np.stack([rng.permutation(9)[:4] for _ in range(3)]).astype(np.int32)
    values = rng.integers(1, 9, (3, 4)).astype(np.int32)
    expected = np.zeros((3, size), np.int32)
    np.put_along_axis(expected, places, values, axis=1)
    np.testing.assert_array_equal(form(jnp.asarray(places), jnp.asarray(values), size), expected)
