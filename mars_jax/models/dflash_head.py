"""Block drafters: a few layers that read the target's features and draft a whole block in one forward.

Sources: DFlash 2602.06036 (z-lab/dflash, `dflash/model.py`); DSpark (deepseek-ai/DeepSpec, `Qwen3DSparkModel`);
vllm-project/speculators, `models/dflash` and `models/dspark`. B batch, N tokens, K tokens of a block, D of them
drafted, E hidden size of the head, F that of the target, V vocabulary, W draft vocabulary, R rank of the Markov head.
Oracle: a transcription in PyTorch over transformers' Qwen3 layers (tests/models/test_dflash.py).

The context of token t are keys and values that each layer makes of the target's features of t, in slot t and at
position t. A block is the last committed token, whose features nobody has yet, and K - 1 times the mask token. It sees
the whole context and, in layers that are not causal, all of itself. What it says of its places are independent
marginals; a Markov head makes each depend on the token before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core import cache as kv_cache
from mars_jax.core.errors import MarsError
from mars_jax.core.mesh import hold_heads, hold_whole
from mars_jax.core.types import ForwardOutput, KVCache, LanguageModel, Params, PyTree, Visible
from mars_jax.models import draft_vocabulary
from mars_jax.models.attention import Attend, attending
from mars_jax.models.config import ModelConfig
from mars_jax.models.layers import dense, embed, gated_mlp, rms_norm
from mars_jax.models.rope import angles, rotate
from mars_jax.models.transformer import attention
from mars_jax.models.weights import Weight, build_rows
from mars_jax.models.weights import weights as layer_weights

LONGEST_BLOCK = 129
"""Tokens of a block: as many drafted ones as any drafter drafts at most, and the one before them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """Everything static about a block drafter.

    Raises:
      MarsError: the parts contradict each other.
    """

    layer: ModelConfig  # of the layers, whose number and windows it has; its vocab_size is the target's, V
    target_hidden_size: int  # F
    feature_layers: tuple[int, ...]  # of the target, by their outputs
    block_size: int  # K
    mask_token: int
    draft_vocab_size: int  # W
    from_anchor: bool = (
        False  # place i says the token after its own (DSpark, DeepSeek), and not its own (z-lab)
    )
    causal: tuple[bool, ...] = ()  # one per layer: its places see no later ones of the block; (): none is
    own_embed: bool = False  # else the target's embedding, by reference
    own_unembed: bool = False  # else the target's unembedding, by reference
    markov_rank: int = 0  # R; 0: no Markov head
    confidence: bool = False  # a head that says how likely each place is accepted
    confidence_bias: bool = False
    confidence_markov: bool = False  # it reads what the Markov head knows of the token before, as well

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
        if not (self.own_embed and self.own_unembed) and c.hidden_size != self.target_hidden_size:
            raise MarsError(
                f"the DFlash head is {c.hidden_size} wide and the target {self.target_hidden_size}: only a head with "
                "an embedding and an lm_head of its own may differ from its target."
            )
        if not self.own_unembed and self.draft_vocab_size != c.vocab_size:
            raise MarsError(
                f"the DFlash head drafts from {self.draft_vocab_size} of {c.vocab_size} tokens: then it needs an "
                "lm_head of its own."
            )
        if self.confidence_markov and not (self.confidence and self.markov_rank):
            raise MarsError(
                "confidence_markov is of heads with a confidence head and a Markov head: unset it."
            )

    @property
    def drafts(self) -> int:
        """D, the tokens that a block drafts."""
        return self.block_size - (not self.from_anchor)


def weights(config: DFlashConfig) -> tuple[Weight, ...]:
    """The table of a head's weights, named as in the published checkpoints; see `models.weights`."""
    c, e = config.layer, config.layer.hidden_size
    rows: list[Weight] = []
    if config.own_embed:
        rows.append(Weight(("embed",), "embed_tokens.weight", (c.vocab_size, e), "normal"))
    features = len(config.feature_layers) * config.target_hidden_size
    rows.append(Weight(("fc",), "fc.weight", (e, features), "normal"))
    rows.append(Weight(("hidden_norm",), "hidden_norm.weight", (e,), "ones"))
    rows += [
        row._replace(name=row.name.removeprefix("model."))
        for row in layer_weights(c)
        if row.path[0] == "layers"
    ]
    rows.append(Weight(("norm",), "norm.weight", (e,), "ones"))
    if config.own_unembed:
        rows.append(Weight(("unembed",), "lm_head.weight", (config.draft_vocab_size, e), "normal"))
    if r := config.markov_rank:
        rows.append(Weight(("markov_in",), "markov_head.markov_w1.weight", (c.vocab_size, r), "normal"))
        w2 = "markov_head.markov_w2.weight"
        rows.append(Weight(("markov_out",), w2, (config.draft_vocab_size, r), "normal"))
    if config.confidence:
        width = e + (config.markov_rank if config.confidence_markov else 0)
        rows.append(Weight(("confidence",), "confidence_head.proj.weight", (1, width), "normal"))
        if config.confidence_bias:
            rows.append(Weight(("confidence_bias",), "confidence_head.proj.bias", (1,), "zeros"))
    return tuple(rows)


