"""DFlash heads on a small target."""

import functools

import jax
import jax.numpy as jnp

from mars_jax.contrib.models import dflash_head as head
from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.core.types import Params
from mars_jax.drafters.tree_shapes import Dynamic
from mars_jax.models import ModelConfig, language_model
from mars_jax.models.transformer import init_params

VOCAB = 8  # small, so that a random head sometimes predicts the right token
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_kv_heads": 1}
CONFIG = ModelConfig(num_layers=3, **SIZES)
MODEL = language_model(CONFIG)
LAYER = ModelConfig(family="qwen3", qk_norm=True, num_layers=2, windows=(None, 5), **SIZES)
COMMON = {
    "layer": LAYER,
    "target_hidden_size": 16,
    "feature_layers": (0, 2),
    "mask_token": 3,
    "block_size": 4,
}
HEADS = {
    "dflash": DFlashConfig(draft_vocab_size=6, own_unembed=True, causal=(False, True), **COMMON),
    "dspark": DFlashConfig(
        draft_vocab_size=VOCAB,
        from_anchor=True,
        markov_rank=4,
        confidence=True,
        confidence_markov=True,
        **COMMON,
    ),
}
SHAPES = {"chain": None, "static tree": (3, 2, 1), "dynamic tree": Dynamic(3, 3, 9)}


@functools.cache
def weights(name):
    params = head.init_params(HEADS[name], jax.random.key(3), scale=0.3)
    if "ids" in params:
        params["ids"] = jnp.asarray([0, 2, 3, 5, 6, 7], jnp.int32)  # neither the first ids nor all of them
    return Params(target=init_params(CONFIG, jax.random.key(0), scale=0.3), draft=params)
