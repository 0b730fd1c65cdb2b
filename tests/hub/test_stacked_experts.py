"""gpt-oss's experts in MXFP4. Oracle: transformers' `integrations/mxfp4.py` and its model with these experts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mars_jax import hub
from mars_jax.cli.generate.job import _dtype
from mars_jax.lab.commands import plan
from mars_jax.models.quantize import Int4, Int8, Mxfp4, num_bytes
from mars_jax.utils.errors import MarsError
from tests.helpers import slow_but, transformers_oracle

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAYERS, EXPERTS, HIDDEN, INNER, VOCAB = 2, 4, 64, 96, 61
FIELDS = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (2, 12))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return a model of transformers, and the folder of a checkpoint that stores its experts in MXFP4."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, draw = tmp_path_factory.mktemp("gpt-oss"), np.random.default_rng(0)
    with transformers_oracle.third_party():
        model = transformers_oracle.random_torch_model(transformers.GptOssConfig(**FIELDS))
    packed = {}
    for i, layer in enumerate(model.model.layers):
        for name, rows, inner in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            blocks = draw.integers(0, 256, (EXPERTS, rows, inner // 32, 16), np.uint8)
            scales = draw.integers(118, 126, blocks.shape[:-1], np.uint8)
            tensors = torch.tensor(blocks), torch.tensor(scales)
            getattr(layer.mlp.experts, name).data = convert_moe_packed_tensors(*tensors, dtype=torch.float32)
            base = f"model.layers.{i}.mlp.experts.{name}"
            packed |= {f"{base}_blocks": blocks, f"{base}_scales": scales}
    transformers_oracle.save_torch(model, folder)
    stored = load_file(folder / "model.safetensors")
    replaced = {name.removesuffix("_blocks") for name in packed}
    save_file({k: v for k, v in stored.items() if k not in replaced} | packed, folder / "model.safetensors")
    edit(folder, quantization_config={"quant_method": "mxfp4"})
    return model, folder


def edit(folder, **fields):
    data = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(data))


def expected(model, i):
    """Return the matrices [X, out, in] of layer i's experts."""
    experts = model.model.layers[i].mlp.experts
    gate_up, down = (x.detach().numpy().swapaxes(1, 2) for x in (experts.gate_up_proj, experts.down_proj))
    return {"expert_gate": gate_up[:, ::2], "expert_up": gate_up[:, 1::2], "expert_down": down}


HELD = EXPERTS * INNER * HIDDEN
BYTES = {Mxfp4: HELD * 17 // 32, Int8: HELD + 4 * EXPERTS * INNER}
"""4 bits for each number and 8 for each block of 32; 8 bits and a float32 scale for each output."""


@pytest.mark.parametrize(
    ("dtype", "form", "named"),
    [
        (None, Mxfp4, "mxfp4"),
        ("int4", Mxfp4, "int4"),
        ("int8", Int8, "int8"),
        ("bfloat16", jax.Array, "bfloat16"),
        ("float32", jax.Array, "float32"),
    ],
)
def test_experts_are_kept_in_4_bits_or_dequantised_exactly(published, dtype, form, named):
    model, folder = published
    params = hub.load(folder, dtype=dtype).params
    assert _dtype(params) == named and isinstance(params["layers"][0]["q"], Int4) == (dtype == "int4")
    for i in range(LAYERS):
        for name, matrices in expected(model, i).items():
            weight = params["layers"][i][name]
            assert isinstance(weight, form), name
            if form is not Int8:
                # Every number is exact in bfloat16.
                np.testing.assert_array_equal(weight.astype("float32"), matrices)
    if form in BYTES:
        assert sum(map(num_bytes, jax.tree.leaves(params["layers"][0]["expert_up"]))) == BYTES[form]


MESHES = {
    "one device": (None, None),
    "whole experts": ("expert=2,model=2", None),
    "hidden units in whole blocks": ("model=3", None),
    "hidden units whose three blocks stay together": ("expert=4,model=2", None),
    "hidden units of dequantised experts": ("expert=4,model=2", "float32"),
}


@pytest.mark.parametrize("name", slow_but(MESHES, "one device"))
def test_logits_and_greedy_tokens_equal_those_of_transformers(published, name):
    (model, folder), (mesh, dtype) = published, MESHES[name]
    checkpoint = hub.load(folder, mesh=mesh, dtype=dtype)
    with jax.set_mesh(checkpoint.mesh or jax.sharding.Mesh(jax.devices()[:1], ("data",))):
        logits, greedy = transformers_oracle.logits_and_greedy(checkpoint, PROMPTS, 16)
    expected, continuation = transformers_oracle.read_again(model, PROMPTS, greedy)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    np.testing.assert_array_equal(greedy, continuation)


@pytest.mark.parametrize(("dtype", "form"), [(None, Mxfp4), ("int4", Mxfp4), ("bfloat16", jax.Array)])
def test_a_conversion_keeps_them_as_well(published, dtype, form, tmp_path):
    model, folder = published
    hub.convert(folder, tmp_path / "converted", dtype=dtype)
    weight = hub.load(tmp_path / "converted").params["layers"][1]["expert_down"]
    assert isinstance(weight, form)
    assert plan._read_target(str(tmp_path / "converted"))[2] == (form is Mxfp4)
    np.testing.assert_array_equal(weight.astype("float32"), expected(model, 1)["expert_down"])


def test_without_a_dtype_in_config_json_other_weights_are_bfloat16(published, tmp_path):
    _, folder = published
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    edit(tmp_path, dtype=None)
    params = hub.load(tmp_path).params
    assert params["embed"].dtype == params["layers"][0]["expert_up"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("piece", "change", "message"),
    [
        ("_scales", None, "expert.*are missing|tensors are missing"),
        ("_blocks", lambda x: x[..., :8], "16 for each scale"),
        ("_blocks", lambda x: x.astype(np.int32), "MXFP4 has bytes"),
        ("_scales", lambda x: x[..., None], "not part of the architecture"),
    ],
)
def test_damaged_pieces_are_named(published, piece, change, message, tmp_path):
    _, folder = published
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.experts.down_proj{piece}"
    stored = tensors.pop(name)
    if change is not None:
        tensors[name] = np.ascontiguousarray(change(stored))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MarsError, match=message):
        hub.load(tmp_path)
