"""Bits of a node on a CPU: equal for any other nodes and any cache length. Oracle: the node by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.models.attention import BLOCK, attend
from mars_jax.models.config import ModelConfig
from mars_jax.models.layers import rms_norm
from mars_jax.models.transformer import language_model

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="guaranteed only on a CPU")


def test_attention_of_a_node_does_not_depend_on_how_many_there_are():
    nodes, live = 8, 166
    q, k, v = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(1, nodes, 3, 3, 64), *[(1, 2 * BLOCK, 3, 64)] * 2])
    )
    mask = (jnp.arange(2 * BLOCK)[None] < jnp.arange(live - nodes + 1, live + 1)[:, None])[None]
    attending = jax.jit(attend)
    full = attending(q, k, v, mask, jnp.int32(live))
    for n in (1, 3, 4):
        np.testing.assert_array_equal(attending(q[:, :n], k, v, mask[:, :n], jnp.int32(live)), full[:, :n])


def test_a_norm_does_not_depend_on_how_many_rows_there_are():
    x, scale, norm = jax.random.normal(jax.random.key(0), (1, 16, 576)), jnp.ones((576,)), jax.jit(rms_norm)
    full = norm(x, scale, 1e-5)
    for n in (1, 3):
        np.testing.assert_array_equal(norm(x[:, :n], scale, 1e-5), full[:, :n])


def test_a_cache_has_whole_blocks():
    config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    model = language_model(config)
    assert [model.init_cache(1, slots).slots for slots in (1, BLOCK, BLOCK + 1)] == [BLOCK, BLOCK, 2 * BLOCK]
