"""EAGLE heads, compared with a transcription of the papers over PyTorch transformers' Llama layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.core.types import ForwardOutput, Params, Visible
from mars_jax.models import ModelConfig, Rope, language_model
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.weights import build_rows
from mars_jax.utils.errors import MarsError
from tests.helpers import slow_but, transformers_oracle
from tests.helpers.small_models import SIZES

BATCH, N, MORE, SLOTS, VOCAB = 2, 9, 3, 16, SIZES["vocab_size"]
LAYER = ModelConfig(num_layers=1, rope=Rope(theta=500.0), norm_eps=1e-3, **SIZES)
EAGLE_3 = EagleConfig(
    version=3, layer=LAYER, target_hidden_size=32, draft_vocab_size=20, feature_layers=(1, 2, 4)
)
EAGLE_1 = EagleConfig(
    version=1, layer=LAYER, target_hidden_size=32, draft_vocab_size=VOCAB, own_unembed=False
)
LLAMA3 = Rope(kind="llama3", factor=4.0, original_max_positions=8, low_freq_factor=1.0, high_freq_factor=3.0)


QWEN3 = {"family": "qwen3", "qk_norm": True}
BIASED = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "head_dim": 12, "rope": LLAMA3}


def vary(config: EagleConfig, layer: dict | None = None, **fields) -> EagleConfig:
    return dataclasses.replace(config, layer=dataclasses.replace(LAYER, **(layer or {})), **fields)


CASES = {
    "eagle-3": EAGLE_3,
    "eagle-3, norm before residual": vary(EAGLE_3, norm_before_residual=True),
    "eagle-3, a norm of each feature": vary(EAGLE_3, fc_norm=True),
    "eagle-3.1": vary(EAGLE_3, fc_norm=True, norm_output=True, norm_before_residual=True),
    "eagle-3 of speculators": vary(
        EAGLE_3, QWEN3, input_norm=True, norm_output=True, norm_before_residual=True
    ),
    "eagle-3, narrower": vary(EAGLE_3, {"num_kv_heads": 4}, target_hidden_size=48, own_embed=True),
    "eagle-3, the target's unembedding": vary(EAGLE_3, draft_vocab_size=VOCAB, own_unembed=False),
    "eagle-3, every bias, head_dim 12, llama3 rope": vary(EAGLE_3, BIASED, fc_bias=True),
    "eagle-3, three layers": vary(EAGLE_3, {"num_layers": 3, "windows": ()}),
    "eagle-1": EAGLE_1,
    "eagle-1, biases, its own embedding and lm_head": vary(
        EAGLE_1, {"qkv_bias": True, "o_bias": True}, fc_bias=True, own_embed=True, own_unembed=True
    ),
}
PARTS_OF_EAGLE_3_1 = {"eagle-3, norm before residual", "eagle-3, a norm of each feature"}


def torch_head(config: EagleConfig, target):
    """Return the head in PyTorch, written from the description only, with random parameters under published names.

    Sources: EAGLE 2401.15077, section 4; EAGLE-3 2503.01840, section 3; for the norm of all features and the layers of
    Qwen3, vllm-project/speculators, `models/eagle3`.
    """
    import torch
    from torch import nn
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    c = config.layer
    settings = transformers_oracle.layer_settings(c) | {"mlp_bias": c.mlp_bias}
    with transformers_oracle.third_party():
        described = LlamaConfig(**settings)
    hidden, width, features = c.hidden_size, config.target_hidden_size, len(config.feature_layers)
    embed, unembed = (torch.tensor(np.asarray(target[name])) for name in ("embed", "unembed"))

    if c.qk_norm:
        from transformers import Qwen3Config
        from transformers.models.qwen3 import modeling_qwen3 as qwen3

        described = Qwen3Config(**settings)

    class Layer(nn.Module):
        """Layer of EAGLE-3: a Llama layer whose attention reads the embedding and the feature."""

        def __init__(self):
            super().__init__()
            self.self_attn = (qwen3.Qwen3Attention if c.qk_norm else llama.LlamaAttention)(described, 0)
            for name in ("q_proj", "k_proj", "v_proj"):
                old = getattr(self.self_attn, name)
                new = nn.Linear(2 * hidden, old.out_features, bias=old.bias is not None)
                setattr(self.self_attn, name, new)
            self.mlp = llama.LlamaMLP(described)
            self.hidden_norm = llama.LlamaRMSNorm(hidden, c.norm_eps)
            self.input_layernorm = llama.LlamaRMSNorm(hidden, c.norm_eps)
            self.post_attention_layernorm = llama.LlamaRMSNorm(hidden, c.norm_eps)

        def forward(self, word, feature, **attention):
            normed = self.hidden_norm(feature)
            residual = normed if config.norm_before_residual else feature
            both = torch.cat([self.input_layernorm(word), normed], dim=-1)
            h = residual + self.self_attn(both, **attention)[0]
            return h + self.mlp(self.post_attention_layernorm(h))

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            if config.own_embed:
                self.embed_tokens = nn.Embedding(VOCAB, hidden)
            if config.own_unembed:
                self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
            if config.version == 3:
                self.fc = nn.Linear(features * width, hidden, bias=config.fc_bias)
                if c.num_layers == 1:
                    self.midlayer = Layer()
                else:
                    later = (llama.LlamaDecoderLayer(described, i) for i in range(1, c.num_layers))
                    self.layers = nn.ModuleList([Layer(), *later])
                self.norm = llama.LlamaRMSNorm(hidden, c.norm_eps)
                if config.input_norm:
                    self.input_norm = llama.LlamaRMSNorm(features * width, c.norm_eps)
                if config.fc_norm:
                    norms = (llama.LlamaRMSNorm(width, c.norm_eps) for _ in range(features))
                    self.fc_norm = nn.ModuleList(norms)
            else:
                self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
                layer = llama.LlamaDecoderLayer(described, 0)
                layer.input_layernorm = nn.Identity()  # the first layer of EAGLE-1 has no input norm
                self.layers = nn.ModuleList([layer])
            self.rotary = llama.LlamaRotaryEmbedding(described)

        def fuse(self, outputs):
            if config.version == 1:
                return outputs[0]
            if config.fc_norm:
                outputs = [norm(x) for norm, x in zip(self.fc_norm, outputs, strict=True)]
            joined = torch.cat(list(outputs), dim=-1)
            return self.fc(self.input_norm(joined) if config.input_norm else joined)

        def forward(self, feature, tokens):
            """Return features and logits after a whole sequence, without a cache."""
            n = tokens.shape[1]
            word = (self.embed_tokens.weight if config.own_embed else embed)[tokens]
            future = torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
            attention = {
                "attention_mask": torch.zeros(n, n).masked_fill(future, float("-inf"))[None, None],
                "position_embeddings": self.rotary(word, torch.arange(n)[None]),
            }
            if config.version == 3:
                first, *later = [self.midlayer] if c.num_layers == 1 else self.layers
                h = first(word, feature, **attention)
                for layer in later:
                    h = layer(h, **attention)
                normed = self.norm(h)
                following = normed if config.norm_output else h
            else:
                x = self.fc(torch.cat([word, feature], dim=-1))
                following = normed = self.layers[0](x, **attention)
            weight = self.lm_head.weight if config.own_unembed else unembed
            return following, normed @ weight.T

    torch.manual_seed(1)
    torch.set_num_threads(1)
    head = Head()
    return transformers_oracle.randomize(head)


@pytest.mark.parametrize("name", slow_but(CASES, *(set(CASES) - PARTS_OF_EAGLE_3_1)))
def test_a_head_equals_its_transcription_in_pytorch(name):
    """Compare a whole sequence, and the tokens drafted after it from the head's own features."""
    torch = pytest.importorskip("torch")
    config, rng = CASES[name], np.random.default_rng(2)
    table = (VOCAB, config.target_hidden_size)
    # A head reads only the embedding and the unembedding of its target.
    target = {key: jnp.asarray(0.2 * rng.standard_normal(table, np.float32)) for key in ("embed", "unembed")}
    reference = torch_head(config, target)
    state = {key: value.numpy() for key, value in reference.state_dict().items()}
    draft = build_rows(config.weights(), lambda row: jnp.asarray(state.pop(row.name)))
    assert not state  # every parameter has its row
    params = Params(target=target, draft=draft)
    shape = (max(len(config.feature_layers), 1), BATCH, N, config.target_hidden_size)
    features = rng.standard_normal(shape, np.float32)
    tokens = rng.integers(0, VOCAB, (BATCH, N + MORE))

    @jax.jit
    def fuse(features):
        output = ForwardOutput(features[0], tuple(features), config.init_cache(1, 1, "float32"))
        return config.fuse(params.draft, output)

    @jax.jit
    def forward(feature, tokens, start, cache):
        visible, model = Visible.causal(start, tokens.shape[1]), language_model(LAYER)
        out, cache = config.forward(model, params, feature, tokens, visible, cache)
        return out, config.logits(model, params, out), cache

    fused = fuse(jnp.asarray(features))
    with torch.no_grad(), transformers_oracle.third_party():
        torch_fused = reference.fuse([torch.tensor(x) for x in features])
        # 1e-5: float32 products summed in another order; a wrong term would differ by 1e-2 or more.
        np.testing.assert_allclose(fused, torch_fused, atol=1e-5, rtol=0)
        cache, first = config.init_cache(BATCH, SLOTS, "float32"), 0
        for last in range(N, N + MORE + 1):
            new_tokens = jnp.asarray(tokens[:, first:last], jnp.int32)
            fused, logits, cache = forward(fused, new_tokens, jnp.full((BATCH,), first, jnp.int32), cache)
            following, expected = reference(torch_fused, torch.tensor(tokens[:, :last]))
            np.testing.assert_allclose(fused, following[:, first:], atol=1e-5, rtol=0)
            np.testing.assert_allclose(logits, expected[:, first:], atol=1e-5, rtol=0)
            fused, first = fused[:, -1:], last
            torch_fused = torch.cat([torch_fused, following[:, -1:]], dim=1)


