"""A drafter that applies Medusa heads to one hidden state of the target. It drafts chains or static trees.

Source: Medusa 2401.10774. B batch, K heads in use, N nodes, T token buffer, E hidden size, V vocabulary. Tested against
a numpy version of the heads, applied to the target's output from an empty cache (tests/contrib/test_medusa.py).

Invariant: the draft state is the target's hidden state [B, 1, E] at position `length - 2`, the last one that the target
has processed, or zeros for a one-token prompt. From it, the heads predict the tokens at positions `length`, `length +
1` and so on. The predictions are independent of each other, so all nodes at one depth have the same children.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from mars_jax.contrib.drafters import medusa_files
from mars_jax.contrib.models import medusa_layers as heads
from mars_jax.contrib.models.medusa_layers import MedusaConfig
from mars_jax.core.pick import pick
from mars_jax.core.sampling import argmax, process, sample_processed, top_k_logits
from mars_jax.core.tree import static_topology
from mars_jax.core.types import NO_TOKEN, DraftTree, ForwardOutput, LanguageModel, Params, Verdict
from mars_jax.drafters import DraftInput, Dynamic, LoadedDrafter, chain, last_token, register
from mars_jax.drafters.asked import Asked
from mars_jax.drafters.grow import Growth, Level, grow, stops_at
from mars_jax.drafters.tree_shapes import ShapedDrafter, Static
from mars_jax.utils.errors import MarsError


@dataclasses.dataclass(frozen=True)
class Medusa(ShapedDrafter):
    """The Medusa heads of a target, each of which predicts the token at one depth.

    The heads' weights are `Params.draft`. In a greedy tree, the children of every node are the most probable tokens of
    the head for the next depth. In a sampled draft, the true q of a path is the product of the probabilities that the
    heads assign to its tokens.

    Raises:
      MarsError: the heads have a different vocabulary than the target, the draft is deeper than the number of heads, or
        the tree is dynamic.

    >>> from mars_jax.core.fake import hash_model
    >>> config = MedusaConfig(num_heads=5, num_layers=1, hidden_size=8, vocab_size=11)
    >>> medusa(config, hash_model(vocab_size=11)).max_depth
    5
    """

    config: MedusaConfig  # configuration of the heads
    target: LanguageModel  # the model that the heads were trained for
    # Length of the chain; None: use all heads. Ignored if `tree` is set.
    num_draft_tokens: int | None = dataclasses.field(default=None, compare=False)

    reads = ()

    def __post_init__(self):
        num_heads = self.config.num_heads
        length = num_heads if self.num_draft_tokens is None else self.num_draft_tokens
        if self.config.vocab_size != self.target.vocab_size:
            raise MarsError(
                f"the Medusa heads are for a vocabulary of {self.config.vocab_size} tokens and the target has "
                f"{self.target.vocab_size}: use the heads that were trained for this target."
            )
        if isinstance(self.tree, Dynamic):
            raise MarsError(
                "Medusa heads draft no dynamic tree: give the children per node at each depth, such as (4, 2, 2, 1)."
            )
        self._set_shape(length, self.config.vocab_size)
        if self.shape.depth > num_heads:
            raise MarsError(
                f"a draft of {self.shape.depth} tokens in a row needs as many Medusa heads, and there are "
                f"{num_heads}: draft fewer."
            )

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def init(self, params: Params, tokens: Array, length: Array) -> Array:
        dtype = params.draft["heads"][0]["unembed"].dtype
        return jnp.zeros((tokens.shape[0], 1, self.config.hidden_size), dtype)

    def observe(
        self, params: Params, state: Array, tokens: Array, first: Array, length: Array, output: ForwardOutput
    ) -> Array:
        n = output.hidden.shape[1]
        # The index of position length - 2 within this chunk.
        chunk_index = length - 2 - first
        last_hidden = pick(output.hidden, jnp.clip(chunk_index, 0, n - 1)[:, None])
        in_chunk = (chunk_index >= 0) & (chunk_index < n)
        return jnp.where(in_chunk[:, None, None], last_hidden.astype(state.dtype), state)

    def propose(self, params: Params, state: Array, inputs: DraftInput) -> tuple[DraftTree, Array]:
        root = last_token(inputs)
        logits = heads.logits(params.draft, state, self.shape.depth)
        # Under a constraint or in a sampled tree, the nodes at one depth have different children, so grow the draft
        # level by level.
        if inputs.guide is not None or (self.sample and not self.is_chain):
            return self._grow(root, inputs, logits), state
        # End the draft at the first head whose entropy is too high.
        alive = jnp.cumprod((~stops_at(logits, inputs.controls)).astype(jnp.int32), axis=1) > 0
        if self.is_chain:
            ids, draft_logits = argmax(logits), None
            if self.sample:
                q_logits = process(logits, inputs.controls)
                head_index = jnp.broadcast_to(jnp.arange(self.shape.depth, dtype=jnp.int32), ids.shape)
                ids = sample_processed(inputs.keys, head_index, q_logits)
                # The last node has no children, so its row is never read.
                draft_logits = jnp.pad(q_logits, ((0, 0), (0, 1), (0, 0)))
            tokens = jnp.concatenate([root, jnp.where(alive, ids, NO_TOKEN)], axis=1)
            return chain(tokens, draft_logits), state
        assert isinstance(self.shape, Static)
        levels = [root]
        for depth, width in enumerate(self.shape.branching):
            ids = jnp.tile(top_k_logits(logits[:, depth], width).ids, (1, levels[-1].shape[1]))
            levels.append(jnp.where(alive[:, depth, None], ids, NO_TOKEN))
        tokens = jnp.concatenate(levels, axis=1)
        parents, depths = static_topology(self.shape.branching)
        tree = DraftTree(
            tokens=tokens,
            parents=jnp.broadcast_to(jnp.asarray(parents), tokens.shape),
            depths=jnp.broadcast_to(jnp.asarray(depths), tokens.shape),
            max_depth=self.shape.depth,
            is_chain=False,
        )
        return tree, state

    def _grow(self, root: Array, inputs: DraftInput, logits: Array) -> DraftTree:
        """Grow a draft level by level from the logits f32[B, D, V] of the heads."""

        def extend(carry: None, level: Level) -> tuple[Array, None]:
            # Nodes of depth d are at position `Growth.first + d - 1`, and head d predicts their children.
            depth = level.visible.positions[0, 0] - inputs.length[0] + 1
            head_logits = lax.dynamic_slice_in_dim(logits, depth, 1, axis=1)
            return jnp.repeat(head_logits, level.tokens.shape[1], axis=1), carry

        growth = Growth(logits[:, :1], None, extend, first=inputs.length)
        tree, _, _ = grow(self.shape, self.sample, growth, root, inputs.keys, inputs.controls, inputs.guide)
        return tree

    def update(
        self,
        params: Params,
        state: Array,
        tree: DraftTree,
        verdict: Verdict,
        output: ForwardOutput,
        length: Array,
    ) -> Array:
        return pick(output.hidden, verdict.path[:, -1:]).astype(state.dtype)


medusa = Medusa


def load_medusa_drafter(asked: Asked) -> LoadedDrafter:
    """Load a `medusa` drafter from the checkpoint of its heads.

    Raises:
      MarsError: see `medusa_files.load_medusa`.
    """
    target = asked.target
    config, params = medusa_files.load_medusa(asked.path, target.config, dtype=asked.heads_dtype)
    drafter = medusa(config, target.model, asked.length, **asked.shape)
    return LoadedDrafter(drafter, asked.placed(params, config))


register(
    "medusa",
    Medusa,
    load_medusa_drafter,
    path="PATH",
    head=True,
    static=True,
    outlined=("medusa", MedusaConfig),
    paper="2401.10774",
)
