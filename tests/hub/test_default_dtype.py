"""The default dtype: loaded weights equal the dequantised weights of the file up to bfloat16 rounding.

Oracles: numpy for packed integers, the package gguf for its blocks, PyTorch for float8.
"""

import dataclasses
import json
import sys

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mars_jax as mj
from mars_jax import hub
from mars_jax.cli.generate.job import _dtype
from mars_jax.hub.save import save
from mars_jax.models import init_params
from mars_jax.models.quantize import Int4, Int8
from mars_jax.models.weights import get, leaves
from mars_jax.utils.errors import MarsError
from tests.helpers import gguf_blocks, gguf_files, scaled_files
from tests.helpers.packed_files import CONFIG, HOW, packed

EXPERTS = dataclasses.replace(CONFIG, family="mixtral", num_experts=2, experts_per_token=1)
PACKED = {
    "AWQ with modules_to_not_convert": {
        "method": "awq",
        "unpacked": ("down_proj", "layers.1.self_attn"),
        "settings": {"modules_to_not_convert": ["down_proj", "layers.1.self_attn"]},
    },
    "compressed-tensors with ignore": {
        "method": "compressed-tensors",
        "unpacked": ("layers.0.", "lm_head"),
        "settings": {"ignore": ["re:.*layers.0.*", "lm_head"]},
        "scales": ml_dtypes.bfloat16,
    },
    "compressed-tensors with scales below float16": {
        "method": "compressed-tensors",
        "scales": ml_dtypes.bfloat16,
        "tiny": "up_proj",
    },
    "compressed-tensors with scales of activations and keys": {
        "method": "compressed-tensors",
        "settings": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        "extra": ("self_attn.k_scale", "self_attn.v_scale", "mlp.up_proj.input_scale"),
    },
    "GPTQ with desc_act": {"method": "gptq", "permuted": "layers.1.", "settings": {"desc_act": True}},
    "GPTQ with a packed head": {"method": "gptq", "packs": ("proj", "lm_head"), "settings": {"lm_head": True}},
    "AWQ of experts": {"method": "awq", "packs": ("proj", "w1", "w2", "w3"), "config": EXPERTS},
}  # fmt: skip
KINDS = {
    "attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q6_K", "attn_output": "F16",
    "ffn_gate": "BF16", "ffn_up": "Q4_K", "ffn_down": "Q8_0", "token_embd": "Q5_K",
}  # fmt: skip


