"""EAGLE heads: every published layout loads, and a malformed head gets a one-sentence error."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mars_jax import hub
from mars_jax.models import ModelConfig, Rope
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.quantize import quantize
from mars_jax.models.weights import build_rows
from mars_jax.utils.errors import MarsWarning
from tests.helpers.checkpoint_files import message

V, W, E, INNER = 61, 20, 32, 44
TARGET = ModelConfig(vocab_size=V, hidden_size=E, intermediate_size=80, num_layers=9, num_heads=4)
RNG = np.random.default_rng(0)
# The only target weights that the loader reads.
TARGET_PARAMS = {name: jnp.asarray(RNG.standard_normal((V, E), np.float32)) for name in ("embed", "unembed")}
# The target's embedding, off by more than the rounding of any dtype.
NEAR = np.asarray(TARGET_PARAMS["embed"]) * 1.01
IDS = np.sort(RNG.permutation(V)[:W])

FIELDS_1 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V, "hidden_size": E,
    "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip
FIELDS_3 = FIELDS_1 | {"rope_theta": 500000.0, "draft_vocab_size": W}
LAYERS = "eagle_aux_hidden_state_layer_ids"
LAYER = ModelConfig(vocab_size=V, hidden_size=E, intermediate_size=INNER, num_layers=1, num_heads=4)
PUBLISHED = dataclasses.replace(LAYER, num_kv_heads=2, norm_eps=1e-5, rope=Rope(theta=500000.0))


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def layer(name: str, inner: int) -> dict[str, np.ndarray]:
    tensors = {
        "self_attn.q_proj": random(E, inner),
        "self_attn.k_proj": random(E // 2, inner),
        "self_attn.v_proj": random(E // 2, inner),
        "self_attn.o_proj": random(E, E),
        "mlp.gate_proj": random(INNER, E),
        "mlp.up_proj": random(INNER, E),
        "mlp.down_proj": random(E, INNER),
        "post_attention_layernorm": random(E),
    }
    return {f"{name}.{key}.weight": value for key, value in tensors.items()}


def eagle_1() -> dict[str, np.ndarray]:
    """Return random tensors in the layout of yuhuili's EAGLE heads."""
    tables = {"embed_tokens.weight": np.asarray(TARGET_PARAMS["embed"]), "fc.weight": random(E, 2 * E)}
    return tables | layer("layers.0", E) | {"fc.bias": random(E)}


def eagle_3() -> dict[str, np.ndarray]:
    """Return random tensors in the layout of yuhuili's EAGLE-3 heads."""
    tensors = layer("midlayer", 2 * E) | {"fc.weight": random(E, 3 * E), "lm_head.weight": random(W, E)}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        tensors[f"{name}.weight"] = random(E)
    return tensors | {"d2t": IDS - np.arange(W), "t2d": np.isin(np.arange(V), IDS)}


def publish(directory: Path, tensors, fields, kind: str = "safetensors", dtype: str = "float32") -> Path:
    (directory / "config.json").write_text(json.dumps(fields))
    if kind == "safetensors":
        save_file(tensors, directory / "model.safetensors")
    else:
        torch = pytest.importorskip("torch")
        state = {name: torch.from_numpy(value.copy()) for name, value in tensors.items()}
        state = {k: v.to(getattr(torch, dtype)) if v.is_floating_point() else v for k, v in state.items()}
        torch.save(state, directory / "pytorch_model.bin")
    return directory


def load(directory, **kwargs):
    return hub.load_eagle(directory, TARGET, TARGET_PARAMS, **kwargs)


def assert_layer(loaded, tensors, name) -> None:
    """Assert that every tensor of the layer is where `models.eagle` looks for it."""
    short = {"input_layernorm": "embed_norm", "post_attention_layernorm": "mlp_norm"}
    for key, value in tensors.items():
        if key.startswith(f"{name}."):
            part = key.removesuffix(".weight").rsplit(".", 1)[-1].removesuffix("_proj")
            np.testing.assert_array_equal(loaded[short.get(part, part)], value)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("name", ["midlayer", "layers.0"])
