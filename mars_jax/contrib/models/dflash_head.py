"""Block drafters: heads of a few layers that draft a whole block from the target's features in one forward pass.

Sources: DFlash 2602.06036 (z-lab/dflash, `dflash/model.py`); DSpark (deepseek-ai/DeepSpec, `Qwen3DSparkModel`);
vllm-project/speculators, `models/dflash` and `models/dspark`. B batch, N tokens, K tokens per block, D of them drafted,
E hidden size of the head, F that of the target, V vocabulary, W draft vocabulary, R rank of the Markov head. Tested
against a reimplementation in PyTorch with the Qwen3 layers of transformers (tests/contrib/test_dflash_head.py).

The context of token t consists of the keys and values that each layer computes from the target's features of t. They
have position t and are stored in slot t. A block is the last committed token, which has no features yet, followed by K
- 1 mask tokens. It attends to the whole context and, in layers that are not causal, to all of its own positions. The
outputs of a block are independent marginals. A Markov head makes each marginal depend on the previous token.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core import cache as kv_cache
from mars_jax.core.axes import hold_heads, hold_whole
from mars_jax.core.types import ForwardOutput, KVCache, LanguageModel, Params, PyTree, Visible
from mars_jax.models.attention import Attend, attending
from mars_jax.models.config import ModelConfig
from mars_jax.models.heads import Axes, LayeredHead, layers_like
from mars_jax.models.heads import init_params as init_params
from mars_jax.models.layers import dense, embed, gated_mlp, rms_norm
from mars_jax.models.rope import angles, rotate, rotation_at
from mars_jax.models.transformer import attention
from mars_jax.models.weights import Weight
from mars_jax.models.weights import weights as layer_weights
from mars_jax.utils.errors import MarsError
from mars_jax.utils.limits import DRAFT_TOKENS

LONGEST_BLOCK = DRAFT_TOKENS + 1
"""Maximum number of tokens in a block: the committed token and `DRAFT_TOKENS` drafted ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayeredHead):
    """Static configuration of a block drafter.

    Raises:
      MarsError: a field is out of range, or fields contradict each other.
    """

    kind = "dflash"
    title = "DFlash head"
    axes: ClassVar[Axes] = {**LayeredHead.axes, "markov_in": ("vocab", None), "markov_out": ("vocab", None)}
    block_size: int  # K
    mask_token: int  # id of the mask token
    # Whether position i predicts the token at position i + 1 (DSpark, DeepSeek) or at position i (z-lab).
    from_anchor: bool = False
    # For each layer, whether attention within the block is causal; (): no layer is causal.
    causal: tuple[bool, ...] = ()
    markov_rank: int = 0  # R; 0: no Markov head
    confidence: bool = False  # whether there is a confidence head, which predicts acceptance at each position
    confidence_bias: bool = False  # whether the confidence head has a bias
    confidence_markov: bool = False  # whether that head also reads the previous token's Markov embedding

    def __post_init__(self):
        c = self.layer
        if not self.feature_layers:
            raise MarsError(
                "a DFlash head needs the layers of the target that it reads: give feature_layers."
            )
        if not 2 <= self.block_size <= LONGEST_BLOCK:
            raise MarsError(
                f"the DFlash head has blocks of {self.block_size}: expected 2 to {LONGEST_BLOCK} tokens."
            )
        if not 0 <= self.mask_token < c.vocab_size:
            raise MarsError(
                f"the mask token is {self.mask_token} and there are {c.vocab_size} tokens: give one of them."
            )
        object.__setattr__(self, "causal", self.causal or (False,) * c.num_layers)
        if len(self.causal) != c.num_layers:
            raise MarsError(f"{len(self.causal)} values of causal for {c.num_layers} layers: give one each.")
        super().__post_init__()
        if self.confidence_markov and not (self.confidence and self.markov_rank):
            raise MarsError("confidence_markov requires a confidence head and a Markov head: unset it.")

    @property
    def drafts(self) -> int:
        """D, the number of drafted tokens in a block."""
        return self.block_size - (not self.from_anchor)

    @classmethod
    def outline(cls, target: ModelConfig) -> Self:
        """Return the config of a head with the published shape: five Qwen3 layers, as wide as the target.

        It reads the outputs of five of the target's layers.

        >>> target = ModelConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=36, num_heads=1)
        >>> DFlashConfig.outline(target).feature_layers
        (1, 9, 17, 25, 33)
        """
        count = target.num_layers
        return cls(
            layer=layers_like(target, family="qwen3", num_layers=5, qk_norm=True),
            target_hidden_size=target.hidden_size,
            # There are always five feature layers. If the target has too few layers, some are repeated.
            feature_layers=tuple(max(0, min(count - 1, round(1 + i * (count - 4) / 4))) for i in range(5)),
            block_size=16,
            mask_token=target.vocab_size - 1,
            draft_vocab_size=target.vocab_size,
        )

    def weights(self) -> tuple[Weight, ...]:
        c, e = self.layer, self.layer.hidden_size
        rows: list[Weight] = []
        if self.own_embed:
            rows.append(Weight(("embed",), "embed_tokens.weight", (c.vocab_size, e), "normal"))
        features = len(self.feature_layers) * self.target_hidden_size
        rows.append(Weight(("fc",), "fc.weight", (e, features), "normal"))
        rows.append(Weight(("hidden_norm",), "hidden_norm.weight", (e,), "ones"))
        rows += [
            row._replace(name=row.name.removeprefix("model."))
            for row in layer_weights(c)
            if row.path[0] == "layers"
        ]
        rows.append(Weight(("norm",), "norm.weight", (e,), "ones"))
        if self.own_unembed:
            rows.append(Weight(("unembed",), "lm_head.weight", (self.draft_vocab_size, e), "normal"))
        r = self.markov_rank
        if r:
            in_name, out_name = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
            rows.append(Weight(("markov_in",), in_name, (c.vocab_size, r), "normal"))
            rows.append(Weight(("markov_out",), out_name, (self.draft_vocab_size, r), "normal"))
        if self.confidence:
            width = e + r if self.confidence_markov else e
            rows.append(Weight(("confidence",), "confidence_head.proj.weight", (1, width), "normal"))
            if self.confidence_bias:
                rows.append(Weight(("confidence_bias",), "confidence_head.proj.bias", (1,), "zeros"))
        return tuple(rows)


