"""Stand-in for the parts of google-tunix 0.1.7 that `integrations.tunix` uses, with the same names and shapes."""

import abc
import dataclasses
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass
class RolloutOutput:
    text: list
    logits: list
    tokens: list
    left_padded_prompt_tokens: Any
    logprobs: list | None


@dataclasses.dataclass
class RolloutConfig:
    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 64
    eos_tokens: list | None = None
    return_logprobs: bool = False


class BaseRollout(abc.ABC):  # noqa: B024
    """Abstract methods of Tunix's `BaseRollout`."""

    generate = abc.abstractmethod(lambda self, prompts, rollout_config, **kwargs: None)
    get_per_token_logps = abc.abstractmethod(lambda self, prompt_tokens, completion_tokens: None)
    update_params = abc.abstractmethod(lambda self, params, filter_types=None: None)
    pad_id = abc.abstractmethod(lambda self: None)
    eos_id = abc.abstractmethod(lambda self: None)
    model = abc.abstractmethod(lambda self: None)


def install(monkeypatch) -> types.ModuleType:
    """Make `tunix.rl.rollout.base_rollout` importable during a test, and return it."""
    module = types.ModuleType("tunix.rl.rollout.base_rollout")
    module.BaseRollout, module.RolloutOutput, module.RolloutConfig = BaseRollout, RolloutOutput, RolloutConfig
    for name in ("tunix", "tunix.rl", "tunix.rl.rollout"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


class Tokenizer:
    """Tokenizer of single letters with the methods of Tunix's TokenizerAdapter."""

    def encode(self, text, **_):
        return [3 + ord(c) % 60 for c in text]

    def decode(self, ids, **_):
        return "".join(chr(61 + i) for i in ids)

    bos_id = staticmethod(lambda: 1)
    eos_id = staticmethod(lambda: 2)
    pad_id = staticmethod(lambda: 0)


@dataclasses.dataclass(frozen=True)
class Config:
    """Config of a two-layer Qwen3 or Llama 3."""

    num_layers: int = 2
    vocab_size: int = 64
    embed_dim: int = 16
    hidden_dim: int = 24
    num_heads: int = 4
    head_dim: int = 8
    num_kv_heads: int = 2
    rope_theta: int = 10_000
    norm_eps: float = 1e-6
    use_tied_embedding: bool = True


def apply_rope(x, positions, head_dim, rope_theta=1_000_000):
    """Rotate halves by position, like Hugging Face. Like Tunix, use the default base and not that of the config."""
    half = head_dim // 2
    angle = positions[..., None].astype(jnp.float32) / rope_theta ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, :, None], jnp.cos(angle)[:, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Part(nnx.Module):
    def __init__(self, **parts):
        for name, part in parts.items():
            setattr(self, name, part)


def _random(key, *shape):
    return nnx.Param(jax.random.normal(key, shape) * 0.3)


def _norm(size):
    return Part(w=nnx.Param(jnp.ones(size)))


def _layer(c, keys, qk_norm):
    norms = {"q_norm": _norm(c.head_dim), "k_norm": _norm(c.head_dim)} if qk_norm else {}
    attn = Part(
        q_proj=Part(w=_random(keys[0], c.embed_dim, c.num_heads, c.head_dim)),
        k_proj=Part(w=_random(keys[1], c.embed_dim, c.num_kv_heads, c.head_dim)),
        v_proj=Part(w=_random(keys[2], c.embed_dim, c.num_kv_heads, c.head_dim)),
        o_proj=Part(w=_random(keys[3], c.num_heads, c.head_dim, c.embed_dim)),
        **norms,
    )
    mlp = Part(
        gate_proj=Part(kernel=_random(keys[4], c.embed_dim, c.hidden_dim)),
        up_proj=Part(kernel=_random(keys[5], c.embed_dim, c.hidden_dim)),
        down_proj=Part(kernel=_random(keys[6], c.hidden_dim, c.embed_dim)),
    )
    input_norm, attention_norm = _norm(c.embed_dim), _norm(c.embed_dim)
    return Part(attn=attn, mlp=mlp, input_layernorm=input_norm, post_attention_layernorm=attention_norm)


class Qwen3(nnx.Module):
    """Qwen3 with the weight layout of Tunix and its arithmetic written out."""

    qk_norm = True

    def __init__(self, config, seed=0):
        c = self.config = config
        keys = jax.random.split(jax.random.key(seed), (c.num_layers + 1, 8))
        self.embedder = Part(input_embedding=_random(keys[-1, 0], c.vocab_size, c.embed_dim))
        self.layers = nnx.List([_layer(c, keys[i], self.qk_norm) for i in range(c.num_layers)])
        self.final_norm = _norm(c.embed_dim)
        if not c.use_tied_embedding:
            self.lm_head = Part(w=_random(keys[-1, 1], c.embed_dim, c.vocab_size))

    def __call__(self, tokens, positions, cache, attention_mask):
        c = self.config

        def norm(x, part):
            size = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + c.norm_eps)
            return x * size * part.w[...].reshape((1,) * (x.ndim - 1) + (-1,))

        x = self.embedder.input_embedding[...][tokens]
        for layer in self.layers:
            y, att = norm(x, layer.input_layernorm), layer.attn
            q, k, v = (jnp.einsum("btd,dnh->btnh", y, p.w[...]) for p in (att.q_proj, att.k_proj, att.v_proj))
            if self.qk_norm:
                q, k = norm(q, att.q_norm), norm(k, att.k_norm)
            q, k = apply_rope(q, positions, c.head_dim), apply_rope(k, positions, c.head_dim)
            k, v = (jnp.repeat(z, c.num_heads // c.num_kv_heads, axis=2) for z in (k, v))
            scores = jnp.einsum("btnh,bsnh->bnts", q, k) * c.head_dim**-0.5
            weights = jax.nn.softmax(jnp.where(attention_mask[:, None], scores, -1e30), axis=-1)
            x = x + jnp.einsum("bnts,bsnh,nhd->btd", weights, v, att.o_proj.w[...])
            y, mlp = norm(x, layer.post_attention_layernorm), layer.mlp
            gate, up = y @ mlp.gate_proj.kernel[...], y @ mlp.up_proj.kernel[...]
            x = x + (jax.nn.silu(gate) * up) @ mlp.down_proj.kernel[...]
        x = norm(x, self.final_norm)
        head = self.embedder.input_embedding[...].T if c.use_tied_embedding else self.lm_head.w[...]
        return x @ head, None


class Llama3(Qwen3):
    """Llama 3: no norms of queries and keys, and a separate head if embeddings are not tied."""

    qk_norm = False