def write_packed(
    folder, method, *, config=CONFIG, unpacked=(), packs=("proj",), permuted="-", tiny="-", scales=np.float16,
    settings=None, extra=(),
):  # fmt: skip
    """Write a checkpoint with packed matrices. Return its weights and the names of those that stay in 4 bits."""
    save(folder, config, init_params(config, jax.random.key(0), scale=0.3))
    draw, stored, meant, exact = np.random.default_rng(0), {}, {}, set()
    for name, weight in load_file(folder / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if not base.endswith(packs) or any(part in name for part in unpacked):
            stored[name] = weight.astype(np.float16 if "down" in name else ml_dtypes.bfloat16)
            meant[name] = stored[name].astype(np.float32)
            continue
        outputs, inputs = weight.shape
        q, zero = draw.integers(0, 16, (inputs, outputs)), draw.integers(1, 16, (inputs // 32, outputs))
        scale = draw.uniform(0.01, 0.03, zero.shape) * (1e-5 if tiny in name else 1)
        scale, group = scale.astype(scales), np.arange(inputs) // 32
        if permuted in name:
            group = draw.permutation(group)
        meant[name] = ((q - zero[group]) * scale.astype(np.float32)[group]).T
        pieces = packed(q, zero, scale, method)
        if method == "gptq":
            pieces["g_idx"] = group.astype(np.int32)
        stored |= {f"{base}.{piece}": array for piece, array in pieces.items()}
        if ".layers." in name and ".experts." not in name and permuted not in name and tiny not in name:
            exact.add(name)
    stored |= {f"model.layers.0.{name}": np.ones((), np.float32) for name in extra}
    save_file(stored, folder / "model.safetensors")
    data = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "float16"}
    data["quantization_config"] = HOW[method] | (settings or {})
    (folder / "config.json").write_text(json.dumps(data))
    return meant, exact


def write_gguf(path):
    """Write a GGUF file with a matrix of every type in `KINDS`, and return its weights."""
    draw = np.random.default_rng(0)

    def data(name, shape):
        kind = gguf.GGMLQuantizationType[next(kind for part, kind in KINDS.items() if part in name)]
        if kind.name.endswith("_K"):
            return gguf_blocks.random_blocks(draw, shape, kind), kind
        return gguf.quantize(draw.standard_normal(shape).astype(np.float32) * 0.1, kind), kind

    gguf_blocks.file_of(path, data, hidden=256, inner=512, layers=2, vocab=gguf_files.VOCAB)
    config = hub.read_config(path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    meant = {}
    for row in leaves(config):
        tensor = tensors[str(names.get_name(row.name, try_suffixes=(".weight", ".bias")))]
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(row.shape)
        if row.path[-1] in ("q", "k"):  # llama.cpp interleaves the halves of each head
            weight = weight.reshape(config.num_heads, -1, 2, row.shape[1]).swapaxes(1, 2).reshape(row.shape)
        meant[row.name] = weight
    return meant


def write(name, folder):
    """Write the checkpoint of a case. Return its path, its weights and the names of those that stay in 4 bits."""
    if name == "GGUF":
        return folder / "model.gguf", write_gguf(folder / "model.gguf"), set()
    if name in scaled_files.HOW:
        weights = scaled_files.write(folder / "scaled", name)
        return folder / "scaled", {key: weight.float().numpy() for key, weight in weights.items()}, set()
    return folder / "packed", *write_packed(folder / "packed", **PACKED[name])


def check(params, config, meant, exact):
    """Assert that every array equals its expected weights, and that exactly the weights in `exact` are `Int4`."""
    for leaf, rows in leaves(config).items():
        weight = get(params, leaf.path)
        assert isinstance(weight, Int4) == (leaf.name in exact), leaf.name
        assert not isinstance(weight, Int8), leaf.name
        want = np.stack([meant[row.name] for row in rows]).reshape(leaf.shape)
        np.testing.assert_allclose(weight.astype("float32"), want, rtol=2.0**-8, err_msg=leaf.name)


@pytest.mark.parametrize("name", [*PACKED, *scaled_files.HOW, "GGUF"])
def test_by_default_every_weight_is_the_files_up_to_bfloat16(name, tmp_path):
    path, meant, exact = write(name, tmp_path)
    target = mj.load(path)
    check(target.params, target.config, meant, exact)


@pytest.mark.parametrize("name", ["AWQ with modules_to_not_convert", "GPTQ with desc_act"])
def test_a_draft_and_a_conversion_have_the_same_default(name, tmp_path):
    path, meant, exact = write(name, tmp_path)
    target = mj.load(path)
    assert _dtype(target.params) == "int4"
    draft = mj.drafters.load(f"model:{path}", target)
    check(draft.params, target.config, meant, exact)
    hub.convert(path, tmp_path / "converted")
    converted = mj.load(tmp_path / "converted")
    check(converted.params, target.config, meant, set())
    assert _dtype(converted.params) == "bfloat16"


def test_an_explicit_dtype_of_few_bits_rounds_every_matrix(tmp_path):
    path, _, _ = write("AWQ with modules_to_not_convert", tmp_path)
    for dtype, form in (("int4", Int4), ("int8", Int8)):
        params = mj.load(path, dtype=dtype).params
        assert type(params["embed"]) is Int8
        assert {type(params["layers"][1][name]) for name in ("q", "up", "down")} == {form}


def rotated(location):
    use = {"targets": ["Linear"], "location": location, "inverse": False, "ignore": []}
    return {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": [use]}}}}


@pytest.mark.parametrize("config", [HOW["awq"], scaled_files.HOW["channels"]], ids=["packed", "scaled"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (rotated("input"), "rotates activations while it runs"),
        ({"transform_config": ["R4"]}, "has a quantization_config with values of the wrong kind"),
        ({"rotation": "hadamard"}, "rotates activations while it runs"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "the format 'sparse-24-bitmask'"),
    ],
)
def test_settings_that_change_the_forward_are_refused(config, settings, message, tmp_path):
    save(tmp_path / "model", CONFIG, init_params(CONFIG, jax.random.key(0)))
    data = json.loads((tmp_path / "model" / "config.json").read_text())
    data["quantization_config"] = config | settings
    (tmp_path / "model" / "config.json").write_text(json.dumps(data))
    with pytest.raises(MarsError, match=message):
        mj.load(tmp_path / "model")


@pytest.mark.parametrize("location", ["weight_input", "weight_output"])
def test_rotations_that_the_weights_contain_are_read(location, tmp_path):
    settings = rotated(location) | {"sparsity_config": {"format": "dense"}}
    meant, exact = write_packed(tmp_path / "packed", "compressed-tensors", settings=settings)
    check(mj.load(tmp_path / "packed").params, CONFIG, meant, exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_widens_4_bit_matrices_if_half_of_the_free_memory_holds_the_model(tmp_path, monkeypatch, dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), init_params(CONFIG, jax.random.key(0)))
    save(tmp_path / "model", CONFIG, params)
    num_bytes = np.dtype(dtype).itemsize * sum(np.prod(leaf.shape) for leaf in leaves(CONFIG))
    loaded = []
    for free in (2 * num_bytes - 1, 2 * num_bytes):
        monkeypatch.setattr(sys.modules["mars_jax.hub.load"], "free_bytes", lambda free=free: free)
        loaded.append(mj.load(tmp_path / "model", dtype="int4").params["layers"][0]["up"])
    packed_matrix, matrix = loaded
    assert isinstance(packed_matrix, Int4) and matrix.dtype == dtype
    np.testing.assert_array_equal(matrix, packed_matrix.astype(dtype))
