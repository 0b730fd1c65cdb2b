"""DFlash and DSpark heads load from every published layout, and faulty heads get a one-sentence error."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mars_jax import contrib
from mars_jax.contrib.drafters.dflash_files import from_dflash_json
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.models import ModelConfig, Rope
from mars_jax.models.quantize import Int8
from mars_jax.utils.errors import MarsError

V, W, E, INNER, LAYERS = 61, 20, 32, 44, 3
TARGET = ModelConfig(vocab_size=V, hidden_size=E, intermediate_size=80, num_layers=12, num_heads=4)
RNG = np.random.default_rng(0)
TARGET_PARAMS = {name: jnp.asarray(RNG.standard_normal((V, E), np.float32)) for name in ("embed", "unembed")}
IDS = np.sort(RNG.permutation(V)[:W])
SIZES = {"vocab_size": V, "hidden_size": E, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
WINDOWS = {"layer_types": ["full_attention"] * LAYERS, "sliding_window": None, "use_sliding_window": False}
ROPE = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "max_position_embeddings": 4096}
QWEN3 = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "dtype": "float32"} | SIZES | HEADS | WINDOWS | ROPE
ZLAB = QWEN3 | {"architectures": ["DFlashDraftModel"], "block_size": 16, "num_target_layers": 12}
ZLAB |= {"dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 5, 9]}}
DEEPSEEK = QWEN3 | {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 60}
DEEPSEEK |= {"target_layer_ids": [1, 5, 9], "markov_rank": 0, "markov_head_type": "vanilla"}
DEEPSEEK |= {"enable_confidence_head": False}
SPECULATORS = {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": 8}
SPECULATORS |= {"transformer_layer_config": QWEN3, "draft_vocab_size": W, "mask_token_id": 60}
SPECULATORS |= {"aux_hidden_state_layer_ids": [2, 6, 10], "speculators_config": {"algorithm": "dflash"}}
DSPARK = SPECULATORS | {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"}
DSPARK |= {"markov_rank": 5, "markov_head_type": "vanilla"}
DSPARK |= {"enable_confidence_head": True, "confidence_head_with_markov": True}


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def backbone_shapes(hidden, inner, heads, kv_heads, head_dim, features, layers):
    """Return the shapes of the tensors of z-lab's heads, from its `dflash/model.py`."""
    q, kv = heads * head_dim, kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, features * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(layers):
        attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
        attention |= {"o_proj": (hidden, q), "q_norm": (head_dim,), "k_norm": (head_dim,)}
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"layers.{i}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"layers.{i}.mlp.{name}.weight": shape for name, shape in mlp.items()}
        shapes |= {f"layers.{i}.{name}.weight": (hidden,) for name in norms}
    return shapes


def backbone() -> dict[str, np.ndarray]:
    shapes = backbone_shapes(E, INNER, 4, 2, 12, 3, LAYERS)
    return {name: random(*shape) for name, shape in shapes.items()}


def small_vocabulary() -> dict[str, np.ndarray]:
    maps = {"d2t": IDS - np.arange(W), "t2d": np.isin(np.arange(V), IDS)}
    return maps | {"lm_head.weight": random(W, E)}


def spark(drafted: int) -> dict[str, np.ndarray]:
    return {
        "markov_head.markov_w1.weight": random(V, 5),
        "markov_head.markov_w2.weight": random(drafted, 5),
        "confidence_head.proj.weight": random(1, E + 5),
        "confidence_head.proj.bias": random(1),
    }


COPIES = {
    "embed_tokens.weight": np.asarray(TARGET_PARAMS["embed"]),
    "lm_head.weight": np.asarray(TARGET_PARAMS["unembed"]),
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SLIDING |= {"sliding_window": 7, "use_sliding_window": True}
LAYOUTS = {
    "z-lab": (ZLAB, backbone, {"drafts": 15, "from_anchor": False}),
    "deepseek dspark": (
        DEEPSEEK | {"markov_rank": 5, "enable_confidence_head": True},
        lambda: backbone() | COPIES | spark(V),
        {"from_anchor": True, "markov_rank": 5, "confidence_markov": True, "confidence_bias": True},
    ),
    "speculators": (
        SPECULATORS,
        lambda: backbone() | small_vocabulary(),
        {"drafts": 7, "draft_vocab_size": W, "own_unembed": True, "from_anchor": False},
    ),
    "speculators dspark": (
        DSPARK,
        lambda: backbone() | small_vocabulary() | spark(W),
        {"drafts": 8, "markov_rank": 5, "draft_vocab_size": W},
    ),
    "z-lab, windows": (ZLAB | SLIDING, backbone, {"causal": (True, False, True)}),
    "speculators, windows that see ahead": (
        SPECULATORS | {"sliding_window_non_causal": True, "transformer_layer_config": QWEN3 | SLIDING},
        lambda: backbone() | small_vocabulary(),
        {"causal": (False,) * 3},
    ),
}


def publish(directory, fields, tensors):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_loads_and_comes_back_from_both_that_are_written(tmp_path, name):
    fields, tensors, expected = LAYOUTS[name]
    published = tensors()
    config, params = contrib.load_dflash(publish(tmp_path / "head", fields, published), TARGET, TARGET_PARAMS)
    assert config.feature_layers == (1, 5, 9) and config.mask_token == 60
    assert config.layer.rope == Rope(theta=1e6) and config.layer.qk_norm
    assert {key: getattr(config, key) for key in expected} == expected
    if "windows" in name:
        assert set(config.layer.windows) - {None} == {7}
    for row in config.weights():
        param = params
        for key in row.path:
            param = param[key]
        np.testing.assert_array_equal(param, published[row.name])
    if config.draft_vocab_size < V:
        np.testing.assert_array_equal(params["ids"], IDS)
    # Copies of the target's tables are dropped.
    assert "embed" not in params and ("unembed" in params) == (config.draft_vocab_size < V)
    for layout in ("dflash", "speculators"):
        path = contrib.save_dflash(tmp_path / layout, config, params, layout=layout, verifier="some/target")
        reloaded, reloaded_params = contrib.load_dflash(path, TARGET, TARGET_PARAMS)
        # Only fields of `layer` that a head does not use may differ.
        assert reloaded == dataclasses.replace(config, layer=reloaded.layer)
        assert reloaded.layer.windows == config.layer.windows
        assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), params, reloaded_params))
    saved = load_file(tmp_path / "speculators" / "model.safetensors")
    assert set(saved) == {name for name in published if name not in COPIES or config.draft_vocab_size < V}
    ids = json.loads((tmp_path / "speculators" / "config.json").read_text())["aux_hidden_state_layer_ids"]
    assert ids == [2, 6, 10]


