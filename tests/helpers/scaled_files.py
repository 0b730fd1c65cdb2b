"""Checkpoints of scaled 8-bit weights."""

import json

import jax
import pytest
from safetensors.numpy import load_file

from mars_jax.hub.save import save
from mars_jax.models import ModelConfig, init_params

torch = pytest.importorskip("torch")
torch_file = pytest.importorskip("safetensors.torch")
CONFIG = ModelConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=64
)  # fmt: skip
BLOCK = [40, 24]
"""Block size as outputs by inputs. Neither divides any matrix here."""


GROUP = 32
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
HOW = {
    "blocks": FP8 | {"weight_block_size": BLOCK},
    "whole": FP8 | {"activation_scheme": "static"},
    "channels": COMPRESSED | {"format": "float-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
    "int8": COMPRESSED | {"format": "int-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
    "groups": COMPRESSED | {"format": "int-quantized", "config_groups": {
        "group_0": {"weights": {"num_bits": 8, "strategy": "channel", "group_size": -1}},
        "group_1": {"weights": {"num_bits": 8, "strategy": "group", "group_size": GROUP}},
    }},
}  # fmt: skip


def rounded(w, method):
    """Quantize a matrix in PyTorch; return the stored numbers, the scales and the dequantized matrix."""
    tall, wide = {"blocks": BLOCK, "groups": [1, GROUP], "whole": w.shape}.get(method, [1, w.shape[1]])
    limit = 127 if method in ("int8", "groups") else 448
    blocks = [[part.abs().max() / limit for part in rows.split(wide, 1)] for rows in w.split(tall, 0)]
    scale = torch.tensor(blocks)
    spread = scale.repeat_interleave(tall, 0)[: w.shape[0]].repeat_interleave(wide, 1)[:, : w.shape[1]]
    numbers = (w / spread).round().to(torch.int8) if limit == 127 else (w / spread).to(torch.float8_e4m3fn)
    return numbers, scale.reshape(()) if method == "whole" else scale, numbers.float() * spread


def write(folder, method):
    """Write a checkpoint in two files, with the matrices of its layers in 8 bits; return PyTorch's weights."""
    save(folder, CONFIG, init_params(CONFIG, jax.random.key(0), "float32"))
    stored, dequantized = {}, {}
    for name, array in load_file(folder / "model.safetensors").items():
        w = stored[name] = dequantized[name] = torch.from_numpy(array.copy())
        if name.endswith("proj.weight"):
            base = name.removesuffix(".weight")
            stored[name], scale, dequantized[name] = rounded(w, method)
            stored[f"{base}.weight_scale{'_inv' * (method == 'blocks')}"] = scale
            if method == "whole":
                stored[f"{base}.input_scale"] = torch.ones(())
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    parts = {name: shards["scale" in name] for name in stored}
    for shard in shards:
        torch_file.save_file({name: w for name, w in stored.items() if parts[name] == shard}, folder / shard)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": HOW[method]}))
    return dequantized