def test_an_eagle_3_head_of_every_layout_loads(tmp_path, kind, prefix, name):
    tensors = eagle_3()
    renamed = {prefix + key.replace("midlayer", name): value for key, value in tensors.items()}
    config, params = load(publish(tmp_path, renamed, FIELDS_3, kind))
    assert config == EagleConfig(
        version=3, layer=PUBLISHED, target_hidden_size=E, draft_vocab_size=W, feature_layers=(1, 3, 5)
    )
    assert_layer(params["layer"], tensors, "midlayer")
    for key, published in (("fc", "fc"), ("norm", "norm"), ("unembed", "lm_head")):
        np.testing.assert_array_equal(params[key], tensors[f"{published}.weight"])
    np.testing.assert_array_equal(params["ids"], IDS)
    assert params["ids"].dtype == jnp.int32 and set(params) == {"layer", "fc", "norm", "unembed", "ids"}


def test_an_eagle_1_head_shares_its_targets_tables(tmp_path):
    tensors = eagle_1()
    config, params = load(publish(tmp_path, tensors, FIELDS_1 | {"bias": True}))
    assert (config.version, config.draft_vocab_size, config.feature_layers) == (1, V, ())
    assert config.fc_bias and not config.own_embed and not config.own_unembed
    assert_layer(params["layer"], tensors, "layers.0")
    np.testing.assert_array_equal(params["fc"], tensors["fc.weight"])
    np.testing.assert_array_equal(params["fc_bias"], tensors["fc.bias"])
    assert set(params) == {"layer", "fc", "fc_bias"}


@pytest.mark.parametrize(
    "fields, tensors, expected",
    [
        ({"norm_before_residual": True}, {}, {"norm_before_residual": True}),
        ({}, {f"fc_norm.{i}.weight": random(E) for i in range(3)}, {"fc_norm": True}),
        ({"norm_output": True}, {}, {"norm_output": True}),
        ({"eagle_config": {"norm_output": True}}, {}, {"norm_output": True}),
        ({LAYERS: [0, 4, 8]}, {}, {"feature_layers": (0, 4, 8)}),
        ({"eagle_config": {LAYERS: [2, 4, 6]}}, {}, {"feature_layers": (2, 4, 6)}),
        ({"eagle_config": {LAYERS: []}}, {}, {"feature_layers": (1, 3, 5)}),
        ({LAYERS: [2, 6]}, {"fc.weight": random(E, 2 * E)}, {"feature_layers": (2, 6)}),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, {}, {}),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "other"}, {}, {}),
        ({"architectures": ["Eagle3DraftModel"], "draft_vocab_size": None}, {}, {"draft_vocab_size": W}),
        ({"attention_bias": True, "mlp_bias": True}, {}, {}),
        ({}, {"midlayer.self_attn.rotary_emb.inv_freq": random(4)}, {}),
        (
            {},
            {f"midlayer.self_attn.{key}_proj.bias": random(n) for key, n in (("q", E), ("k", 16), ("v", 16))},
            {"layer": dataclasses.replace(PUBLISHED, qkv_bias=True)},
        ),
        (
            {},
            {f"midlayer.self_attn.{key}_norm.weight": random(8) for key in ("q", "k")},
            {"layer": dataclasses.replace(PUBLISHED, qk_norm=True)},
        ),
    ],
)
def test_variants_of_eagle_3(tmp_path, fields, tensors, expected):
    (tmp_path / "plain").mkdir()
    base, _ = load(publish(tmp_path / "plain", eagle_3(), FIELDS_3))
    config, params = load(publish(tmp_path, eagle_3() | tensors, FIELDS_3 | fields))
    assert config == dataclasses.replace(base, **expected)
    rows = {row.name: row for row in config.weights()}
    for name in tensors.keys() & rows.keys():
        place = params
        for key in rows[name].path:
            place = place[key]
        np.testing.assert_array_equal(place, tensors[name])


def test_a_head_narrower_than_its_target_loads(tmp_path):
    wide = dataclasses.replace(TARGET, hidden_size=48)
    params = {name: jnp.zeros((V, 48)) for name in ("embed", "unembed")}
    tensors = eagle_3() | {"fc.weight": random(E, 3 * 48), "embed_tokens.weight": random(V, E)}
    config, head = hub.load_eagle(
        publish(tmp_path, tensors, FIELDS_3 | {"target_hidden_size": 48}), wide, params
    )
    assert config.target_hidden_size == 48 and config.layer.hidden_size == E and head["fc"].shape == (E, 144)


OTHER = random(V, E)


