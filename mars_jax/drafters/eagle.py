"""A drafter that runs an EAGLE head on the target's features. It drafts chains, static trees and dynamic trees.

Sources: EAGLE 2401.15077, EAGLE-2 2406.16858, EAGLE-3 2503.01840. B batch, N nodes, D depth, T token buffer, E hidden
size. Tested against running the head over all committed tokens from an empty cache (tests/drafters/test_eagle.py).

Invariant: slots `[0, length - 1)` of the head's KV cache are valid and were all computed from the target's features.
`feature` is the head's output at the last of these slots; the first draft token is predicted from it. While drafting,
the head writes entries computed from its own features into later slots, which `update` overwrites.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax import hub
from mars_jax.core import struct
from mars_jax.core.drafter import DraftInput
from mars_jax.core.pick import pick
from mars_jax.core.tree import last_token, step_tokens
from mars_jax.core.types import DraftTree, ForwardOutput, KVCache, LanguageModel, Params, Verdict, Visible
from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.grow import Growth, Level, grow
from mars_jax.drafters.registry import register
from mars_jax.drafters.tree_shapes import ShapedDrafter
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.heads import FeatureHead, LayeredHead


@struct.dataclass(kw_only=True)
class FeatureState:
    """Draft state of a `FeatureDrafter`."""

    cache: KVCache
    feature: Array  # [B, 1, E]


@dataclasses.dataclass(frozen=True)
class HeadDrafter(ShapedDrafter):
    """Base class of drafters whose head reads the target's features."""

    config: LayeredHead  # configuration of the head
    target: LanguageModel  # the model whose features the head was trained on
    # Dtype of the head's keys and values.
    cache_dtype: str = dataclasses.field(default="float32", kw_only=True)

    @property
    def reads(self) -> tuple[int, ...]:
        return self.config.feature_layers

    @property
    def vocab_size(self) -> int:
        return self.config.layer.vocab_size


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(HeadDrafter):
    """A head that drafts from the target's features: an EAGLE head or an MTP module.

    The head's weights are `Params.draft`. The target's embedding, and its unembedding if the head has none, are taken
    from `Params.target`.

    Raises:
      MarsError: the head does not fit the target; see also `DraftModel`.
    """

    config: FeatureHead
    # Length of the chain; ignored if `tree` is set.
    num_draft_tokens: int = dataclasses.field(default=5, compare=False)

    resizes = True

    def __post_init__(self):
        self.config.check_target(self.target)
        self._set_shape(self.num_draft_tokens, self.config.draft_vocab_size)

    def init(self, params: Params, tokens: Array, length: Array) -> FeatureState:
        batch, buffer_length = tokens.shape
        slots = buffer_length + max(self.shape.rows, self.shape.depth + 1)
        # This is a placeholder: `observe` sets the feature before the first draft.
        feature = jnp.zeros((batch, 1, self.config.layer.hidden_size), params.draft["fc"].dtype)
        return FeatureState(cache=self.config.init_cache(batch, slots, self.cache_dtype), feature=feature)

    def _absorb(
        self,
        params: Params,
        state: FeatureState,
        output: ForwardOutput,
        following: Array,
        first: Array,
        last: Array,
    ) -> FeatureState:
        """Write the head's cache entries of n consecutive positions, starting at `first` i32[B].

        The entry at a position combines the target's feature there with the embedding of the next token, `following`
        i32[B, n]. If position `last` i32[B] is among them, the head's output there becomes the feature to draft from.
        """
        n = following.shape[1]
        # [B, n, E]: the head's input feature at each position. EAGLE-3 fuses it from several layers of the target.
        fused = self.config.fuse(params.draft, output)
        # If `last` is outside the window, the index i32[B, 1] is clamped, and the gathered value is discarded below.
        has_last = (last >= first) & (last < first + n)
        last_index = jnp.clip(last - first, 0, n - 1)[:, None]
        visible = Visible.causal(first, n)
        hidden, cache = self._forward(params, fused, following, visible, state.cache, last_index)
        feature = jnp.where(has_last[:, None, None], hidden.astype(state.feature.dtype), state.feature)
        return FeatureState(cache=cache, feature=feature)

    def _forward(
        self,
        params: Params,
        feature: Array,
        tokens: Array,
        visible: Visible,
        cache: KVCache,
        needed: Array | None = None,
    ) -> tuple[Array, KVCache]:
        return self.config.forward(self.target, params, feature, tokens, visible, cache, needed)

    def observe(
        self,
        params: Params,
        state: FeatureState,
        tokens: Array,
        first: Array,
        length: Array,
        output: ForwardOutput,
    ) -> FeatureState:
        n = output.hidden.shape[1]
        # The feature of token t is paired with the embedding of token t + 1. Therefore, the last valid entry is at
        # position length - 2, which is paired with the last committed token. The entry at the end of the buffer has no
        # next token, but no unfinished row reaches it.
        next_positions = first[:, None] + 1 + jnp.arange(n, dtype=jnp.int32)[None]
        next_tokens = pick(tokens, jnp.minimum(next_positions, tokens.shape[1] - 1))
        return self._absorb(params, state, output, next_tokens, first, length - 2)

    def propose(
        self, params: Params, state: FeatureState, inputs: DraftInput
    ) -> tuple[DraftTree, FeatureState]:
        config = self.config

        def unembed(hidden: Array) -> Array:
            return config.logits(self.target, params, hidden)

        def extend(carry: tuple[KVCache, Array], level: Level) -> tuple[Array, tuple[KVCache, Array]]:
            cache, parent_hidden = carry
            # [B, W, E]: the input feature of each node is the head's own output at the node's parent.
            parent_features = pick(parent_hidden, level.parents)
            hidden, cache = self._forward(params, parent_features, level.tokens, level.visible, cache)
            hidden = hidden.astype(state.feature.dtype)
            return unembed(hidden), (cache, hidden)

        growth = Growth(
            logits=unembed(state.feature),
            # All nodes of the first level have the same input feature.
            carry=(state.cache, jnp.repeat(state.feature, self.shape.top_k, axis=1)),
            extend=extend,
            first=inputs.length - 1,
            to_target=lambda ids: config.to_target(params, ids),
            widen=lambda logits: config.widen(params, logits),
        )
        tree, _, (cache, _) = grow(
            self.shape, self.sample, growth, last_token(inputs), inputs.keys, inputs.controls, inputs.guide
        )
        return tree, FeatureState(cache=cache, feature=state.feature)

    def update(
        self,
        params: Params,
        state: FeatureState,
        tree: DraftTree,
        verdict: Verdict,
        output: ForwardOutput,
        length: Array,
    ) -> FeatureState:
        path_outputs = jax.tree.map(lambda x: pick(x, verdict.path), (output.hidden, output.features))
        output = ForwardOutput(hidden=path_outputs[0], features=path_outputs[1], cache=output.cache)
        # Recompute D + 1 entries, starting at the root's position, from the target's features at the root and along the
        # accepted path. They replace the entries that the head computed from its own features. The last committed entry
        # is at `length - 1 + num_accepted`.
        root_slot = length - 1
        return self._absorb(
            params, state, output, step_tokens(tree, verdict), root_slot, root_slot + verdict.num_accepted
        )