@jax.named_scope("fuse")
def fuse(config: DFlashConfig, head: PyTree, output: ForwardOutput) -> Array:
    """Fuse the target's features at N tokens into the inputs of the context, [B, N, E]."""
    joined_features = hold_whole(jnp.concatenate(list(output.features), axis=-1)).astype(head["fc"].dtype)
    return rms_norm(dense(joined_features, head["fc"]), head["hidden_norm"], config.layer.norm_eps)


@jax.named_scope("context")
def absorb(
    config: DFlashConfig, head: PyTree, fused: Array, positions: Array, slot: Array, cache: KVCache
) -> KVCache:
    """Write the context of N tokens into the cache.

    Args:
      config, head: the head's configuration and params.
      fused: [B, N, E]; inputs of the context, from `fuse`.
      positions: i32[B, N]; positions of the tokens.
      slot: i32[B]; cache slot of the first token.
      cache: cache of the head.
    """
    layer_config = config.layer
    batch, n, _ = fused.shape
    head_shape = (batch, n, layer_config.num_kv_heads, layer_config.head_dim)
    # Only keys and values are needed, because the context has no queries.
    cos, sin = angles(positions, layer_config.rope, layer_config.head_dim)
    ks, vs = [], []
    for i, layer in enumerate(head["layers"]):
        k = dense(fused, layer["k"], layer.get("k_bias")).reshape(head_shape)
        v = dense(fused, layer["v"], layer.get("v_bias")).reshape(head_shape)
        if layer_config.qk_norm:
            k = rms_norm(k, layer["k_norm"], layer_config.norm_eps)
        ks.append(hold_heads(kv_cache.write_slots(cache.k[i], rotate(k, cos, sin), slot)))
        vs.append(hold_heads(kv_cache.write_slots(cache.v[i], v, slot)))
    return KVCache(k=tuple(ks), v=tuple(vs))