@pytest.mark.parametrize(("top", "nested", "expected"), [(16, 8, 16), (None, 8, 8)], ids=["both", "nested"])
def test_the_block_size_at_the_top_counts_as_in_the_published_class(tmp_path, top, nested, expected):
    fields = ZLAB | {"block_size": top, "dflash_config": ZLAB["dflash_config"] | {"block_size": nested}}
    path = publish(tmp_path / "head", fields, backbone())
    assert contrib.load_dflash(path, TARGET, TARGET_PARAMS)[0].block_size == expected


def test_int8_keeps_matrices_in_8_bits(tmp_path):
    path = publish(tmp_path / "head", DSPARK, backbone() | small_vocabulary() | spark(W))
    config, params = contrib.load_dflash(path, TARGET, TARGET_PARAMS, dtype="int8")
    assert isinstance(params["layers"][1]["gate"], Int8) and isinstance(params["markov_in"], Int8)
    assert params["norm"].dtype == jnp.float32 and config.markov_rank == 5


def changed(fields, **changes):
    return {k: v for k, v in (fields | changes).items() if v is not ...}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (changed(ZLAB, vocab_size=62), "vocabulary of 62 tokens and the target has 61"),
        (changed(ZLAB, block_size=...), "no number for block_size"),
        (changed(ZLAB, block_size=10**9), "blocks of 1000000000: expected 2 to 129 tokens"),
        (changed(ZLAB, target_hidden_size=48), "target of width 48, not 32"),
        (
            changed(ZLAB, dflash_config={"mask_token_id": 60, "target_layer_ids": [1, 5, 12]}),
            "reads layer 12, and the target has 0 to 11",
        ),
        (changed(ZLAB, architectures=["DFlash2DraftModel"]), "DFlash-2"),
        (changed(DEEPSEEK, markov_head_type="gated"), "markov_head_type is 'gated'"),
        (changed(ZLAB, output_multiplier=2.0), "output_multiplier is 2.0"),
        (changed(SPECULATORS, speculators_model_type="peagle"), "'peagle'"),
        (changed(SPECULATORS, projector_type="domino"), "'domino'"),
        (changed(SPECULATORS, aux_hidden_state_layer_ids=...), "does not say aux_hidden_state_layer_ids"),
        (changed(SPECULATORS, aux_hidden_state_layer_ids=[0, 3, 6]), "hidden state 0"),
        (SPECULATORS, "drafts from 20 of 61 tokens and has no d2t"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path, fields, expected):
    with pytest.raises(MarsError, match=expected):
        contrib.load_dflash(publish(tmp_path / "head", fields, backbone()), TARGET, TARGET_PARAMS)


PUBLISHED = {
    "llama-3.1-8b": (14336, 10, False),  # z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat
    "qwen3-8b": (12288, 16, False),  # z-lab/Qwen3-8B-DFlash-b16
    "qwen3-8b, dspark": (12288, 7, True),  # deepseek-ai/dspark_qwen3_8b_block7
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_full_size_shapes_are_those_of_the_published_heads(name):
    """Compare the name and shape of every tensor with those of the layout's code, without weights."""
    inner, size, markov = PUBLISHED[name]
    target = CONFIGS[name.partition(",")[0]]
    v, h = target.vocab_size, 4096
    shapes = backbone_shapes(h, inner, 32, 8, 128, features=5, layers=5)
    if markov:
        shapes |= {f"markov_head.markov_w{i}.weight": (v, 256) for i in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, h + 256), "confidence_head.proj.bias": (1,)}
    sizes = {"vocab_size": v, "hidden_size": h, "intermediate_size": inner, "num_hidden_layers": 5}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "block_size": size}
    sizes |= {"mask_token_id": v - 1, "layer_types": ["full_attention"] * 5}
    # Without ids of target layers, a head reads five evenly spaced layers.
    sizes |= {"target_layer_ids": ..., "dflash_config": ..., "num_target_layers": ...}
    spark_fields = {"markov_rank": 256, "enable_confidence_head": True}
    fields = changed(DEEPSEEK | spark_fields if markov else ZLAB, **sizes)
    config = from_dflash_json(fields, shapes, target)
    assert {row.name: row.shape for row in config.weights()} == shapes
    assert config.drafts == (7 if markov else size - 1)
    count = target.num_layers
    assert config.feature_layers == tuple(round(1 + i * (count - 4) / 4) for i in range(5))


def test_a_mixed_causality_that_no_layout_can_say_is_refused(tmp_path):
    published = publish(tmp_path / "head", ZLAB, backbone())
    config, params = contrib.load_dflash(published, TARGET, TARGET_PARAMS)
    config = dataclasses.replace(config, causal=(True, False, False))
    with pytest.raises(MarsError, match="which layers of the head are causal"):
        contrib.save_dflash(tmp_path / "x", config, params)
