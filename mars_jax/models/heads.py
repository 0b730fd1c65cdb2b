"""Base classes of draft heads, which are small models that read the hidden states of a target.

Each kind of head is a subclass of `HeadConfig` in a separate file, so other code does not depend on the kind of head.
Tested against a loop over the tokens (tests/models/test_eagle.py).

Dimensions: B batch, N tokens, E hidden size of the head, F hidden size of the target, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from mars_jax.core import cache as kv_cache
from mars_jax.core.axes import map_devices, vocabulary_axes
from mars_jax.core.types import ForwardOutput, KVCache, LanguageModel, Params, PyTree, Visible
from mars_jax.models import layers
from mars_jax.models.config import ModelConfig, Rope
from mars_jax.models.weights import Weight, build_rows, random_rows
from mars_jax.utils.errors import MarsError

Axes = Mapping[str, tuple[str | None, ...]]
"""Logical axes of weights, keyed by the last name in their paths; see `models.shardings`."""


class HeadConfig:
    """Static configuration of a draft head. Subclasses are frozen dataclasses."""

    kind: ClassVar[str]  # name of the drafter that uses the head
    cached: ClassVar[bool] = False  # the head has a cache, so its drafter factory accepts cache_dtype
    axes: ClassVar[Axes] = {}  # logical axes of weights that only exist in heads
    vocab_size: int  # V, the vocabulary size of the target
    drafts: int | None = None  # number of tokens per block, for heads that draft a whole block at once

    @classmethod
    def outline(cls, target: ModelConfig) -> Self:
        """Return a config for this target with the sizes that published heads have."""
        raise NotImplementedError

    def weights(self) -> tuple[Weight, ...]:
        """Return the table of the head's weights, with the names of published checkpoints; see `models.weights`."""
        raise NotImplementedError

    def leaves(self) -> Mapping[Weight, tuple[Weight, ...]]:
        """Map each array of params to its rows in `weights()`; see `models.weights.leaves`."""
        return {row: (row,) for row in self.weights()}

    def passes(self, depth: int) -> int:
        """Return how many times the head's weights are read to draft `depth` consecutive tokens."""
        return 1

    @property
    def read_once(self) -> tuple[str, ...]:
        """Names of weights that are read once per decoding step, regardless of the number of passes."""
        return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayeredHead(HeadConfig):
    """Configuration of a head that consists of transformer layers.

    Raises:
      MarsError: fields contradict each other.
    """

    title: ClassVar[str]  # name of this kind of head in error messages
    cached: ClassVar[bool] = True
    # `fc` reads and returns replicated activations. Shard its weight along the input axis, so that one all-reduce is
    # enough.
    axes: ClassVar[Axes] = {"fc": (None, "features")}
    layer: ModelConfig  # config of the head's layers; its vocab_size is V
    target_hidden_size: int  # F
    draft_vocab_size: int  # W
    feature_layers: tuple[int, ...] = ()  # indices of the target's layers whose outputs the head reads
    own_embed: bool = False  # the head has an embedding; False: it uses the target's
    own_unembed: bool = False  # the head has an unembedding; False: it uses the target's

    def __post_init__(self):
        # If the head uses the target's embedding or unembedding, its hidden size must equal the target's.
        width, target_width = self.layer.hidden_size, self.target_hidden_size
        if width != target_width and not (self.own_embed and self.own_unembed):
            raise MarsError(
                f"the {self.title} is {width} wide and the target {target_width}: only a head with its own embedding "
                "and lm_head may differ from its target."
            )
        if not self.own_unembed and self.draft_vocab_size != self.layer.vocab_size:
            raise MarsError(
                f"the {self.title} drafts from {self.draft_vocab_size} of {self.layer.vocab_size} tokens: such a head "
                "needs its own lm_head."
            )

    @property
    def vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def is_narrow(self) -> bool:
        """True if the draft vocabulary is smaller than the target's. The params then contain `ids` i32[W]."""
        return self.draft_vocab_size < self.vocab_size

    def init_cache(self, batch: int, slots: int, dtype: DTypeLike) -> KVCache:
        """Create an empty KV cache for the head's layers."""
        c = self.layer
        return kv_cache.init_cache(c.num_layers, (batch, slots, c.num_kv_heads, c.head_dim), dtype)

    def check_target(self, target: LanguageModel) -> None:
        """Check that the head can be used with a target.

        Raises:
          MarsError: the target has a different vocabulary size, has no embedding that the head can share, or does not
            expose the layers that the head reads.
        """
        if target.vocab_size != self.vocab_size:
            raise MarsError(
                f"the {self.title} is for a vocabulary of {self.vocab_size} tokens and the target has "
                f"{target.vocab_size}: use the head that was trained for this target."
            )
        if target.embed is None and not self.own_embed:
            raise MarsError(
                f"the {self.title} shares its target's embedding, and this target has none: set LanguageModel.embed."
            )
        if self.feature_layers and target.with_features is None:
            raise MarsError(
                f"the {self.title} reads the target's layers, which this target does not provide: set "
                "LanguageModel.with_features."
            )

    def embed(self, target: LanguageModel, params: Params, tokens: Array) -> Array:
        """Look up the embeddings [B, N, E] of tokens i32[B, N], in the head's or the target's table."""
        if self.own_embed:
            return layers.embed(params.draft["embed"], tokens)
        assert target.embed is not None  # guaranteed by `check_target`
        return target.embed(params.target, tokens)

    def unembed(self, target: LanguageModel, params: Params, hidden: Array) -> Array:
        """Compute the logits f32[B, N, W] of hidden states [B, N, E], which are the outputs of the last norm."""
        if self.own_unembed:
            return layers.dense(hidden, params.draft["unembed"], dtype=jnp.float32)
        return target.unembed(params.target, hidden)

    def to_target(self, params: Params, ids: Array) -> Array:
        """Convert ids i32[...] of the draft vocabulary to token ids of the target."""
        if not self.is_narrow:
            return ids
        return jnp.take(params.draft["ids"], ids)

    def widen(self, params: Params, logits: Array) -> Array:
        """Expand logits f32[B, N, W] of the draft vocabulary to f32[B, N, V]; all other tokens get -inf."""
        if not self.is_narrow:
            return logits
        return widen(logits, params.draft["ids"], self.vocab_size)


