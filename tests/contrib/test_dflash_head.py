"""Block drafters, compared with a transcription in PyTorch over transformers' Qwen3 layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.contrib.models import dflash_head
from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.core.types import ForwardOutput, Params, Visible
from mars_jax.models import ModelConfig, Rope, language_model
from mars_jax.models.weights import build_rows
from mars_jax.utils.errors import MarsError
from tests.helpers import transformers_oracle

BATCH, CONTEXT, SLOTS, VOCAB, FEATURES = 2, 13, 24, 53, 3
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 44, "num_layers": 3}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 12}
LAYER = ModelConfig(family="qwen3", qk_norm=True, rope=Rope(theta=500.0), norm_eps=1e-3, **SIZES, **HEADS)
READ = {"target_hidden_size": 32, "feature_layers": (0, 1, 2)}
PLAIN = DFlashConfig(layer=LAYER, block_size=5, mask_token=7, draft_vocab_size=VOCAB, **READ)


def vary(layer: dict | None = None, **fields) -> DFlashConfig:
    return dataclasses.replace(PLAIN, layer=dataclasses.replace(LAYER, **(layer or {})), **fields)


CASES = {
    "z-lab": PLAIN,
    "z-lab, causal windows": vary({"windows": (None, 6, None)}, causal=(False, True, False)),
    "windows, also ahead": vary({"windows": (6, None, 3)}),
    "deepseek: places say the next token": vary(from_anchor=True),
    "speculators: a draft vocabulary": vary(draft_vocab_size=20, own_unembed=True),
    "dspark": vary(
        from_anchor=True, markov_rank=6, confidence=True, confidence_bias=True, confidence_markov=True
    ),
    "dspark, a confidence of the hidden states": vary(markov_rank=6, confidence=True),
    "biases, llama layers, narrower than the target": vary(
        {"family": "llama", "qk_norm": False, "qkv_bias": True, "o_bias": True},
        target_hidden_size=48,
        own_embed=True,
        own_unembed=True,
    ),
}


def torch_head(config: DFlashConfig, target):
    """Return the head in PyTorch, written from the description, with random parameters under published names.

    Sources: DFlash 2602.06036, section 3; z-lab/dflash, `dflash/model.py`; vllm-project/speculators, `models/dspark`.
    The layers are transformers' own; their attention also gets the keys and values of the context.
    """
    import torch
    from torch import nn
    from transformers import Qwen3Config
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    c = config.layer
    with transformers_oracle.third_party():
        described = Qwen3Config(**transformers_oracle.layer_settings(c))
    size = c.hidden_size
    embed, unembed = (torch.tensor(np.asarray(target[name])) for name in ("embed", "unembed"))

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(FEATURES * config.target_hidden_size, size, bias=False)
            self.hidden_norm = qwen3.Qwen3RMSNorm(size, c.norm_eps)
            self.layers = nn.ModuleList(qwen3.Qwen3DecoderLayer(described, i) for i in range(c.num_layers))
            self.norm = qwen3.Qwen3RMSNorm(size, c.norm_eps)
            self.rotary = qwen3.Qwen3RotaryEmbedding(described)
            if not c.qk_norm:
                for layer in self.layers:
                    layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
            if config.own_embed:
                self.embed_tokens = nn.Embedding(VOCAB, size)
            if config.own_unembed:
                self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
            if config.markov_rank:
                self.markov_head = nn.Module()
                self.markov_head.markov_w1 = nn.Embedding(VOCAB, config.markov_rank)
                sizes = (config.markov_rank, config.draft_vocab_size)
                self.markov_head.markov_w2 = nn.Linear(*sizes, bias=False)
            if config.confidence:
                width = size + config.markov_rank * config.confidence_markov
                self.confidence_head = nn.Module()
                self.confidence_head.proj = nn.Linear(width, 1, bias=config.confidence_bias)

        def attend(self, i, x, c_, cos, sin):
            """Apply layer i's attention: queries of the block, keys and values of the context and the block."""
            attention, n, past = self.layers[i].self_attn, x.shape[1], c_.shape[1]
            both = torch.cat([c_, x], dim=1)

            def heads(y):
                return y.view(*y.shape[:2], -1, c.head_dim)

            q = attention.q_norm(heads(attention.q_proj(x))).transpose(1, 2)
            k = attention.k_norm(heads(attention.k_proj(both))).transpose(1, 2)
            v = heads(attention.v_proj(both)).transpose(1, 2)
            q, _ = qwen3.apply_rotary_pos_emb(q, q, cos[:, past:], sin[:, past:])
            _, k = qwen3.apply_rotary_pos_emb(k, k, cos, sin)
            queries, keys = torch.arange(past, past + n)[:, None], torch.arange(past + n)[None]
            hidden = torch.zeros(n, past + n, dtype=torch.bool)
            if (window := c.windows[i]) is not None:
                hidden |= keys <= queries - window
            if config.causal[i]:
                hidden |= keys > queries
            elif window is not None:
                hidden |= keys >= queries + window
            mask = torch.zeros(n, past + n).masked_fill(hidden, float("-inf"))[None, None]
            mixed, _ = qwen3.eager_attention_forward(attention, q, k, v, mask, scaling=attention.scaling)
            return attention.o_proj(mixed.reshape(*x.shape[:2], -1))

        def forward(self, features, last):
            """Return hidden states and logits of a block after a context that starts at position 0."""
            context = self.hidden_norm(self.fc(torch.cat(list(features), dim=-1)))
            masks = torch.full((len(last), config.block_size - 1), config.mask_token)
            x = (self.embed_tokens.weight if config.own_embed else embed)[torch.cat([last, masks], dim=1)]
            places = torch.arange(context.shape[1] + config.block_size)[None].expand(len(last), -1)
            cos, sin = self.rotary(x, places)
            for i, layer in enumerate(self.layers):
                x = x + self.attend(i, layer.input_layernorm(x), context, cos, sin)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            hidden = self.norm(x)
            weight = self.lm_head.weight if config.own_unembed else unembed
            return hidden, hidden @ weight.T

        def corrected(self, hidden, logits, previous):
            """Return the logits with the Markov head's correction, and the confidence, after the previous tokens."""
            embedded = self.markov_head.markov_w1(previous)
            read = torch.cat([hidden, embedded], dim=-1) if config.confidence_markov else hidden
            return logits + self.markov_head.markov_w2(embedded), self.confidence_head.proj(read)[..., 0]

    torch.manual_seed(1)
    torch.set_num_threads(1)
    return transformers_oracle.randomize(Head())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_block_equals_its_transcription_in_pytorch(name):
    """Run a context in two pieces, then a block; compare hidden states, logits and the outputs of DSpark's heads."""
    torch = pytest.importorskip("torch")
    config, rng = CASES[name], np.random.default_rng(2)
    shape = (VOCAB, config.target_hidden_size)
    target = {
        name: jnp.asarray(0.2 * rng.standard_normal(shape, np.float32)) for name in ("embed", "unembed")
    }
    reference = torch_head(config, target)
    state = {key: value.numpy() for key, value in reference.state_dict().items()}
    draft = build_rows(config.weights(), lambda row: jnp.asarray(state.pop(row.name)))
    assert not state, "a parameter has no row"
    params = Params(target=target, draft=draft)
    features = rng.standard_normal((FEATURES, BATCH, CONTEXT, config.target_hidden_size), np.float32)
    last = rng.integers(0, VOCAB, (BATCH, 1))
    previous = rng.integers(0, VOCAB, (BATCH, config.block_size))
    model = language_model(dataclasses.replace(LAYER, num_layers=1, windows=()))

    @jax.jit
    def jax_head(params, features, last, previous):
        cache = config.init_cache(BATCH, SLOTS, "float32")
        for first, end in ((0, 6), (6, CONTEXT)):
            part = tuple(feature[:, first:end] for feature in features)
            fused = dflash_head.fuse(config, params.draft, ForwardOutput(part[0], part, ()))
            positions = jnp.broadcast_to(jnp.arange(first, end, dtype=jnp.int32), (BATCH, end - first))
            slot = jnp.full((BATCH,), first, jnp.int32)
            cache = dflash_head.absorb(config, params.draft, fused, positions, slot, cache)
        size, first = config.block_size, jnp.full((BATCH,), CONTEXT, jnp.int32)
        visible = Visible.causal(first, size).replace(seen=jnp.ones((1, size, size), bool))
        tokens = dflash_head.block(config, last)
        hidden, _ = dflash_head.forward(config, model, params, tokens, visible, cache)
        logits = dflash_head.unembed(config, model, params, hidden)
        if not config.confidence:
            return hidden, logits
        corrected = logits + dflash_head.markov(params.draft, previous)
        return hidden, logits, corrected, dflash_head.confidence(config, params.draft, hidden, previous)

    inputs = jnp.asarray(features), jnp.asarray(last, jnp.int32), jnp.asarray(previous, jnp.int32)
    with torch.no_grad(), transformers_oracle.third_party():
        expected = reference([torch.tensor(x) for x in features], torch.tensor(last))
        if config.confidence:
            expected = (*expected, *reference.corrected(*expected, torch.tensor(previous)))
    for output, expected_output in zip(jax_head(params, *inputs), expected, strict=True):
        # The order of float32 sums differs by up to 1e-5. A wrong term would differ by 1e-2 or more.
        np.testing.assert_allclose(output, expected_output, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"feature_layers": ()}, "give feature_layers"),
        ({"block_size": 1}, "blocks of 1"),
        ({"mask_token": 53}, "mask token is 53 and there are 53"),
        ({"causal": (True,)}, "1 values of causal for 3 layers"),
        ({"target_hidden_size": 48}, "is 32 wide and the target 48"),
        ({"draft_vocab_size": 20}, "drafts from 20 of 53 tokens"),
        ({"confidence_markov": True, "confidence": True}, "confidence_markov"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change, expected):
    with pytest.raises(MarsError, match=expected):
        vary(**change)
