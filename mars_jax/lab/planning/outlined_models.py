"""Configs, without weights, of the models in published results, keyed by name.

Sizes: config.json of lmsys/vicuna-13b-v1.3, meta-llama/Llama-3.1-8B-Instruct, meta-llama/Llama-3.2-1B-Instruct,
meta-llama/Llama-3.3-70B-Instruct, Qwen/Qwen3-8B, Qwen/Qwen3-32B, Qwen/Qwen3-235B-A22B, Qwen/Qwen3.5-9B,
Qwen/Qwen3.5-35B-A3B, openai/gpt-oss-20b and openai/gpt-oss-120b.
"""

from __future__ import annotations

from functools import partial

from mars_jax.hub.config_json import from_json
from mars_jax.models.config import ModelConfig, Rope

_llama3 = partial(
    ModelConfig,
    vocab_size=128256,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131072,
    norm_eps=1e-5,
    rope=Rope(theta=500000.0, kind="llama3", factor=8.0, original_max_positions=8192),
)
_qwen3 = partial(
    ModelConfig,
    family="qwen3",
    vocab_size=151936,
    head_dim=128,
    max_positions=40960,
    qk_norm=True,
    rope=Rope(theta=1000000.0),
)


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    sizes = {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "vocab_size": 201088}
    sizes |= {"num_hidden_layers": layers, "num_local_experts": experts}
    return from_json({"model_type": "gpt_oss"} | sizes)  # other settings are the defaults of the family


def _qwen3_5(**sizes: str | int) -> ModelConfig:
    return from_json({"num_attention_heads": 16, "vocab_size": 248320, "rope_theta": 1e7} | sizes)


CONFIGS = {
    "vicuna-13b": ModelConfig(
        vocab_size=32000, hidden_size=5120, intermediate_size=13824, num_layers=40, num_heads=40
    ),
    "llama-3.1-8b": _llama3(hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32),
    "llama-3.2-1b": _llama3(
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        head_dim=64,
        rope=Rope(theta=500000.0, kind="llama3", factor=32.0, original_max_positions=8192),
        tie_embeddings=True,
    ),
    "llama-3.3-70b": _llama3(hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64),
    "qwen3-8b": _qwen3(
        hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, num_kv_heads=8
    ),
    "qwen3-32b": _qwen3(
        hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64, num_kv_heads=8
    ),
    "qwen3-235b-a22b": _qwen3(
        family="qwen3_moe",
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        num_experts=128,
        experts_per_token=8,
        expert_size=1536,
    ),
    "qwen3.5-9b": _qwen3_5(
        model_type="qwen3_5_text", hidden_size=4096, intermediate_size=12288, num_hidden_layers=32
    ),
    "qwen3.5-35b-a3b": _qwen3_5(model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40),
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
}
PACKED_EXPERTS = ("gpt-oss-20b", "gpt-oss-120b")
"""Models whose experts are published in MXFP4."""