class FeatureHead(LayeredHead):
    """Configuration of a head that predicts the target's next feature: an EAGLE head or an MTP module.

    A feature is a hidden state of the target. Entry t of a head, at position t, combines the target's feature of token
    t with the embedding of token t + 1. The output of this entry predicts token t + 2. The output is also used as the
    feature of token t + 1 until the target has processed that token.
    """

    def fuse(self, head: PyTree, output: ForwardOutput) -> Array:
        """Compute the input features of the head, [B, N, E] or [B, N, F], from the target's output for N tokens."""
        raise NotImplementedError

    def forward(
        self,
        target: LanguageModel,
        params: Params,
        feature: Array,
        tokens: Array,
        visible: Visible,
        cache: KVCache,
        needed: Array | None = None,
    ) -> tuple[Array, KVCache]:
        """Run the head on N entries, and write their keys and values to the cache from slot `visible.slot` on.

        Args:
          target: the target model.
          params: params of the target and the head; the head's params are `params.draft`.
          feature: [B, N, E] or [B, N, F]; the result of `fuse`, or of an earlier call to this function.
          tokens: i32[B, N]; entry t gets token t + 1.
          visible, cache: as in `types.LanguageModel.forward`.
          needed: i32[B, P]; indices of the entries whose outputs are returned. The last MLP skips all other entries.
            Default: all entries.

        Returns:
          The features of the next tokens, [B, N, E] or [B, P, E], and the updated cache.
        """
        raise NotImplementedError

    def logits(self, target: LanguageModel, params: Params, feature: Array) -> Array:
        """Compute the logits f32[B, N, W] of token t + 2 from the output [B, N, E] of each entry t."""
        raise NotImplementedError

    def passes(self, depth: int) -> int:
        """Return `depth`: one pass for each token except the last, and one pass over the accepted path."""
        return depth


def widen(logits: Array, ids: Array, vocab: int) -> Array:
    """Expand logits f32[B, N, W] of a draft vocabulary to f32[B, N, V], with -inf for all other tokens.

    Args:
      logits: logits of the draft vocabulary.
      ids: i32[W]; token id of each logit. Logits with a negative id are dropped.
      vocab: V, the number of tokens in the vocabulary.
    """
    axes = vocabulary_axes(vocab)

    # Every device gets all W logits, and writes those that belong to its shard of V.
    def local(logits: Array, ids: Array) -> Array:
        size, first = vocab, 0
        if axes:
            size = vocab // lax.axis_size(axes)
            first = lax.axis_index(axes) * size
        place = ids - first
        place = jnp.where(place < 0, size, place)  # a negative index would count from the end
        empty = jnp.full((*logits.shape[:-1], size), -jnp.inf, logits.dtype)
        return empty.at[..., place].set(logits, mode="drop")

    if not axes:
        return local(logits, ids)
    return map_devices(local, (P(), P()), P(None, None, axes))(logits, ids)


def layers_like(target: ModelConfig, intermediate_size: int | None = None, **changes) -> ModelConfig:
    """Return a config for the layers of a head: Llama layers with the target's hidden size, heads and positions.

    Args:
      target: config of the target.
      intermediate_size: hidden units of the MLP; default: the target's.
      changes: other fields to set.
    """
    rope = target.rope
    if rope.kind == "longrope" or rope.fraction != 1 or rope.interleaved or rope.query_growth:
        rope = Rope(theta=rope.theta)  # Llama's config.json cannot describe the target's rotary embedding
    kv_heads, head_dim = target.num_kv_heads, target.head_dim
    if target.latent is not None:
        kv_heads, head_dim = target.num_heads, target.latent.plain + target.latent.rotary
    shared = "vocab_size hidden_size num_heads max_positions norm_eps activation bos_token_id eos_token_ids"
    fields = {name: getattr(target, name) for name in shared.split()} | {
        "num_layers": 1,
        "intermediate_size": intermediate_size or target.intermediate_size,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rope": rope,
    }
    return ModelConfig(**(fields | changes))


def init_params(
    config: HeadConfig, key: Array, dtype: DTypeLike = "float32", *, scale: float = 0.02
) -> PyTree:
    """Create random params for a head, as `transformer.init_params` does for a model.

    If the draft vocabulary is smaller than V, it consists of the tokens with the smallest ids.
    """
    table = config.leaves()
    params = build_rows(table, random_rows(table, key, dtype, scale))
    if isinstance(config, LayeredHead) and config.is_narrow:
        params["ids"] = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
    return params
