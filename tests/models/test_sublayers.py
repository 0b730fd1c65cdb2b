"""A model without some sublayers equals the model whose sublayers there add zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.core.types import Visible
from mars_jax.models.config import ModelConfig
from mars_jax.models.transformer import init_params, language_model
from mars_jax.utils.errors import MarsError
from tests.helpers.small_models import SIZES

CONFIG = ModelConfig(num_layers=3, post_norms=True, norm_plus_one=True, **SIZES)
MASK = ((True, False), (False, True), (True, True))


def test_it_equals_the_model_whose_sublayers_add_zero():
    model, params = language_model(CONFIG), init_params(CONFIG, jax.random.key(0), scale=0.3)
    slim = model.with_layers(MASK)
    zeroed = tuple(
        {**layer, "o": layer["o"] * float(attention), "down": layer["down"] * float(mlp)}
        for layer, (attention, mlp) in zip(params["layers"], MASK, strict=True)
    )
    cache, full_cache = slim.init_cache(1, 8), model.init_cache(1, 8)
    assert len(cache.k) == 2 and len(full_cache.k) == 3
    for ids in ([3, 5, 7], [9]):
        first = jnp.asarray([0 if len(ids) == 3 else 3], jnp.int32)
        visible, tokens = Visible.causal(first, len(ids)), jnp.asarray([ids], jnp.int32)
        actual = slim.forward(params, tokens, visible, cache)
        expected = model.forward({**params, "layers": zeroed}, tokens, visible, full_cache)
        cache, full_cache = actual.cache, expected.cache
        np.testing.assert_allclose(actual.hidden, expected.hidden, atol=1e-6)
    np.testing.assert_array_equal(cache.k[1], full_cache.k[2])
    assert model.with_layers(((True, True),) * 3) is model.with_features(())


def test_a_mask_of_another_depth_is_refused():
    with pytest.raises(MarsError, match="the mask has 2 layers and the model 3"):
        language_model(CONFIG).with_layers(MASK[:2])
