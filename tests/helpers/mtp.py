"""Checkpoints with a random MTP module."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.modeling_layers import MtpModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from mars_jax import hub
from mars_jax.hub.save import named_arrays
from mars_jax.models.heads import init_params
from mars_jax.models.mtp_head import MtpConfig
from tests.helpers import transformers_oracle

SIZES = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 128}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 1}
EXPERTS |= {"topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
LATENT |= {"num_key_value_heads": 4}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 12, "head_dim": 16, "num_key_value_heads": 2}
LINEAR |= {"layer_types": ["full_attention", "linear_attention"]}
MROPE = {
    "rope_type": "default",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],
}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
QWEN_EXPERTS |= {"shared_expert_intermediate_size": 28}
# The config class and sizes of the target in transformers, and fields to change in config.json.
TARGETS = {
    "glm4_moe": ("Glm4MoeConfig", EXPERTS | {"head_dim": 16, "num_key_value_heads": 2}, {}),
    "deepseek_v3": ("DeepseekV3Config", EXPERTS | LATENT, {}),
    "qwen3_next": ("Qwen3NextConfig", LINEAR | QWEN_EXPERTS, {}),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR | {"rope_parameters": MROPE}, {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", LINEAR | QWEN_EXPERTS | {"rope_parameters": MROPE}, {}),
    "mimo": (
        "Qwen2Config",
        {"num_key_value_heads": 2},
        {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]},
    ),
}


def add_module(path: Path, scale: float = 0.3, **fields) -> None:
    """Add a random MTP module to a checkpoint, and `fields` to its config.json."""
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(data | {"num_nextn_predict_layers": 1} | fields))
    config = MtpConfig.outline(hub.read_config(path))
    params = init_params(config, jax.random.key(7), scale=scale)
    draw = np.random.default_rng(7)
    arrays = {
        # Norms stay near 1, and the bias of a router near 0.
        name: array + 0.2 * draw.normal(size=array.shape).astype(array.dtype) if array.ndim == 1 else array
        for name, array in named_arrays(config.weights(), params).items()
    }
    if config.layer.family == "qwen3_5_moe_text":
        # The published files store the experts of a layer together.
        arrays = _stacked(arrays)
    save_file(load_file(path / "model.safetensors") | arrays, path / "model.safetensors", {"format": "pt"})


def checkpoint(path: Path, kind: str, vocab: int = 61):
    """Write a random target of `kind` with a module, and return the target in PyTorch."""
    config_class, sizes, fields = TARGETS[kind]
    config = getattr(transformers, config_class)(**SIZES, **sizes, vocab_size=vocab)
    model = transformers_oracle.random_torch_model(config)
    transformers_oracle.save_torch(model, path)
    add_module(path, **fields)
    return model


def logits_of_transformers(path: Path, tokens: np.ndarray) -> np.ndarray:
    """Return the logits f32[n - 1, V] of transformers' module on a text i32[n], which predict tokens 2 to n."""
    model, ids = transformers_oracle.load_torch(path), torch.tensor(tokens[None], dtype=torch.int64)
    with torch.no_grad(), transformers_oracle.third_party():
        hidden = model.model(ids).last_hidden_state[:, :-1]
        module = MtpModel.from_pretrained(model).eval()
        positions = torch.arange(1, len(tokens))[None]
        hidden = module.forward_layer(0, hidden, positions, None, input_ids=ids[:, 1:])
        return module.shared_head(hidden)[0].numpy()


class MimoModule(torch.nn.Module):
    """MiMo's module, after `MiMoMultiTokenPredictorLayer` of vLLM and of SGLang, over transformers' Qwen2 layer."""

    prefix, layer = "model.mtp_layers.0.", ""

    def __init__(self, model):
        super().__init__()
        config = model.config
        norms = [Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)]
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = norms
        self.input_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.mtp_block = Qwen2DecoderLayer(config, 0)

    def feature(self, states, normed):
        return states

    def before(self, embeds, hidden):
        embeds[:, 0] = 0  # the first position, which has nothing before it
        joined = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embeds)], dim=-1)
        return self.input_proj(joined)

    def after(self, x):
        return self.final_layernorm(x)


class QwenModule(torch.nn.Module):
    """The module of Qwen3-Next and Qwen3.5, after `qwen3_next_mtp.py` and `qwen3_5_mtp.py` of vLLM and of SGLang."""

    prefix, layer = "mtp.", "layers.0."

    def __init__(self, model):
        super().__init__()
        config, norm = model.config, type(model.model.norm)
        norms = [norm(config.hidden_size, config.rms_norm_eps) for _ in range(3)]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.mtp_block = type(model.model.layers[0])(config, config.layer_types.index("full_attention"))

    def feature(self, states, normed):
        return normed

    def before(self, embeds, hidden):
        return self.fc(
            torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)], dim=-1)
        )

    def after(self, x):
        return self.norm(x)


def _stacked(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join the matrices of a layer's experts as in transformers."""
    stacked = {name: array for name, array in arrays.items() if not re.search(r"\.experts\.\d", name)}
    for parent in {name.partition(".experts.")[0] + ".experts" for name in arrays if name not in stacked}:
        gate, up, down = (_stack(arrays, parent, part) for part in ("gate", "up", "down"))
        stacked[f"{parent}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        stacked[f"{parent}.down_proj"] = down
    return stacked


def _stack(arrays: dict[str, np.ndarray], parent: str, part: str) -> np.ndarray:
    matrices = []
    while (name := f"{parent}.{len(matrices)}.{part}_proj.weight") in arrays:
        matrices.append(arrays[name])
    return np.stack(matrices)


def logits_of_transcription(model, path: Path, tokens: np.ndarray) -> np.ndarray:
    """Return the same for a transcription of a module."""
    if model.config.model_type == "qwen2":
        module = MimoModule(model)
    else:
        module = QwenModule(model)
    names, tensors = set(dict(module.named_parameters())), {}
    for name, array in _stacked(load_file(path / "model.safetensors")).items():
        if name.startswith(module.prefix):
            name = name.removeprefix(module.prefix)
            tensors[name if name in names else f"mtp_block.{name.removeprefix(module.layer)}"] = torch.tensor(
                array
            )
    module.load_state_dict(tensors)
    states, ids = [], torch.tensor(tokens[None], dtype=torch.int64)
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    with torch.no_grad(), transformers_oracle.third_party():
        normed = model.model(ids).last_hidden_state
        hook.remove()
        embeds = model.get_input_embeddings()(ids[:, 1:])
        x = module.before(embeds, module.feature(states[0], normed)[:, :-1])
        n = x.shape[1]
        mask = torch.full((1, 1, n, n), -torch.inf).triu(1)
        rotation = model.model.rotary_emb(x, torch.arange(n)[None])
        x = module.mtp_block(x, attention_mask=mask, position_embeddings=rotation)
        return model.lm_head(module.after(x))[0].numpy()


def generated(path: Path, prompt: list[int], count: int) -> tuple[list[int], int]:
    """Return the greedy tokens of `generate(use_mtp=True)`, and its forward passes of the target."""
    model, passes = transformers_oracle.load_torch(path), []
    model.register_forward_hook(lambda *_: passes.append(1))
    with transformers_oracle.third_party():
        options = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None}
        tokens = model.generate(torch.tensor([prompt]), use_mtp=True, **options)
    return tokens[0, len(prompt) :].tolist(), len(passes)
