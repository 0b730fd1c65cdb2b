"""MTP modules, compared with PyTorch: transformers' of GLM-4.5 and DeepSeek-V3; transcriptions of MiMo's and Qwen's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mars_jax as mj
from mars_jax import hub
from mars_jax.core.types import Params, Visible
from mars_jax.hub.heads.mtp_files import load_mtp
from mars_jax.utils.errors import MarsError
from tests.helpers import mtp, slow_but

IN_TRANSFORMERS = ("glm4_moe", "deepseek_v3")
TOKENS = np.random.default_rng(0).integers(0, 61, 20)


@pytest.fixture
def first_free_layer(monkeypatch):
    """Let transformers read the module of a target with two layers: it lists only the numbers of published ones."""
    names = [r"model\.layers\.2\..*"]
    for family in ("Glm4Moe", "DeepseekV3"):
        monkeypatch.setattr(f"transformers.{family}ForCausalLM._keys_to_ignore_on_load_unexpected", names)


def module_logits(path, tokens):
    """Return the logits f32[n - 1, V] of a module over a whole text i32[n]."""
    target = hub.load(path)
    config, module = load_mtp(path, target.config)
    params = Params(target=target.params, draft=module)
    model = target.model.with_features(config.feature_layers)

    @jax.jit
    def program(params, ids):
        n = ids.shape[1]
        visible = Visible.causal(jnp.zeros((1,), jnp.int32), n)
        output = model.forward(params.target, ids, visible, model.init_cache(1, n))
        feature = config.fuse(params.draft, output)[:, :-1]
        visible = Visible.causal(jnp.zeros((1,), jnp.int32), n - 1)
        cache = config.init_cache(1, n - 1, "float32")
        hidden, _ = config.forward(model, params, feature, ids[:, 1:], visible, cache)
        return config.logits(model, params, hidden)[0]

    return np.asarray(program(params, jnp.asarray(tokens[None], jnp.int32)))


@pytest.mark.parametrize("kind", slow_but(mtp.TARGETS, "qwen3_5", "qwen3_5_moe", "deepseek_v3", "mimo"))
def test_the_logits_of_a_module_are_those_of_pytorch(kind, tmp_path, first_free_layer):
    model = mtp.checkpoint(tmp_path, kind)
    if kind in IN_TRANSFORMERS:
        expected = mtp.logits_of_transformers(tmp_path, TOKENS)
    else:
        expected = mtp.logits_of_transcription(model, tmp_path, TOKENS)
    np.testing.assert_allclose(module_logits(tmp_path, TOKENS), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", IN_TRANSFORMERS)
def test_a_chain_of_one_token_is_that_of_generate_with_use_mtp(kind, tmp_path, first_free_layer):
    """Compare tokens and numbers of forward passes; with four tokens, a random module is sometimes right."""
    mtp.checkpoint(tmp_path, kind, vocab=4)
    target, prompt = hub.load(tmp_path), (TOKENS % 4).tolist()
    drafter = mj.drafters.load("mtp", target, num_draft_tokens=1)
    settings = {"temperature": 0.0, "max_new_tokens": 40, "stop_tokens": (), "verify": mj.verify.exact()}
    result = mj.generate(target, drafter, [prompt], **settings)
    tokens, passes = mtp.generated(tmp_path, prompt, 40)
    assert list(result.tokens[0]) == tokens
    assert result.metrics.steps == passes < 40


@pytest.mark.parametrize(
    ("kind", "module", "second", "part"),
    [
        ("glm4_moe", "model.layers.2", "model.layers.3.eh_proj", "enorm"),
        ("qwen3_5", "mtp", "mtp.layers.1.mlp.up_proj", "norm"),
    ],
)
def test_what_has_no_module_for_the_target_is_refused(kind, module, second, part, tmp_path):
    mtp.checkpoint(tmp_path, kind)
    path, config = tmp_path / "model.safetensors", hub.read_config(tmp_path)
    with pytest.raises(MarsError, match="for a target with vocab_size 61, not 62: use the target's own"):
        load_mtp(tmp_path, dataclasses.replace(config, vocab_size=62))
    whole = load_file(path)
    save_file(whole | {f"{second}.weight": np.zeros((32, 64), np.float32)}, path)
    with pytest.raises(MarsError, match="several MTP modules: draft with ngram, as only"):
        load_mtp(tmp_path, config)
    missing = f"{module}.{part}.weight"
    save_file({name: x for name, x in whole.items() if name != missing}, path)
    with pytest.raises(MarsError, match=rf"1 tensors are missing \({missing}\)"):
        load_mtp(tmp_path, config)
    hub.save(tmp_path / "without", config, hub.load(tmp_path).params)
    with pytest.raises(MarsError, match=rf"has no MTP module \({module}.\*\): draft with ngram"):
        load_mtp(tmp_path / "without", config)


def test_the_bias_of_a_router_stays_float32_in_bfloat16(tmp_path):
    mtp.checkpoint(tmp_path / "hub", "deepseek_v3")
    target = hub.load(tmp_path / "hub", dtype="bfloat16")
    hub.convert(tmp_path / "hub", tmp_path / "converted", dtype="bfloat16")
    converted = hub.load(tmp_path / "converted")
    _, module = load_mtp(tmp_path / "hub", target.config, dtype="bfloat16")
    stored = load_file(tmp_path / "hub/model.safetensors")
    layers = ((1, target.params["layers"][1]), (1, converted.params["layers"][1]), (2, module["layer"]))
    for number, layer in layers:
        assert layer["router"].dtype == "bfloat16"
        expected = stored[f"model.layers.{number}.mlp.gate.e_score_correction_bias"]
        np.testing.assert_array_equal(layer["score_bias"], expected)
    with pytest.raises(MarsError, match="has no MTP module"):
        load_mtp(tmp_path / "converted", target.config)
    bare = mj.Pretrained.from_parts(target.model, target.params, config=target.config)
    with pytest.raises(MarsError, match="was not loaded from a checkpoint: name one by mtp:PATH"):
        mj.drafters.load("mtp", bare)
