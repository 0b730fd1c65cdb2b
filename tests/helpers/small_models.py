"""Configurations of small real models and draft heads, and random weights."""

import jax
import numpy as np

from mars_jax.contrib.models.medusa_layers import MedusaConfig
from mars_jax.models import ModelConfig, init_params
from mars_jax.models.eagle_head import EagleConfig

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2}
CONFIG = ModelConfig(num_layers=2, **SIZES)
EAGLE_3 = EagleConfig(
    version=3, layer=ModelConfig(num_layers=1, **SIZES), target_hidden_size=32, draft_vocab_size=32,
    feature_layers=(0, 1, 1),
)  # fmt: skip
MEDUSA = MedusaConfig(num_heads=3, num_layers=1, hidden_size=32, vocab_size=64)


def random_weights(config, *, scale, seed=0):
    """Return weights drawn with numpy: `init_params` compiles a program for every shape. Norms stay near 1."""
    draw = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    arrays = jax.tree.map(
        lambda x: (draw.normal(size=x.shape) * scale + (x.ndim == 1)).astype(x.dtype), shapes
    )
    return jax.device_put(arrays)
