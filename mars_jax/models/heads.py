"""Base classes of a target's heads: a common static interface, so that other code does not depend on the kind of head.

Each kind of head is a subclass of `HeadConfig` in a separate file. B batch, N tokens, E hidden size of the head, F that
of the target, V vocabulary, W draft vocabulary. Oracle: a loop over the tokens (tests/models/test_eagle.py).
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
    """Static configuration of a head for a target; subclasses are frozen dataclasses."""

    kind: ClassVar[str]  # the name of its drafter
    cached: ClassVar[bool] = False  # its factory accepts cache_dtype
    axes: ClassVar[Axes] = {}  # axes of weights that only heads have
    vocab_size: int  # V, the target's
    drafts: int | None = None  # block length, for heads that draft a whole block at once

    @classmethod
    def outline(cls, target: ModelConfig) -> Self:
        """Return a head of the published shape for a target."""
        raise NotImplementedError

    def weights(self) -> tuple[Weight, ...]:
        """Return the table of the weights, named as in the published checkpoints; see `models.weights`."""
        raise NotImplementedError

    def leaves(self) -> Mapping[Weight, tuple[Weight, ...]]:
        """Map each array of params to its rows of `weights`; see `models.weights.leaves`."""
        return {row: (row,) for row in self.weights()}

    def passes(self, depth: int) -> int:
        """Return how many times the weights are read to draft `depth` consecutive tokens."""
        return 1

    @property
    def read_once(self) -> tuple[str, ...]:
        """Weights that are read once per step, regardless of the number of passes."""
        return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayeredHead(HeadConfig):
    """A head of transformer layers, which shares its target's embeddings or has a draft vocabulary.

    Raises:
      MarsError: fields contradict each other.
    """

    title: ClassVar[str]  # name in error messages
    cached: ClassVar[bool] = True
    # `fc` reads replicated features and must return replicated ones. Shard it by its inputs: one sum joins the parts.
    axes: ClassVar[Axes] = {"fc": (None, "features")}
    layer: ModelConfig  # config of the head's layers; its vocab_size is the target's, V
    target_hidden_size: int  # F
    draft_vocab_size: int  # W
    feature_layers: tuple[int, ...] = ()  # layers of the target whose outputs the head reads
    own_embed: bool = False  # False: share the target's embedding
    own_unembed: bool = False  # False: share the target's unembedding

    def __post_init__(self):
        # A shared embedding or unembedding is as wide as the target.
        width, target_width = self.layer.hidden_size, self.target_hidden_size
        if width != target_width and not (self.own_embed and self.own_unembed):
            raise MarsError(
                f"the {self.title} is {width} wide and the target {target_width}: only a head with its own embedding "
                "and lm_head may differ from its target."
            )
        if not self.own_unembed and self.draft_vocab_size != self.layer.vocab_size:
            raise MarsError(
                f"the {self.title} drafts from {self.draft_vocab_size} of {self.layer.vocab_size} tokens: then it "
                "needs an lm_head of its own."
            )

    @property
    def vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def is_narrow(self) -> bool:
        """True if the draft vocabulary is smaller than the target's; then params have `ids` i32[W]."""
        return self.draft_vocab_size < self.vocab_size

    def init_cache(self, batch: int, slots: int, dtype: DTypeLike) -> KVCache:
        """Make an empty cache of the head."""
        c = self.layer
        return kv_cache.init_cache(c.num_layers, (batch, slots, c.num_kv_heads, c.head_dim), dtype)

    def check_target(self, target: LanguageModel) -> None:
        """Check that the head fits a target.

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
                f"the {self.title} shares its target's embedding, and this target gives none: set LanguageModel.embed."
            )
        if self.feature_layers and target.with_features is None:
            raise MarsError(
                f"the {self.title} reads the target's layers, which this target does not provide: set "
                "LanguageModel.with_features."
            )

    def embed(self, target: LanguageModel, params: Params, tokens: Array) -> Array:
        """Return the embeddings [B, N, E] of tokens i32[B, N]."""
        if self.own_embed:
            return layers.embed(params.draft["embed"], tokens)
        assert target.embed is not None  # check_target
        return target.embed(params.target, tokens)

    def unembed(self, target: LanguageModel, params: Params, hidden: Array) -> Array:
        """Return logits f32[B, N, W] of hidden states [B, N, E] after the last norm."""
        if self.own_unembed:
            return layers.dense(hidden, params.draft["unembed"], dtype=jnp.float32)
        return target.unembed(params.target, hidden)

    def to_target(self, params: Params, ids: Array) -> Array:
        """Return target tokens i32[...] of draft-vocabulary ids i32[...]."""
        if not self.is_narrow:
            return ids
        return jnp.take(params.draft["ids"], ids)

    def widen(self, params: Params, logits: Array) -> Array:
        """Widen logits f32[B, N, W] of the draft vocabulary to f32[B, N, V], with -inf for all other tokens."""
        if not self.is_narrow:
            return logits
        return widen(logits, params.draft["ids"], self.vocab_size)


class FeatureHead(LayeredHead):
    """A head that predicts the target's next feature from previous features: an EAGLE head or an MTP module.

    Entry t of a head, at position t, combines the target's feature of token t with the embedding of token t + 1. Its
    output predicts token t + 2, and replaces the feature of token t + 1 until the target has processed that token.
    """

    def fuse(self, head: PyTree, output: ForwardOutput) -> Array:
        """Return the input feature of the head, [B, N, E] or [B, N, F], from the target's output at N tokens."""
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
        """Run the head over N entries and write them to the cache, starting at slot `visible.slot`.

        Args:
          target: the target model.
          params: params of both; `params.draft` are the head's.
          feature: [B, N, E] (or F), from `fuse` or from an earlier call of this function.
          tokens: i32[B, N]; for entry t, token t + 1.
          visible, cache: as in `types.LanguageModel.forward`.
          needed: i32[B, P]; numbers of the entries whose features are returned; the last MLP skips the others.
            Default: all.

        Returns:
          The features of the next tokens [B, N or P, E], and the cache.
        """
        raise NotImplementedError

    def logits(self, target: LanguageModel, params: Params, feature: Array) -> Array:
        """Return logits f32[B, N, W] of the tokens after the next, from features [B, N, E]."""
        raise NotImplementedError

    def passes(self, depth: int) -> int:
        """Return `depth`: the last level is not extended, but the accepted path needs one more pass."""
        return depth


def widen(logits: Array, ids: Array, vocab: int) -> Array:
    """Widen logits f32[B, N, W] of tokens `ids` i32[W] to f32[B, N, V], V = `vocab`; drop negative ids."""
    axes = vocabulary_axes(vocab)

    # Every device receives all W logits and keeps those of its shard of V.
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
    """Return the config of a head's layers: Llama layers with the target's attention heads and positions."""
    rope = target.rope
    if rope.kind == "longrope" or rope.fraction != 1 or rope.interleaved or rope.query_growth:
        rope = Rope(theta=rope.theta)  # Llama's config.json cannot describe the target's
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
    """Make random params, like `transformer.init_params`. A draft vocabulary smaller than V holds the first tokens."""
    table = config.leaves()
    params = build_rows(table, random_rows(table, key, dtype, scale))
    if isinstance(config, LayeredHead) and config.is_narrow:
        params["ids"] = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
    return params
