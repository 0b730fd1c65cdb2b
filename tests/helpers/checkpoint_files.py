"""Small checkpoints of several families, and functions that edit their files."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from mars_jax.models import ModelConfig
from mars_jax.utils.errors import MarsError


def edit_config(directory: Path, **fields) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(directory: Path, change) -> None:
    """Apply `change(tensors)` to model.safetensors in place."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def message(call, *args, **kwargs) -> str:
    with pytest.raises(MarsError) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text
    return text


def shard(directory: Path, kind: str) -> list[str]:
    """Split model.safetensors in two with an index; return the names of the shards."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    files = [f"{stem}-0000{i + 1}-of-00002.{suffix}" for i in range(2)]
    for file, part in zip(files, parts, strict=True):
        write(directory / file, {name: tensors[name] for name in part}, kind)
    index = {"weight_map": {name: file for file, part in zip(files, parts, strict=True) for name in part}}
    (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()
    return files


def write(path: Path, tensors, kind: str, dtype: str = "float32") -> None:
    if kind == "safetensors":
        save_file(tensors, path)
    else:
        torch = pytest.importorskip("torch")
        torch.save(
            {k: torch.from_numpy(v.copy()).to(getattr(torch, dtype)) for k, v in tensors.items()}, path
        )


MIXTRAL = ModelConfig(
    family="mixtral", vocab_size=24, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
    num_experts=4, experts_per_token=2, norm_eps=1e-5,
)  # fmt: skip
# Published config.json files with fewer layers. Readers must fill in the defaults of missing keys.
GEMMA_3 = {  # google/gemma-3-4b-it
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16", "vision_config": {"model_type": "siglip_vision_model"},
}  # fmt: skip
GEMMA_2 = {  # google/gemma-2-2b
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "bos_token_id": 2, "eos_token_id": 1,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_size": 2304,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 9216,
    "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 3, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
QWEN_3_MOE = {  # Qwen/Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "eos_token_id": 151645, "head_dim": 128,
    "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_window_layers": 2, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 2,
    "num_key_value_heads": 4, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
