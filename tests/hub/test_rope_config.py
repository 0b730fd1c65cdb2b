"""RoPE settings of published configs. Oracle: transformers. Contradictory settings are refused."""

import copy
import math
import re

import pytest

from mars_jax.hub.config_json import from_json
from mars_jax.models import Rope
from mars_jax.utils.errors import MarsError

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 6}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"max_position_embeddings": 131072}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LLAMA3_ROPE = Rope(theta=5e5, kind="llama3", factor=8.0, original_max_positions=8192)
YARN_ROPE = Rope(
    theta=1e6, kind="yarn", factor=4.0, original_max_positions=32768, attention_factor=1.1386294361119891
)
YARN_CONFIG = {"rope_theta": 1000000, "rope_scaling": YARN, "max_position_embeddings": 40960}
LAYER_TYPES = {
    "full_attention": {**LINEAR, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

PHI = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
PHI_ROPE = Rope(
    kind="longrope",
    original_max_positions=4096,
    short_divisors=(1.0, 1.1, 1.2, 1.3),
    long_divisors=(1.0, 2.0, 4.0, 8.0),
    is_long=True,
    attention_factor=(1 + math.log(32) / math.log(4096)) ** 0.5,
)
MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
}
MINISTRAL |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MINISTRAL_ROPE = Rope(theta=1e6, kind="yarn", factor=16.0, original_max_positions=16384, query_growth=0.1)

ACCEPTED = {
    "llama-2": ("llama", {}, Rope()),
    "llama-3.1": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}, LLAMA3_ROPE),
    "llama-3.1, transformers 5": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, LLAMA3_ROPE),
    "qwen3 with yarn": ("qwen3", YARN_CONFIG, YARN_ROPE),
    "both generations, equal": (
        "qwen3",
        YARN_CONFIG | {"rope_parameters": {**YARN, "type": None, "rope_type": "yarn", "rope_theta": 1e6}},
        YARN_ROPE,
    ),
    "phi-3-mini-128k": (
        "phi3",
        {"rope_scaling": {"type": "longrope", **PHI}, "original_max_position_embeddings": 4096},
        PHI_ROPE,
    ),
    "phi-3-mini-128k, transformers 5": (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", **PHI}, "original_max_position_embeddings": 4096},
        PHI_ROPE,
    ),
    "ministral 3": ("ministral3", {"rope_parameters": MINISTRAL}, MINISTRAL_ROPE),
    "glm-4": ("glm4", {}, Rope(fraction=0.5, interleaved=True)),
    "llama with dynamic ntk": (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        Rope(kind="dynamic", factor=2.0),
    ),
    "mixtral, base by default": ("mixtral", {}, Rope(theta=1e6)),
}
GEMMA3_ROPE = Rope(theta=1e6, kind="linear", factor=8.0)
GEMMA3 = {
    "gemma-3-1b": ({"rope_theta": 1000000, "rope_local_base_freq": 10000}, Rope(theta=1e6)),
    "gemma-3-4b": ({"rope_scaling": LINEAR}, GEMMA3_ROPE),
    "gemma-3-4b, transformers 5": ({"rope_parameters": LAYER_TYPES}, GEMMA3_ROPE),
}
CONTRADICTIONS = [
    (
        "llama",
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        "rope_parameters sets rope_type to 'linear', and another setting is 'yarn'",
    ),
    (
        "llama",
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "rope_parameters sets rope_theta to 1000000.0, and another setting is 10000.0",
    ),
    (
        "llama",
        {"rope_scaling": {**YARN, "rope_type": "linear"}},
        "rope_scaling sets rope_type to 'linear', and another setting is 'yarn'",
    ),
    (
        "llama",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5: this architecture needs 1",
    ),
    ("phi3", {"rope_scaling": {"type": "su"}}, "rope type 'longrope' needs short_factor"),
    ("ministral3", {}, "rope_parameters has no llama_4_scaling_beta"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear': expected an object"),
    ("llama", {"rope_parameters": LAYER_TYPES}, "settings for each layer type (full_attention)"),
    (
        "gemma3_text",
        {"rope_local_base_freq": 2e4, "rope_parameters": LAYER_TYPES},
        "rope_parameters sets rope_theta to 10000.0, and another setting is 20000.0",
    ),
    (
        "gemma3_text",
        {"rope_scaling": {**LINEAR, "factor": 4.0}, "rope_parameters": LAYER_TYPES},
        "rope_parameters sets factor to 8.0, and another setting is 4.0",
    ),
    ("gemma3_text", {"rope_parameters": {**LINEAR, "rope_theta": 1e6}}, "rope_parameters has rope_type"),
]


def read_model(family, data):
    return from_json({"model_type": family, **SIZES, **data}).rope


@pytest.mark.parametrize("name", ACCEPTED)
def test_published_settings_are_read_as_transformers_reads_them(name):
    family, data, expected = ACCEPTED[name]
    assert read_model(family, data) == expected
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(family, **copy.deepcopy({**SIZES, **data})).rope_parameters
    kind = expected.kind if expected.kind != "none" else "default"
    assert (theirs["rope_type"], theirs["rope_theta"]) == (kind, expected.theta)
    assert theirs.get("factor", 1.0) == expected.factor


@pytest.mark.parametrize("name", GEMMA3)
def test_gemma_3_reads_settings_for_each_layer_type(name):
    data, expected = GEMMA3[name]
    config = from_json({"model_type": "gemma3_text", **SIZES, **data})
    assert (config.rope, config.local_rope) == (expected, Rope(theta=1e4))


@pytest.mark.parametrize(("family", "data", "expected"), CONTRADICTIONS)
def test_contradictory_settings_are_refused_with_both_values(family, data, expected):
    with pytest.raises(MarsError, match=re.escape(expected)):
        read_model(family, data)