def init_params(config: DFlashConfig, key: Array, dtype="float32", *, scale: float = 0.02) -> PyTree:
    """Random params, as `transformer.init_params`; a draft vocabulary smaller than V takes the first tokens."""
    table = weights(config)
    keys = dict(zip(table, jax.random.split(key, len(table)), strict=True))

    def make(row: Weight) -> Array:
        if row.init != "normal":
            return (jnp.zeros if row.init == "zeros" else jnp.ones)(row.shape, dtype)
        return (jax.random.normal(keys[row], row.shape, jnp.float32) * scale).astype(dtype)

    params = build_rows(table, make)
    if config.draft_vocab_size < config.layer.vocab_size:
        params["ids"] = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
    return params


def init_cache(config: DFlashConfig, batch: int, slots: int, dtype) -> KVCache:
    """An empty cache of the head."""
    c = config.layer
    return kv_cache.init_cache(
        layers=c.num_layers,
        batch=batch,
        slots=slots,
        kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        dtype=dtype,
    )


def check_target(config: DFlashConfig, target: LanguageModel) -> None:
    """Raise MarsError where the target lacks what a head shares with it."""
    if target.vocab_size != config.layer.vocab_size:
        raise MarsError(
            f"the DFlash head is for a vocabulary of {config.layer.vocab_size} tokens and the target has "
            f"{target.vocab_size}: use the head that was trained for this target."
        )
    if target.embed is None and not config.own_embed:
        raise MarsError("the DFlash head shares its target's embedding, and this target gives none: set "
                        "LanguageModel.embed.")  # fmt: skip


@jax.named_scope("fuse")
def fuse(config: DFlashConfig, head: PyTree, output: ForwardOutput) -> Array:
    """What the context is made of, [B, N, E], from the target's output at N tokens."""
    joined = hold_whole(jnp.concatenate(list(output.features), axis=-1)).astype(head["fc"].dtype)
    return rms_norm(dense(joined, head["fc"]), head["hidden_norm"], config.layer.norm_eps)


@jax.named_scope("context")
def absorb(
    config: DFlashConfig, head: PyTree, fused: Array, positions: Array, slot: Array, cache: KVCache
) -> KVCache:
    """Write the context of N tokens.

    Args:
      config, head: static, and its params.
      fused: [B, N, E]; from `fuse`.
      positions: i32[B, N]; of the tokens.
      slot: i32[B]; of the first of them.
      cache: of the head.
    """
    c = config.layer
    batch, n, _ = fused.shape
    shape = (batch, n, c.num_kv_heads, c.head_dim)
    cos, sin = angles(positions, c.rope, c.head_dim)
    ks, vs = [], []
    for i, layer in enumerate(head["layers"]):
        k = dense(fused, layer["k"], layer.get("k_bias")).reshape(shape)
        v = dense(fused, layer["v"], layer.get("v_bias")).reshape(shape)
        if c.qk_norm:
            k = rms_norm(k, layer["k_norm"], c.norm_eps)
        for made, old, new in ((ks, cache.k[i], rotate(k, cos, sin)), (vs, cache.v[i], v)):
            made.append(hold_heads(kv_cache.write(old, new, slot)))
    return KVCache(k=tuple(ks), v=tuple(vs))


