"""GGUF metadata that changes the forward pass: each key is either supported or refused by name.

Meanings and defaults: `llama_model::load_hparams` in ggml-org/llama.cpp, src/llama-model.cpp.
"""

import re

import pytest

from mars_jax import hub
from mars_jax.utils.errors import MarsError
from tests.helpers.gguf_files import ARCHITECTURES, ATTENTION_FACTOR, WIDTH, write

# Architecture, key, a neutral value, and a value that changes the forward pass.
KEYS = [
    ("llama", "attention.causal", True, False),
    ("llama", "attention.scale", WIDTH**-0.5, 0.125),
    ("llama", "attention.sliding_window", 128, 127),
    ("llama", "attention.value_length", WIDTH, 8),
    ("llama", "attn_logit_softcapping", 0.0, 50.0),
    ("qwen2", "expert_count", 0, 8),
    ("llama", "expert_used_count", 0, 2),
    ("llama", "final_logit_softcapping", 0.0, 30.0),
    ("llama", "rope.dimension_count", WIDTH, 8),
    ("llama", "rope.dimension_count_swa", WIDTH, 8),
    ("llama", "rope.scaling.attn_factor", 1.0, 0.5),
    ("llama", "rope.scaling.yarn_beta_fast", 32.0, 8.0),
    ("llama", "rope.scaling.yarn_ext_factor", -1.0, 0.5),
    ("llama", "rope.scaling.yarn_log_multiplier", 0.0, 0.1),
    ("llama3", "rope.scaling.type", "none", "yarn"),
    ("qwen2", "attention.sliding_window", 0, 8),
    ("qwen3", "rope.dimension_count", WIDTH, 8),
    ("gemma2", "attention.sliding_window_pattern", [True, False], [True, True]),
    ("gemma2", "attention.key_length_swa", WIDTH, 8),
    ("gemma2", "rope.freq_base_swa", 10000.0, 500.0),
    ("gemma3", "attention.sliding_window_pattern", 6, 2),
    ("gemma3", "attn_logit_softcapping", 0.0, 50.0),
    ("glm4", "rope.dimension_sections", [0, 0, 0, 0], [4, 2, 2, 0]),
    ("glm4moe", "expert_gating_func", 0, 1),
    ("qwen35", "attention.recurrent_layers", [True, False], [False, False]),
    ("gpt-oss", "attention.sliding_window_pattern", 2, 4),
    ("qwen2moe", "expert_weights_norm", False, True),
    ("qwen3moe", "expert_weights_scale", 1.0, 2.5),
    ("mistral3", "rope.scaling.yarn_log_multiplier", 1.0, 0.5),
    ("olmo3", "attention.sliding_window_pattern", 4, 2),
    ("phi4", "rope.scaling.attn_factor", ATTENTION_FACTOR, 1.0),
    ("granite", "rope.dimension_count", WIDTH, 8),
]


@pytest.mark.parametrize(("case", "key", "neutral", "changing"), KEYS)
def test_keys_that_change_the_forward_pass_are_refused_unless_neutral(tmp_path, case, key, neutral, changing):
    def config(name, values):
        return hub.read_config(str(write(tmp_path / name, case, values=values)))

    full = f"{ARCHITECTURES.get(case, case)}.{key}"
    assert config("neutral.gguf", {full: neutral}) == config("plain.gguf", {})
    with pytest.raises(MarsError, match=re.escape(key)):
        config("changing.gguf", {full: changing})


@pytest.mark.parametrize("key", ["scaling.factor", "scale_linear"])
def test_a_factor_without_a_type_scales_positions_linearly_as_in_llama_cpp(tmp_path, key):
    path = write(tmp_path / "model.gguf", "llama", values={f"llama.rope.{key}": 4.0})
    rope = hub.read_config(str(path)).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3"])
def test_heads_without_a_width_divide_the_hidden_size(tmp_path, case):
    """The config classes of Qwen3 and Gemma default to 128 and 256 instead."""
    path = write(tmp_path / "model.gguf", case)
    key = f"{case}.attention.key_length".encode()
    path.write_bytes(path.read_bytes().replace(key, key[:-6] + b"absent"))
    assert hub.read_config(str(path)).head_dim == 64 // 4