def block(config: DFlashConfig, last: Array) -> Array:
    """Return the tokens i32[B, K] of a block: the last committed tokens i32[B, 1], followed by mask tokens."""
    masks = jnp.full((last.shape[0], config.block_size - 1), config.mask_token, last.dtype)
    return jnp.concatenate([last, masks], axis=1)


def forward(
    config: DFlashConfig,
    target: LanguageModel,
    params: Params,
    tokens: Array,
    visible: Visible,
    cache: KVCache,
) -> tuple[Array, KVCache]:
    """Run the head over blocks of N positions.

    Args:
      config, target: the head's configuration, and the model that it was trained for.
      params: params of both models; the head's are `params.draft`.
      tokens: i32[B, N]; tokens of the blocks, from `block`.
      visible: attention visibility of the positions. Layers that are neither windowed nor causal use `visible.seen`
        unchanged as their mask; the other layers mask additional slots.
      cache: the head's cache, which contains the context.

    Returns:
      The hidden states after the final norm, [B, N, E], and the cache with the rows of the block.
    """
    head, c = params.draft, config.layer
    with jax.named_scope("embed"):
        x = config.embed(target, params, tokens).astype(head["fc"].dtype)
    rotation = rotation_at(visible.positions, c.rope, c.head_dim)
    kinds = list(zip(c.windows, config.causal, strict=True))
    with jax.named_scope("mask"):
        attends = {kind: _attending(visible, cache.slots, *kind) for kind in dict.fromkeys(kinds)}
    ks, vs = [], []
    for i, layer in enumerate(head["layers"]):
        with jax.named_scope("attention"):
            normed = rms_norm(x, layer["attention_norm"], c.norm_eps)
            mixed, k, v = attention(c, layer, normed, rotation, attends[kinds[i]], cache.k[i], cache.v[i])
            x = x + mixed
        with jax.named_scope("mlp"):
            normed = rms_norm(x, layer["mlp_norm"], c.norm_eps)
            x = hold_whole(x + gated_mlp(layer, normed, c.activation))
        ks.append(k)
        vs.append(v)
    return rms_norm(x, head["norm"], c.norm_eps), KVCache(k=tuple(ks), v=tuple(vs))


def _attending(visible: Visible, slots: int, window: int | None, causal: bool) -> Attend:
    """Return the attention function of a layer.

    A window limits attention in both directions (z-lab/dflash, `_attention_mask`).
    """
    query_positions = visible.positions[:, :, None]
    # If `seen_positions` is None, the mask covers the block itself, so keys and queries have the same positions.
    keys = visible.positions if visible.seen_positions is None else visible.seen_positions
    key_positions = keys[:, None]
    seen_mask = visible.seen
    assert seen_mask is not None  # `propose` always passes a mask for a block
    if causal:
        seen_mask = seen_mask & (key_positions <= query_positions)
    elif window is not None:
        seen_mask = seen_mask & (key_positions < query_positions + window)
    return attending("xla", dataclasses.replace(visible, seen=seen_mask), slots, window)


@jax.named_scope("unembed")
def unembed(config: DFlashConfig, target: LanguageModel, params: Params, hidden: Array) -> Array:
    """Return the logits f32[B, N, W] of hidden states [B, N, E], without the correction of a Markov head."""
    return config.unembed(target, params, hidden)


@jax.named_scope("markov")
def markov(head: PyTree, parents: Array) -> Array:
    """Return the Markov head's correction f32[B, N, W], to be added to the logits after tokens `parents` i32[B, N]."""
    parent_embedding = embed(head["markov_in"], parents).astype(head["fc"].dtype)
    return dense(parent_embedding, head["markov_out"], dtype=jnp.float32)


@jax.named_scope("confidence")
def confidence(config: DFlashConfig, head: PyTree, hidden: Array, parents: Array) -> Array:
    """Predict the log odds f32[B, N] that the tokens after `parents` i32[B, N] are accepted.

    `hidden` [B, N, E] are the head's hidden states at these tokens.
    """
    inputs = hidden.astype(jnp.float32)
    if config.confidence_markov:
        inputs = jnp.concatenate([inputs, embed(head["markov_in"], parents).astype(jnp.float32)], axis=-1)
    return dense(inputs, head["confidence"].astype(jnp.float32), head.get("confidence_bias"))[..., 0]