@dataclasses.dataclass(frozen=True)
class Eagle(FeatureDrafter):
    """An EAGLE, EAGLE-2 or EAGLE-3 head of the target.

    For its weights and errors, see `FeatureDrafter`.

    >>> from mars_jax.models import ModelConfig, language_model
    >>> layer = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    >>> config = EagleConfig(version=1, layer=layer, target_hidden_size=16, draft_vocab_size=32, own_unembed=False)
    >>> eagle(config, language_model(layer), tree=(2, 2)).num_nodes
    7
    """

    config: EagleConfig  # configuration of the head

    @property
    def kind(self) -> str:
        return f"eagle{self.config.version}"


eagle = Eagle


def load_eagle_drafter(arguments: Asked) -> LoadedDrafter:
    """Load an `eagle` drafter from the checkpoint of its head.

    Raises:
      MarsError: see `hub.load_eagle`.
    """
    target = arguments.target
    config, params = hub.load_eagle(
        arguments.path,
        target.config,
        target.params,
        dtype=arguments.heads_dtype,
        head_embed=arguments.head_embed,
    )
    # On a CPU, use float32, as in `hub.load`, because XLA's CPU backend would convert a bfloat16 cache to float32 in
    # every step.
    cache_dtype = "float32" if jax.default_backend() == "cpu" else str(params["fc"].dtype)

    drafter = eagle(config, target.model, arguments.chain, **arguments.shape, cache_dtype=cache_dtype)
    params = arguments.placed(params, config)
    max_positions = config.layer.max_positions
    return LoadedDrafter(drafter, params, draft_ids=params.get("ids"), max_positions=max_positions)


register(
    "eagle",
    Eagle,
    load_eagle_drafter,
    path="PATH",
    head=True,
    grows=True,
    embeds=True,
    learns=True,
    outlined=("eagle3", EagleConfig),
    paper="2401.15077, 2406.16858, 2503.01840",
)