def test_an_embedding_that_is_not_the_targets_warns_and_head_embed_replaces_it(tmp_path):
    publish(tmp_path, eagle_3() | {"embed_tokens.weight": OTHER}, FIELDS_3)
    with pytest.warns(MarsWarning, match="is not the target's.*head_embed='target'"):
        config, params = load(tmp_path)
    assert config.own_embed
    np.testing.assert_array_equal(params["embed"], OTHER)
    replaced, without = load(tmp_path, head_embed="target")
    assert replaced == dataclasses.replace(config, own_embed=False) and "embed" not in without


@pytest.mark.parametrize("head_embed", ["own", "target"])
@pytest.mark.parametrize("embedding", [np.asarray(TARGET_PARAMS["embed"]), NEAR], ids=["equal", "near"])
def test_the_targets_embedding_does_not_warn(tmp_path, embedding, head_embed):
    publish(tmp_path, eagle_3() | {"embed_tokens.weight": embedding}, FIELDS_3)
    config, _ = load(tmp_path, head_embed=head_embed)
    assert config.own_embed == (embedding is NEAR and head_embed == "own")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_rounding_is_no_difference_between_embeddings(tmp_path, dtype):
    def rounded(table):
        table = np.asarray(table)
        return jax.device_put(quantize(table) if dtype == "int8" else table.astype(dtype).astype(np.float32))

    path = publish(tmp_path, eagle_3() | {"embed_tokens.weight": NEAR}, FIELDS_3)
    hub.load_eagle(path, TARGET, TARGET_PARAMS | {"embed": rounded(TARGET_PARAMS["embed"])})
    with pytest.warns(MarsWarning, match="is not the target's"):
        hub.load_eagle(path, TARGET, TARGET_PARAMS | {"embed": rounded(OTHER)})


def without(tensors, *names):
    return {name: value for name, value in tensors.items() if name not in names}


@pytest.mark.parametrize("own_unembed", [False, True])
def test_a_whole_draft_vocabulary_needs_no_map(tmp_path, own_unembed):
    tensors = without(eagle_3(), "lm_head.weight", "d2t", "t2d")
    if own_unembed:
        tensors |= {"lm_head.weight": random(V, E), "d2t": np.zeros(V, np.int64), "t2d": np.zeros(V, bool)}
    config, params = load(publish(tmp_path, tensors, FIELDS_3 | {"draft_vocab_size": V}))
    assert config.draft_vocab_size == V and config.own_unembed == own_unembed == ("unembed" in params)
    assert "ids" not in params


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("change", [0, 1], ids=["the target's", "its own"])
def test_an_eagle_1_head_keeps_only_an_lm_head_of_its_own(tmp_path, tied, change):
    target = {"embed": TARGET_PARAMS["embed"]} if tied else TARGET_PARAMS
    table = np.asarray(TARGET_PARAMS["embed" if tied else "unembed"]) + change
    publish(tmp_path, eagle_1() | {"lm_head.weight": table}, FIELDS_1)
    config, params = hub.load_eagle(tmp_path, TARGET, target)
    assert config.own_unembed == ("unembed" in params) == bool(change)
    np.testing.assert_array_equal(params.get("unembed", table), table)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_float16_becomes_bfloat16_and_a_rounded_copy_is_a_copy(tmp_path, kind):
    tensors = {k: v.astype(np.float16) if v.dtype == np.float32 else v for k, v in eagle_1().items()}
    publish(tmp_path, tensors, FIELDS_1 | {"torch_dtype": "float16"}, kind, "float16")
    config, params = load(tmp_path)
    assert params["fc"].dtype == jnp.bfloat16 and not config.own_embed
    _, exact = load(tmp_path, dtype="float32")
    np.testing.assert_array_equal(exact["fc"], tensors["fc.weight"].astype(np.float32))
    large = {"embed": 1e6 * TARGET_PARAMS["embed"], "unembed": TARGET_PARAMS["unembed"]}
    assert hub.load_eagle(tmp_path, TARGET, large)[0].own_embed


# Bad input.


def shifted(where: int, by: int) -> np.ndarray:
    offsets = IDS - np.arange(W)
    offsets[where] += by
    return offsets


