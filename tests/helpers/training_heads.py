"""A small target and heads for tests of training."""

import jax
import jax.numpy as jnp

from mars_jax import drafters, verify
from mars_jax.core.types import Params
from mars_jax.models import ModelConfig, language_model
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.transformer import init_params
from tests.helpers import decode_all, ragged

SIZES = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_kv_heads": 1}
CONFIG = ModelConfig(num_layers=3, **SIZES)
LAYER = ModelConfig(num_layers=1, **SIZES)
EAGLE3 = EagleConfig(
    version=3, layer=LAYER, target_hidden_size=16, draft_vocab_size=12, feature_layers=(0, 1, 2)
)
TARGET = language_model(CONFIG)
FEATURES = TARGET.with_features((0, 1, 2))
WEIGHTS = init_params(CONFIG, jax.random.key(0), scale=0.4)
IDS = jnp.asarray([0, 1, 3, 4, 5, 6, 8, 9, 10, 13, 14, 15], jnp.int32)


def target_texts(rows, length):
    """Text that the target itself would write, greedily, from random beginnings."""
    prompts, lengths = ragged([2] * rows, length, 16, seed=9)
    state, _ = decode_all(
        TARGET, drafters.none(), verify.exact(), prompts, lengths, params=Params(target=WEIGHTS)
    )
    return state.tokens
