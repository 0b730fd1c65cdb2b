"""Load small variants of published checkpoints with random weights, and compare their logits with transformers.

    python -m scripts.checks.family_variants --output FILE

Each config copies the settings that affect the forward pass from a published config, but has smaller widths and fewer
layers. The maximum and the pretraining context lengths are divided by the same number, so that the test text is longer
than the attention windows and the pretraining context. The logits of a variant must match those of transformers to
within 1e-4, or the package must refuse the config with a message. If the logits differ by more, the script also reports
the error of both libraries relative to transformers in float64. It also reports how much the float64 logits change if
each embedding value is perturbed at random by a relative error of at most 2^-24, the unit roundoff of float32.

The settings were entered by hand; the published files were not downloaded.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from scripts import common

TOLERANCE = 1e-4
CONTEXT, TEXT, VOCAB, LAYERS, WIDTH = 128, 40, 61, 4, 16
"""Sizes of the small models: context, length of the test text, vocabulary, number of layers, and head width."""
Json = dict[str, Any]


def longrope(pairs: int, kind: str = "longrope") -> Json:
    """Return LongRoPE settings with divisors that begin near 1 and grow, as the published ones do."""
    short, long = np.linspace(1.0, 3.0, pairs), np.geomspace(1.0, 60.0, pairs)
    return {"type": kind, "short_factor": short.tolist(), "long_factor": long.tolist()}


YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
PHI = {"model_type": "phi3", "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
PHI_4K = PHI | {"max_position_embeddings": 4096, "sliding_window": 2047}
PHI_128K = PHI | {"max_position_embeddings": 131072, "sliding_window": 262144, "rope_scaling": longrope(8)}
MINI, MEDIUM = {"num_attention_heads": 32}, {"num_attention_heads": 40, "num_key_value_heads": 10}
PHI_4 = PHI | MEDIUM | {"max_position_embeddings": 16384, "original_max_position_embeddings": 16384}
PHI_4 |= {"rope_theta": 250000.0, "sliding_window": None}
PHI_4_MINI = PHI_128K | {"num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True}
PHI_4_MINI |= {"partial_rotary_factor": 0.75, "rope_scaling": longrope(6)}
OLMO_2 = {
    "model_type": "olmo2",
    "rope_theta": 500000.0,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
PATTERN = ["sliding_attention"] * 3 + ["full_attention"]
OLMO_3 = OLMO_2 | {"model_type": "olmo3", "max_position_embeddings": 65536, "sliding_window": 4096}
OLMO_3 |= {"layer_types": PATTERN}
OLMO_3_YARN = {
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
}
SMOLLM_3 = {
    "model_type": "smollm3",
    "rope_theta": 5e6,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
}
SMOLLM_3 |= {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}
SMOLLM_3 |= {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False, "sliding_window": None}
GRANITE = {"model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
GRANITE |= {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
GRANITE_2B = GRANITE | {"attention_multiplier": 0.015625, "logits_scaling": 8.0}
GRANITE_8B = GRANITE | {"attention_multiplier": 0.0078125, "logits_scaling": 16.0}
LONG_GRANITE = {"rope_theta": 1e7, "max_position_embeddings": 131072}
MINISTRAL = {"model_type": "ministral3", "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8}
MINISTRAL |= {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "sliding_window": None}
MINISTRAL_ROPE = YARN | {"factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0}
MINISTRAL_ROPE |= {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "rope_theta": 1e6}
GLM = {"model_type": "glm4", "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 2}
GLM |= {
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
QWEN_MOE = {
    "model_type": "qwen2_moe",
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "sliding_window": 32768,
}
QWEN_MOE |= {"num_attention_heads": 16, "num_experts_per_tok": 4, "decoder_sparse_step": 1}
GPT_OSS = {"model_type": "gpt_oss", "rope_theta": 150000, "rms_norm_eps": 1e-5, "head_dim": WIDTH}
GPT_OSS |= {"max_position_embeddings": 131072, "sliding_window": 128, "swiglu_limit": 7.0}
GPT_OSS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4}
GPT_OSS_YARN = YARN | {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
DELTA = {"head_dim": 256, "num_attention_heads": 16, "max_position_embeddings": 262144}
DELTA |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4}
QWEN_NEXT = DELTA | {"model_type": "qwen3_next", "num_key_value_heads": 2, "num_experts_per_tok": 5}
QWEN_NEXT |= {"partial_rotary_factor": 0.25, "rope_theta": 1e7, "norm_topk_prob": True, "mlp_only_layers": []}
MROPE = {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
MROPE |= {"rope_type": "default", "rope_theta": 1e7}
QWEN_3_5 = DELTA | {"model_type": "qwen3_5_text", "num_key_value_heads": 4, "rope_parameters": MROPE}
GLM_MOE = {"model_type": "glm4_moe", "head_dim": 128, "num_attention_heads": 96, "num_key_value_heads": 8}
GLM_MOE |= {"attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
GLM_MOE |= {"max_position_embeddings": 131072, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
GLM_MOE |= {"use_qk_norm": True, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
GLM_MOE_AIR = {"use_qk_norm": False, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
DEEPSEEK = {"model_type": "deepseek_v3", "num_attention_heads": 128, "num_key_value_heads": 128}
DEEPSEEK |= {"max_position_embeddings": 163840, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
DEEPSEEK |= {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "rope_theta": 10000.0}
DEEPSEEK_YARN = {"type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
DEEPSEEK_YARN |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
LLAMA = {"model_type": "llama", "num_attention_heads": 32, "max_position_embeddings": 4096}

VARIANTS: dict[str, Json] = {
    "Phi-3-mini-4k-instruct": PHI_4K | MINI,
    "Phi-3-mini-128k-instruct": PHI_128K | MINI,
    "Phi-3-mini-128k-instruct, first revision (su)": PHI_128K | MINI | {"rope_scaling": longrope(8, "su")},
    "Phi-3.5-mini-instruct": PHI_128K | MINI,
    "Phi-3-medium-4k-instruct": PHI_4K | MEDIUM,
    "Phi-3-medium-128k-instruct": PHI_128K | MEDIUM | {"sliding_window": 131072},
    "phi-4": PHI_4,
    "Phi-4-reasoning": PHI_4 | {"max_position_embeddings": 32768, "rope_theta": 500000.0},
    "Phi-4-mini-instruct": PHI_4_MINI,
    "Phi-4-mini-instruct, context of 4096": PHI_4_MINI | {"max_position_embeddings": 4096},
    "OLMo-2-0425-1B": OLMO_2 | {"num_attention_heads": 16},
    "OLMo-2-1124-7B": OLMO_2 | {"num_attention_heads": 32},
    "OLMo-2-0325-32B": OLMO_2 | {"num_attention_heads": 40, "num_key_value_heads": 8},
    "Olmo-3-1025-7B": OLMO_3 | {"num_attention_heads": 32, "rope_scaling": YARN | OLMO_3_YARN},
    "Olmo-3-1125-32B": OLMO_3
    | {"num_attention_heads": 40, "num_key_value_heads": 8, "rope_scaling": YARN | OLMO_3_YARN},
    "Olmo-3, pretraining context": OLMO_3 | {"num_attention_heads": 32, "max_position_embeddings": 8192},
    "SmolLM3-3B": SMOLLM_3,
    "SmolLM3-3B, yarn as in its model card": SMOLLM_3
    | {
        "max_position_embeddings": 131072,
        "rope_scaling": YARN | {"factor": 2.0, "original_max_position_embeddings": 65536},
    },
    "granite-3.0-2b-instruct": GRANITE_2B | {"rope_theta": 1e4, "max_position_embeddings": 4096},
    "granite-3.1-8b-instruct": GRANITE_8B | LONG_GRANITE,
    "granite-3.3-2b-instruct": GRANITE_2B | LONG_GRANITE,
    "granite-3.3-8b-instruct": GRANITE_8B | LONG_GRANITE,
    "Ministral-3-3B-Instruct-2512": MINISTRAL
    | {"tie_word_embeddings": True, "rope_parameters": MINISTRAL_ROPE},
    "Ministral-3-8B-Instruct-2512": MINISTRAL | {"rope_parameters": MINISTRAL_ROPE},
    "Ministral-3-14B-Instruct-2512": MINISTRAL | {"rope_parameters": MINISTRAL_ROPE | {"rope_theta": 1e9}},
    "glm-4-9b-chat-hf": GLM
    | {"model_type": "glm", "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7},
    "GLM-4-9B-0414": GLM,
    "GLM-4-32B-0414": GLM | {"num_attention_heads": 48, "num_key_value_heads": 8, "attention_bias": False},
    "Qwen1.5-MoE-A2.7B": QWEN_MOE
    | {"max_position_embeddings": 8192, "max_window_layers": 21, "norm_topk_prob": False},
    "Qwen2-57B-A14B": QWEN_MOE | {"num_key_value_heads": 4, "num_attention_heads": 28, "qkv_bias": True},
    "gpt-oss-20b": GPT_OSS | {"num_local_experts": 32, "rope_scaling": GPT_OSS_YARN},
    "gpt-oss-120b": GPT_OSS | {"num_local_experts": 128, "rope_scaling": GPT_OSS_YARN},
    "Qwen3-Next-80B-A3B-Instruct": QWEN_NEXT,
    "Qwen3.5-4B": QWEN_3_5 | {"tie_word_embeddings": True},
    "Qwen3.5-9B": QWEN_3_5,
    "Qwen3.5-27B": QWEN_3_5 | {"num_attention_heads": 24, "linear_num_value_heads": 48},
    "Qwen3.5-35B-A3B": QWEN_3_5
    | {"model_type": "qwen3_5_moe_text", "num_key_value_heads": 2, "num_experts_per_tok": 5},
    "Llama 2 with dynamic NTK": LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "Llama with rotated halves of heads": LLAMA | {"partial_rotary_factor": 0.5},
    "OLMo-7B-hf": {"architectures": ["OlmoForCausalLM"]},
    "OLMoE-1B-7B-0924": {"architectures": ["OlmoeForCausalLM"]},
    "Phi-3-small-8k-instruct": {"architectures": ["Phi3SmallForCausalLM"]},
    "Phi-3.5-MoE-instruct": {"architectures": ["PhiMoEForCausalLM"]},
    "Phi-4-multimodal-instruct": {"architectures": ["Phi4MMForCausalLM"]},
    "granite-3.1-3b-a800m-instruct": {"architectures": ["GraniteMoeForCausalLM"]},
    "granite-4.0-h-small": {"architectures": ["GraniteMoeHybridForCausalLM"]},
    "glm-4-9b-chat": {"architectures": ["ChatGLMModel"]},
    "GLM-4.5-Air": GLM_MOE | GLM_MOE_AIR,
    "GLM-4.5": GLM_MOE,
    "DeepSeek-V3": DEEPSEEK | {"rope_scaling": DEEPSEEK_YARN},
}
"""Settings from published config.json files, limited to those that affect the forward pass."""


def shrink(data: Json) -> Json:
    """Return the config of a small model that keeps the other settings of a published config."""
    heads = data.get("num_attention_heads", 32)
    group = min(heads // data.get("num_key_value_heads", heads), 4)
    ratio = CONTEXT / data.get("max_position_embeddings", 4096)
    small = {
        "vocab_size": VOCAB,
        "hidden_size": 2 * group * WIDTH,
        "intermediate_size": 44,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2 * group,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if "head_dim" in data:
        small |= {"head_dim": WIDTH, "hidden_size": 48}
    if data.get("sliding_window") in (128, 2047, 4096):
        small["sliding_window"] = 7
    if group_size := data.get("linear_num_value_heads", 0) // 16:
        small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * group_size}
        small |= {"linear_key_head_dim": WIDTH, "linear_value_head_dim": WIDTH}
    if data.get("model_type") in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"):
        small |= {"num_experts": 8, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}
    if data.get("model_type") in ("glm4_moe", "deepseek_v3"):
        small |= {"n_routed_experts": 16, "moe_intermediate_size": 20}
    if data.get("model_type") == "deepseek_v3":
        small |= {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
        small |= {"v_head_dim": 6}
    if trained := data.get("original_max_position_embeddings"):
        small["original_max_position_embeddings"] = int(trained * ratio)
    for key in ("rope_scaling", "rope_parameters"):
        scaling = dict(data.get(key) or {})
        if trained := scaling.get("original_max_position_embeddings"):
            small[key] = scaling | {"original_max_position_embeddings": int(trained * ratio)}
    return data | small


def outcome(data: Json, directory: Path) -> Json:
    """Return the largest logit difference of a variant, or the error message if the package refuses it."""
    from mars_jax import MarsError, hub
    from mars_jax.hub.config_json import from_json
    from tests.helpers import transformers_oracle

    small = shrink(data)
    try:
        from_json(small)
    except MarsError as error:
        return {"outcome": "refused", "message": str(error)}
    import transformers

    # transformers 5 does not recognise "su", the original name of LongRoPE.
    fields = json.loads(json.dumps(small).replace('"su"', '"longrope"'))
    with transformers_oracle.third_party():
        config = transformers.AutoConfig.for_model(**fields)
    model = transformers_oracle.random_torch_model(config)
    transformers_oracle.save_torch(model, directory)
    # Replace the config that transformers 5 saved with one in the published layout.
    (directory / "config.json").write_text(json.dumps(small))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, TEXT))
    logits, _ = transformers_oracle.logits_and_greedy(hub.load(directory), tokens, 1)
    theirs = transformers_oracle.torch_logits(model, tokens)
    row: Json = {"outcome": "equal", "difference": float(np.abs(logits - theirs).max())}
    if not row["difference"] < TOLERANCE:  # also NaN
        exact, rounded = (float64_logits(model, tokens, noise=noise) for noise in (0.0, 2.0**-24))
        row["outcome"] = "different"
        named = {"mars-jax": logits, "transformers": theirs, "rounded_embeddings": rounded}
        row["from_float64"] = {name: float(np.abs(x - exact).max()) for name, x in named.items()}
    return row


def float64_logits(model: Any, tokens: np.ndarray, *, noise: float) -> np.ndarray:
    """Return the logits of a torch model, computed in float64 even if its code casts to float32.

    Each embedding value is multiplied by a random factor from `1 - noise` to `1 + noise`.
    """
    import torch

    class InFloat64(torch.overrides.TorchFunctionMode):
        """A mode that replaces float32 with float64 in the arguments of torch functions."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.float:
                function = torch.Tensor.double
            named = {name: self._wide(x) for name, x in (kwargs or {}).items()}
            return function(*map(self._wide, args), **named)

        def _wide(self, x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

    wide = copy.deepcopy(model).double()
    wide.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output * (1 + torch.empty_like(output).uniform_(-noise, noise))
    )
    wide.set_experts_implementation("eager")  # torch's grouped matrix products do not support float64
    with torch.no_grad(), InFloat64():
        return wide(torch.tensor(tokens), use_cache=False).logits.numpy()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows = []
    for name, data in VARIANTS.items():
        if args.only and name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as work:
            row = {"checkpoint": name} | outcome(data, Path(work))
        rows.append(row)
        print(f"{name:<46} {row['outcome']:<10} {row.get('message', row.get('difference'))}", flush=True)
    common.write(args.output, {"environment": common.provenance(), "tolerance": TOLERANCE, "variants": rows})
    sys.exit(any(row["outcome"] == "different" for row in rows))


if __name__ == "__main__":
    main()