MALFORMED = {
    "vocabulary": ({"vocab_size": 60}, {}, "a vocabulary of 60 tokens and the target has 61"),
    "target": ({"target_hidden_size": 64}, {}, "for a target of width 64, not 32"),
    "fc": ({}, {"fc.weight": random(E, 64)}, r"fc.weight is \[32, 64\] and not \[32, 96\]"),
    "width": ({"hidden_size": 16}, {}, "the EAGLE head is 16 wide and the target 32"),
    "no d2t": ({}, {"d2t": None}, "drafts from 20 of 61 tokens and has no d2t"),
    "d2t length": ({}, {"d2t": shifted(0, 0)[1:]}, r"d2t is int64\[19\]: expected 20 integers"),
    "d2t above": ({}, {"d2t": shifted(19, 50)}, r"maps draft token 19 to \d+ and the target has 61 tokens"),
    "d2t twice": ({}, {"d2t": shifted(1, IDS[0] - IDS[1])}, "d2t maps 20 draft tokens to 19 of the target's"),
    "missing": ({}, {"norm.weight": None, "fc.weight": None}, r"missing \(fc.weight, norm.weight\): use the config"),
    "twice": ({}, {"model.norm.weight": random(E)}, "two tensors norm.weight"),
    "window": (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 9},
        {},
        "sliding window of 9, which is not supported",
    ),
    "no such layer": ({LAYERS: [1, 4, 9]}, {}, "reads layer 9, and the target has 0 to 8"),
    "family": ({"architectures": ["BloomForCausalLMEagle3"]}, {}, "architecture BloomForCausalLM is not supported"),
    "one layer": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "reads only its target's last hidden state"),
    "a permutation": (
        {"draft_vocab_size": V},
        {"lm_head.weight": random(V, E), "d2t": np.eye(V, dtype=np.int64)[0] - np.eye(V, dtype=np.int64)[1]},
        "d2t reorders all 61 tokens",
    ),
    "tied to itself": (
        {"draft_vocab_size": V, "tie_word_embeddings": True},
        {"lm_head.weight": None, "d2t": None, "embed_tokens.weight": random(V, E)},
        "lm_head tied to the head's own embedding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_head_is_refused_by_what_is_wrong_with_it(tmp_path, name):
    fields, change, expected = MALFORMED[name]
    tensors = {key: value for key, value in (eagle_3() | change).items() if value is not None}
    text = message(load, publish(tmp_path, tensors, FIELDS_3 | fields))
    assert re.search(expected, text) and str(tmp_path) in text and text.endswith(".")


def test_a_target_too_shallow_for_the_usual_layers_is_refused(tmp_path):
    publish(tmp_path, eagle_3(), FIELDS_3)
    shallow = dataclasses.replace(TARGET, num_layers=4, windows=())
    text = message(hub.load_eagle, tmp_path, shallow, TARGET_PARAMS)
    assert "a target of at least 5 layers, not of 4" in text


# The layout of the speculators library, used by RedHatAI's heads.

SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": W,
    "dtype": "float32",
    "norm_before_residual": True,
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/b"}},
    "target_hidden_size": None,
    "transformer_layer_config": {k: v for k, v in FIELDS_1.items() if k != "architectures"}
    | {"rope_theta": 5e5},
}


def speculators():
    tensors = {key.replace("midlayer", "layers.0"): value for key, value in eagle_3().items()}
    return tensors | {"embed_tokens.weight": np.asarray(TARGET_PARAMS["embed"])}


@pytest.mark.parametrize("states", [None, [2, 4, 6], [1, 5, 9]])
def test_a_head_of_speculators_loads(tmp_path, states):
    """Its layer ids count hidden states, so each is one above EAGLE's layer number. The default layers are the same."""
    norm = {"input_norm.weight": random(3 * E)} if states else {}
    tensors, fields = speculators() | norm, {"norm_before_fc": True, "norm_output": True} if states else {}
    config, params = load(publish(tmp_path, tensors, SPECULATORS | fields | {LAYERS: states}))
    layers = (1, 3, 5) if states is None else tuple(i - 1 for i in states)
    assert config.feature_layers == layers and config.norm_before_residual and not config.own_embed
    assert config.input_norm == config.norm_output == bool(states)
    assert config.layer == load(publish(tmp_path, eagle_3(), FIELDS_3 | {"rope_theta": 5e5}))[0].layer
    assert_layer(params["layer"], tensors, "layers.0")
    for name in norm:
        np.testing.assert_array_equal(params["input_norm"], tensors[name])