def block(config: DFlashConfig, last: Array) -> Array:
    """The tokens i32[B, K] of a block after the last committed tokens i32[B, 1]."""
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
    """Run the head over the N places of blocks.

    Args:
      config, target: of the head, and the model it belongs to.
      params: of both; the head's are `params.draft`.
      tokens: i32[B, N]; from `block`.
      visible: of the places, `seen` as of a layer that is not causal; windows and causal layers take from it.
      cache: with the context.

    Returns:
      Hidden states after the last norm [B, N, E], and the cache with the rows of the places.
    """
    head, c = params.draft, config.layer
    with jax.named_scope("embed"):
        x = _embed(config, target, params, tokens).astype(head["fc"].dtype)
    rotation = angles(visible.positions, c.rope, c.head_dim)
    kinds = list(zip(c.windows, config.causal, strict=True))
    with jax.named_scope("mask"):
        attends = {kind: _attending(visible, cache.slots, *kind) for kind in dict.fromkeys(kinds)}
    ks, vs = [], []
    for i, layer in enumerate(head["layers"]):
        with jax.named_scope("attention"):
            normed = rms_norm(x, layer["attention_norm"], c.norm_eps)
            attend, old = attends[kinds[i]], (cache.k[i], cache.v[i])
            mixed, k, v = attention(c, layer, normed, rotation, attend, *old)
            x = x + mixed
        with jax.named_scope("mlp"):
            x = x + gated_mlp(layer, rms_norm(x, layer["mlp_norm"], c.norm_eps), c.activation)
            x = hold_whole(x)
        ks.append(k)
        vs.append(v)
    return rms_norm(x, head["norm"], c.norm_eps), KVCache(k=tuple(ks), v=tuple(vs))


def _attending(visible: Visible, slots: int, window: int | None, causal: bool) -> Attend:
    """Attention of a layer; a window also hides what is as far ahead (z-lab/dflash, `_attention_mask`)."""
    at = visible.positions[:, :, None]
    rows = visible.positions if visible.seen_positions is None else visible.seen_positions
    seen = visible.seen
    assert seen is not None  # the places of a block are no tokens in a row
    if causal:
        seen = seen & (rows[:, None, :] <= at)
    elif window is not None:
        seen = seen & (rows[:, None, :] < at + window)
    return attending("xla", dataclasses.replace(visible, seen=seen), slots, window)


def _embed(config: DFlashConfig, target: LanguageModel, params: Params, tokens: Array) -> Array:
    if config.own_embed:
        return embed(params.draft["embed"], tokens)
    assert target.embed is not None  # check_target
    return target.embed(params.target, tokens)


@jax.named_scope("unembed")
def unembed(config: DFlashConfig, target: LanguageModel, params: Params, hidden: Array) -> Array:
    """Logits f32[B, N, W] of hidden states [B, N, E], before what a Markov head adds."""
    if config.own_unembed:
        return dense(hidden, params.draft["unembed"], dtype=jnp.float32)
    return target.unembed(params.target, hidden)


@jax.named_scope("markov")
def markov(config: DFlashConfig, head: PyTree, before: Array) -> Array:
    """What the Markov head adds to logits after the tokens i32[B, N]: f32[B, N, W]."""
    known = embed(head["markov_in"], before).astype(head["fc"].dtype)
    return dense(known, head["markov_out"], dtype=jnp.float32)


@jax.named_scope("confidence")
def confidence(config: DFlashConfig, head: PyTree, hidden: Array, before: Array) -> Array:
    """Logits f32[B, N] of the chance that a place is accepted, from hidden states [B, N, E] and the tokens before."""
    read = hidden.astype(jnp.float32)
    if config.confidence_markov:
        read = jnp.concatenate([read, embed(head["markov_in"], before).astype(jnp.float32)], axis=-1)
    bias = head.get("confidence_bias")
    return dense(read, head["confidence"].astype(jnp.float32), bias)[..., 0]


def target_ids(config: DFlashConfig) -> Callable[[Params], Array] | None:
    """Gives the target's tokens i32[W] of the draft vocabulary; None where that is the target's."""
    return (lambda params: params.draft["ids"]) if config.draft_vocab_size < config.layer.vocab_size else None


def to_target(config: DFlashConfig, params: Params, ids: Array) -> Array:
    """Target tokens i32[...] of draft-vocabulary ids i32[...]."""
    return draft_vocabulary.to_target(_ids(config, params), ids)


def widen(config: DFlashConfig, params: Params, logits: Array) -> Array:
    """Logits f32[B, N, W] of the draft vocabulary over the target's, -inf where it has no token: f32[B, N, V]."""
    return draft_vocabulary.widen(_ids(config, params), config.layer.vocab_size, logits)


def _ids(config: DFlashConfig, params: Params) -> Array | None:
    return params.draft["ids"] if config.draft_vocab_size < config.layer.vocab_size else None
