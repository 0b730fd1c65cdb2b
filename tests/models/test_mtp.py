"""MTP modules, compared with PyTorch: transformers' GLM-4.5, and a transcription of MiMo's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import hub
from mars_jax.core.types import Params, Visible
from mars_jax.hub.heads.mtp_files import load_mtp
from tests.helpers import mtp

TOKENS = np.random.default_rng(0).integers(0, 61, 20)


@pytest.fixture
def first_free_layer(monkeypatch):
    """Let transformers read the module of a target with two layers: it lists only the numbers of published ones."""
    names = [r"model\.layers\.2\..*"]
    monkeypatch.setattr("transformers.Glm4MoeForCausalLM._keys_to_ignore_on_load_unexpected", names)


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


@pytest.mark.parametrize("kind", ["glm4_moe", "mimo"])
def test_the_logits_of_a_module_are_those_of_pytorch(kind, tmp_path, first_free_layer):
    model = mtp.checkpoint(tmp_path, kind)
    if kind == "mimo":
        expected = mtp.logits_of_mimo(model, tmp_path, TOKENS)
    else:
        expected = mtp.logits_of_glm(tmp_path, TOKENS)
    np.testing.assert_allclose(module_logits(tmp_path, TOKENS), expected, atol=1e-4, rtol=0)
