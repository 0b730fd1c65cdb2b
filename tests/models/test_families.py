"""Every family gives the logits and the greedy tokens of the same checkpoint in PyTorch transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mars_jax import hub
from tests.models import oracle

pytest.importorskip("torch")

PROMPT, NEW = 12, 64
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
BASE = SIZES | HEADS


def rope(kind, **fields):
    """Rope parameters whose trained length, 32, is far exceeded by the 76 tokens decoded."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, "factor": 4.0, **fields}}


TRAINED = {"original_max_position_embeddings": 32}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
MISTRAL = BASE | {"num_hidden_layers": 3}
ALTERNATING = {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 3}

CASES = {
    "llama, one key-value head per head": ("Llama", BASE | {"num_key_value_heads": 4}),
    "llama, tied, one shared key-value head": (
        "Llama",
        BASE | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama, every bias, head_dim 12": (
        "Llama",
        BASE | {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
    ),
    "llama, gelu": ("Llama", BASE | {"hidden_act": "gelu", "rms_norm_eps": 1e-3}),
    "llama, tanh gelu": ("Llama", BASE | {"hidden_act": "gelu_pytorch_tanh"}),
    "llama 3.1": ("Llama", BASE | rope("llama3", **TRAINED, **BANDS)),
    "llama, linear": ("Llama", BASE | rope("linear")),
    "llama, yarn": ("Llama", BASE | rope("yarn", **TRAINED)),
    "llama, yarn with mscale": ("Llama", BASE | rope("yarn", **TRAINED, mscale=0.7, mscale_all_dim=1.3)),
    "llama, yarn, every field": (
        "Llama",
        BASE | rope("yarn", **TRAINED, attention_factor=1.2, beta_fast=4.0, beta_slow=2.0, truncate=False),
    ),
    "mistral, window": ("Mistral", MISTRAL | {"sliding_window": 8}),
    "mistral, no window, head_dim 16": ("Mistral", MISTRAL | {"sliding_window": None, "head_dim": 16}),
    "qwen2, tied": ("Qwen2", BASE | {"tie_word_embeddings": True}),
    "qwen2, windows from layer 1 on": ("Qwen2", BASE | ALTERNATING | {"max_window_layers": 1}),
    "qwen2.5, yarn": ("Qwen2", BASE | rope("yarn", **TRAINED)),
    "qwen3": ("Qwen3", BASE | {"head_dim": 16}),
    "qwen3, tied, biases, head_dim 6": (
        "Qwen3",
        BASE | {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3, layer types": (
        "Qwen3",
        BASE
        | ALTERNATING
        | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}


def transformers_config(family, fields):
    import transformers

    with oracle.third_party():
        return getattr(transformers, f"{family}Config")(**fields, bos_token_id=1, eos_token_id=2)


def prompts(batch=2):
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (batch, PROMPT))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name, tmp_path):
    model = oracle.random_torch_model(transformers_config(*CASES[name]))
    oracle.save_torch(model, tmp_path)
    logits, greedy = oracle.logits_and_greedy(hub.load(tmp_path), prompts(), NEW)
    # 1e-4: sums of float32 products in another order; a wrong term shows as 1e-2 and more.
    np.testing.assert_allclose(logits, oracle.torch_logits(model, prompts()), atol=1e-4, rtol=0)
    np.testing.assert_array_equal(greedy, oracle.torch_greedy(model, prompts(), NEW))


@pytest.mark.parametrize(
    "old",
    [
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **TRAINED, **BANDS}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
        {"rope_theta": 500.0, "rope_scaling": None},
    ],
)
def test_configs_from_before_transformers_5_mean_the_same(old, tmp_path):
    """`rope_theta` and `rope_scaling` at the top, the dtype as `torch_dtype`."""
    oracle.save_torch(oracle.random_torch_model(transformers_config("Llama", BASE)), tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    data = {key: value for key, value in data.items() if key not in ("rope_parameters", "dtype")}
    (tmp_path / "config.json").write_text(json.dumps(data | old | {"torch_dtype": "float32"}))
    logits, _ = oracle.logits_and_greedy(hub.load(tmp_path), prompts(), 1)
    np.testing.assert_allclose(
        logits, oracle.torch_logits(oracle.load_torch(tmp_path), prompts()), atol=1e-4, rtol=0
    )
