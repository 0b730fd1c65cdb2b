"""A block drafter, which drafts a whole chain or tree with one forward pass over the target's features.

Sources: DFlash 2602.06036; DDTree 2604.12989 (trees from its marginals); DSpark (deepseek-ai/DeepSpec). B batch, N
nodes, D depth, T token buffer, V vocabulary, W draft vocabulary. Tested against running the head over all committed
tokens from an empty cache (tests/contrib/test_dflash.py).

Invariant: slots `[0, length - 1)` of the head's cache contain the context, which is computed from the target's features
at these tokens. A block is written after the context, starting at the slot of the last committed token. `update`
overwrites the block with context entries.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mars_jax.contrib.drafters import dflash_files
from mars_jax.contrib.drafters.best_first import best_first
from mars_jax.contrib.models import dflash_head as head
from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.core.pick import pick
from mars_jax.core.sampling import argmax, process, sample_processed
from mars_jax.core.types import (
    NO_TOKEN,
    Controls,
    DraftTree,
    ForwardOutput,
    KVCache,
    Params,
    Verdict,
    Visible,
)
from mars_jax.drafters import DraftInput, Dynamic, LoadedDrafter, chain, last_token, register
from mars_jax.drafters.asked import Asked
from mars_jax.drafters.eagle import HeadDrafter
from mars_jax.drafters.grow import Growth, Level, grow, stops_at
from mars_jax.utils.errors import MarsError


class _Block(NamedTuple):
    """The inputs and outputs of a forward pass over a block."""

    params: Params
    inputs: DraftInput
    root: Array  # i32[B, 1]; last committed token
    hidden: Array  # [B, D, E]; the head's hidden state at each depth
    marginals: Array  # f32[B, D, W]; logits at each depth, before the correction of a Markov head


@dataclasses.dataclass(frozen=True)
class DFlash(HeadDrafter):
    """A DFlash or DSpark head of the target, which drafts a block in one forward pass.

    The head's weights are `Params.draft`. If the head has no embedding or unembedding, the target's is used. A dynamic
    tree consists of the most probable nodes (DDTree). With a Markov head, tokens depend on their ancestors, so the tree
    is grown level by level, as in EAGLE-2. A draft ends at the first depth where the square root of the entropy exceeds
    `Controls.draft_stop`. With a confidence head, it ends where one minus the confidence exceeds `draft_stop`.

    Raises:
      MarsError: the head does not fit the target, or the draft is longer than a block; see also `DraftModel`.

    >>> from mars_jax.models import ModelConfig, language_model
    >>> layer = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)
    >>> config = DFlashConfig(layer=layer, target_hidden_size=16, feature_layers=(0, 1), block_size=8, mask_token=0,
    ...                       draft_vocab_size=32)
    >>> dflash(config, language_model(layer)).max_depth
    7
    """

    config: DFlashConfig
    # Length of the chain; None: all tokens of a block. Ignored if `tree` is set.
    num_draft_tokens: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        config = self.config
        config.check_target(self.target)
        length = config.drafts if self.num_draft_tokens is None else self.num_draft_tokens
        self._set_shape(length, config.draft_vocab_size)
        if self.shape.depth > config.drafts:
            raise MarsError(
                f"a draft of {self.shape.depth} tokens in a row is longer than this head's block, which drafts "
                f"{config.drafts}: draft fewer, or give the tree less depth."
            )

    @property
    def kind(self) -> str:
        return "dspark" if self.config.markov_rank else "dflash"

    def init(self, params: Params, tokens: Array, length: Array) -> KVCache:
        batch, buffer_length = tokens.shape
        slots = buffer_length + max(self.config.block_size, self.shape.depth + 1)
        return self.config.init_cache(batch, slots, self.cache_dtype)

    def observe(
        self,
        params: Params,
        state: KVCache,
        tokens: Array,
        first: Array,
        length: Array,
        output: ForwardOutput,
    ) -> KVCache:
        return self._absorb(params, state, output, first)

    def propose(self, params: Params, state: KVCache, inputs: DraftInput) -> tuple[DraftTree, KVCache]:
        config, size = self.config, self.config.block_size
        root, first = last_token(inputs), inputs.length - 1
        positions = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        visible = Visible(first=first, positions=positions, slot=first, seen=jnp.ones((1, size, size), bool))
        block_tokens = head.block(config, root)
        with jax.named_scope("block"):
            hidden, cache = head.forward(config, self.target, params, block_tokens, visible, state)
        # If each position predicts its own token, drop the first position, which predicts the committed token.
        num_skipped = size - config.drafts
        hidden = hidden[:, num_skipped : num_skipped + self.shape.depth]
        marginals = head.unembed(config, self.target, params, hidden)
        block = _Block(params=params, inputs=inputs, root=root, hidden=hidden, marginals=marginals)
        if self.is_chain and not config.markov_rank:
            tree = self._draft_chain(block)
        elif isinstance(self.shape, Dynamic) and not (self.sample or config.markov_rank):
            tree = best_first(self.shape, root, marginals, self._alive(block))
            ids = config.to_target(params, jnp.maximum(tree.tokens[:, 1:], 0))
            ids = jnp.where(tree.tokens[:, 1:] == NO_TOKEN, NO_TOKEN, ids)
            tree = dataclasses.replace(tree, tokens=jnp.concatenate([root, ids], axis=1))
        else:
            tree = self._grow(block)
        return tree, cache

    def update(
        self,
        params: Params,
        state: KVCache,
        tree: DraftTree,
        verdict: Verdict,
        output: ForwardOutput,
        length: Array,
    ) -> KVCache:
        features = tuple(pick(x, verdict.path) for x in output.features)
        return self._absorb(params, state, output._replace(features=features), length - 1)

    def _absorb(self, params: Params, state: KVCache, output: ForwardOutput, first: Array) -> KVCache:
        """Write the context entries of consecutive tokens, starting at position `first` i32[B]."""
        fused_features = head.fuse(self.config, params.draft, output)
        positions = first[:, None] + jnp.arange(fused_features.shape[1], dtype=jnp.int32)[None]
        return head.absorb(self.config, params.draft, fused_features, positions, first, state)

    def _alive(self, block: _Block) -> Array:
        """Return bool[B, D], True at the depths to draft, for a head that predicts positions independently."""
        controls = block.inputs.controls
        if self.config.confidence:
            is_end = self._doubt(block, block.hidden, block.root) > controls.draft_stop[:, None]
        else:
            is_end = stops_at(block.marginals, controls)
        return jnp.cumprod((~is_end).astype(jnp.int32), axis=1) > 0

    def _doubt(self, block: _Block, hidden: Array, parents: Array) -> Array:
        """Return f32[B, N], the predicted probability that the tokens after `parents` i32[B, N] will be rejected."""
        return jax.nn.sigmoid(-head.confidence(self.config, block.params.draft, hidden, parents))

    def _draft_chain(self, block: _Block) -> DraftTree:
        """Draft each position independently: its most probable token, or a token sampled from its marginal."""
        config, params = self.config, block.params
        if self.sample:
            q_logits = process(config.widen(params, block.marginals), block.inputs.controls)
            depths = jnp.broadcast_to(jnp.arange(q_logits.shape[1], dtype=jnp.int32), q_logits.shape[:2])
            ids = sample_processed(block.inputs.keys, depths, q_logits)
            # The last node has no children, so its row is never read.
            q = jnp.pad(q_logits, ((0, 0), (0, 1), (0, 0)))
        else:
            ids, q = config.to_target(params, argmax(block.marginals)), None
        ids = jnp.where(self._alive(block), ids, NO_TOKEN)
        return chain(jnp.concatenate([block.root, ids], axis=1), q)

    def _grow(self, block: _Block) -> DraftTree:
        """Grow a draft level by level from the marginals at each depth and, with a Markov head, the parent's token."""
        config, params, inputs = self.config, block.params, block.inputs
        root_position = inputs.length - 1

        def broadcast_level(depth: Array | int, values: Array, parent_tokens: Array) -> Array:
            """Return the entries of values [B, D, ...] at one depth, repeated for each of `parent_tokens` i32[B, W]."""
            level_values = lax.dynamic_slice_in_dim(values, depth, 1, axis=1)
            return jnp.broadcast_to(level_values, (*parent_tokens.shape, *values.shape[2:]))

        def logits_and_doubt(depth: Array | int, parent_tokens: Array) -> tuple[Array, Array]:
            logits = broadcast_level(depth, block.marginals, parent_tokens)
            if config.markov_rank:
                logits = logits + head.markov(params.draft, parent_tokens)
            if not config.confidence:
                return logits, jnp.zeros(parent_tokens.shape, jnp.float32)
            hidden = broadcast_level(depth, block.hidden, parent_tokens)
            return logits, self._doubt(block, hidden, parent_tokens)

        def extend(carry: Array, level: Level) -> tuple[Array, Array]:
            # Nodes at depth d are at position `Growth.first + d - 1`.
            return logits_and_doubt(level.visible.positions[0, 0] - root_position[0] + 1, level.tokens)

        def stops(logits: Array, doubt: Array, controls: Controls) -> Array:
            return doubt[:, : logits.shape[1]] > controls.draft_stop[:, None]

        logits, doubt = logits_and_doubt(0, block.root)
        growth = Growth(
            logits=logits,
            carry=jnp.repeat(doubt, self.shape.top_k, axis=1),
            extend=extend,
            first=root_position,
            to_target=lambda ids: config.to_target(params, ids),
            widen=lambda logits: config.widen(params, logits),
            stops=stops if config.confidence else None,
        )
        tree, _, _ = grow(
            self.shape, self.sample, growth, block.root, inputs.keys, inputs.controls, inputs.guide
        )
        return tree