def test_what_is_wrong_with_a_head_of_speculators_is_said(tmp_path):
    def text(**change):
        fields = {key: value for key, value in (SPECULATORS | change).items() if value != "absent"}
        return message(load, publish(tmp_path, speculators(), fields))

    assert "speculators_model_type is 'dflash'" in text(speculators_model_type="dflash")
    assert "has no transformer_layer_config" in text(transformer_layer_config="absent")
    assert "has no norm_before_residual" in text(norm_before_residual="absent")
    assert "reads hidden state 0, the target's embedding" in text(**{LAYERS: [0, 4, 6]})
    assert "reads layer 9, and the target has 0 to 8" in text(**{LAYERS: [2, 4, 10]})
    assert "1 tensors are missing (input_norm.weight)" in text(norm_before_fc=True)


# Saving.


def head_config(layer, version=3, draft_vocab_size=W, **fields):
    return EagleConfig(
        version=version,
        layer=dataclasses.replace(LAYER, **layer),
        target_hidden_size=E,
        draft_vocab_size=draft_vocab_size,
        feature_layers=(0, 4, 7) if version == 3 else (),
        **fields,
    )


QWEN3 = {"family": "qwen3", "head_dim": 12, "qk_norm": True, "qkv_bias": True, "mlp_bias": True}
SAVED = {
    "eagle-3, two layers": head_config({"num_layers": 2, "windows": ()}),
    "eagle-3": head_config(
        {"num_kv_heads": 2, "rope": Rope(theta=500.0), "eos_token_ids": (2, 3)}, norm_before_residual=True
    ),
    "eagle-3.1": head_config(QWEN3, draft_vocab_size=V, fc_norm=True, norm_output=True, own_unembed=False),
    "eagle-1": head_config(
        {"family": "qwen2", "qkv_bias": True}, 1, V, fc_bias=True, own_embed=True, own_unembed=False
    ),
}


def params_of(config, dtype="float32"):
    params = build_rows(config.weights(), lambda row: jnp.asarray(random(*row.shape)).astype(dtype))
    if config.draft_vocab_size < V:
        params["ids"] = jnp.asarray(RNG.permutation(V)[: config.draft_vocab_size], jnp.int32)
    return params


@pytest.mark.filterwarnings("ignore:the embedding of the EAGLE head")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SAVED)
def test_a_saved_head_loads_as_it_was(tmp_path, name, dtype):
    config, params = SAVED[name], params_of(SAVED[name], dtype)
    loaded_config, loaded_params = load(hub.save_eagle(tmp_path / "made" / "head", config, params))
    assert loaded_config == config
    jax.tree.map(np.testing.assert_array_equal, loaded_params, params)
    assert jax.tree.map(lambda x: x.dtype, loaded_params) == jax.tree.map(lambda x: x.dtype, params)


def test_a_saved_head_has_the_published_layout(tmp_path):
    config, params = SAVED["eagle-3"], params_of(SAVED["eagle-3"])
    hub.save_eagle(tmp_path, config, params)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: (value.shape, value.dtype) for name, value in tensors.items()} == {
        name: (value.shape, value.dtype) for name, value in eagle_3().items()
    }
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(W), params["ids"])
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), np.sort(params["ids"]))
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLMEagle3"] and fields["model_type"] == "llama"
    assert fields["draft_vocab_size"] == W and fields["eagle_config"][LAYERS] == [0, 4, 7]
    hub.save_eagle(tmp_path / "one", SAVED["eagle-1"], params_of(SAVED["eagle-1"]))
    assert set(load_file(tmp_path / "one" / "model.safetensors")) >= set(eagle_1())


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path):
    config, params = SAVED["eagle-3"], params_of(SAVED["eagle-3"])
    path = tmp_path / "head"

    def text(config=config, **change):
        return message(hub.save_eagle, path, config, params | change)

    assert "params norm has shape [3], but the config needs [32]" in text(norm=jnp.ones(3))
    assert "draft token 0 to 61 and the target has 61 tokens" in text(ids=params["ids"].at[0].set(V))
    windowed = dataclasses.replace(config, layer=dataclasses.replace(config.layer, windows=(4,)))
    assert "cannot express the head's layer" in text(windowed)
    del params["ids"]
    assert "params lack ids" in text()
    assert not list(tmp_path.iterdir())
    (path / "notes").mkdir(parents=True)
    assert "pass overwrite=True" in text()