def test_draft_tokens_and_logits_map_to_the_targets():
    ids = jnp.asarray([4, 1, 9], jnp.int32)
    config = vary(EAGLE_3, draft_vocab_size=3)
    params = Params(target=(), draft={"ids": ids})
    target_ids = config.to_target(params, jnp.asarray([[2, 0]], jnp.int32))
    np.testing.assert_array_equal(target_ids, [[9, 4]])
    wide = config.widen(params, jnp.asarray([[[0.5, 1.5, 2.5]]]))
    expected = np.full((1, 1, VOCAB), -np.inf)
    expected[0, 0, [4, 1, 9]] = [0.5, 1.5, 2.5]
    np.testing.assert_array_equal(wide, expected)
    assert EAGLE_1.to_target(params, ids) is ids


@pytest.mark.parametrize(
    "base, change, expected",
    [
        (EAGLE_3, {"version": 2}, "EAGLE version 2 is not known"),
        (EAGLE_3, {"feature_layers": ()}, "give feature_layers"),
        (EAGLE_3, {"target_hidden_size": 48}, "is 32 wide and the target 48"),
        (EAGLE_1, {"target_hidden_size": 48, "own_unembed": True}, "is 32 wide and the target 48"),
        (EAGLE_3, {"own_unembed": False}, "drafts from 20 of 64 tokens"),
    ],
)  # fmt: skip
def test_a_config_that_makes_no_sense_is_refused(base, change, expected):
    with pytest.raises(MarsError, match=expected):
        vary(base, **change)