dflash = DFlash


def load_dflash_drafter(asked: Asked) -> LoadedDrafter:
    """Load a `dflash` drafter from the checkpoint of its head.

    Raises:
      MarsError: see `contrib.load_dflash`.
    """
    target = asked.target
    config, params = dflash_files.load_dflash(
        asked.path, target.config, target.params, dtype=asked.heads_dtype, head_embed=asked.head_embed
    )
    # On a CPU, use float32, as `hub.load` does, because XLA's CPU backend would convert a bfloat16 cache to float32 in
    # every step.
    cache_dtype = "float32" if jax.default_backend() == "cpu" else params["fc"].dtype.name
    tree = asked.tree
    recurrent = target.model.for_chains is not None
    if tree is None and asked.length is None and not (asked.sample or recurrent):
        tree = Dynamic(depth=config.drafts)
    drafter = dflash(
        config, target.model, asked.length, tree=tree, sample=asked.sample, cache_dtype=cache_dtype
    )
    params = asked.placed(params, config)
    max_positions = config.layer.max_positions
    return LoadedDrafter(drafter, params, draft_ids=params.get("ids"), max_positions=max_positions)


register(
    "dflash",
    DFlash,
    load_dflash_drafter,
    path="PATH",
    head=True,
    block=True,
    embeds=True,
    outlined=("dflash", DFlashConfig),
    paper="2602.06036; trees: 2604.12989",
)
