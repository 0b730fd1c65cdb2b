"""Medusa heads that draft a chain, greedy or sampled, or a static tree, from one hidden state of the target.

Source: Medusa 2401.10774. B batch, K heads in use, N nodes, T token buffer, E hidden size, V vocabulary.
Oracle: the heads in numpy over a forward of the target from an empty cache (tests/contrib/test_medusa.py).

Invariant: the state is the target's hidden state [B, 1, E] at position `length - 2`, the last position that the target
has read, or zeros for a one-token prompt. From this state the heads predict positions `length`, `length + 1` and so on,
independently of each other, so all nodes of one depth have the same children.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.contrib.drafters import medusa_files
from mars_jax.contrib.models import medusa_layers as heads
from mars_jax.contrib.models.medusa_layers import MedusaConfig
from mars_jax.core.pick import pick
from mars_jax.core.sampling import argmax, process, sample_processed, top_k_logits
from mars_jax.core.tree import static_topology
from mars_jax.core.types import NO_TOKEN, DraftTree, ForwardOutput, LanguageModel, Params, Verdict
from mars_jax.drafters import DraftInput, Dynamic, LoadedDrafter, chain, last_token, register
from mars_jax.drafters.asked import Asked
from mars_jax.drafters.draw import draw_siblings, with_leaves
from mars_jax.drafters.grow import Growth, stops_at
from mars_jax.drafters.steering import Steering
from mars_jax.drafters.tree_shapes import ShapedDrafter, Static
from mars_jax.utils.errors import MarsError


@dataclasses.dataclass(frozen=True)
class Medusa(ShapedDrafter):
    """Medusa heads of the target.

    Their weights are `Params.draft`. In a tree, the children of every node are the likeliest tokens of the head for the
    next depth. In a sampled draft the true q of a path is the product of its heads' probabilities.

    Raises:
      MarsError: the heads are for a different vocabulary, the draft is deeper than the number of heads, or the tree is
        dynamic.

    >>> from mars_jax.core.fake import hash_model
    >>> config = MedusaConfig(num_heads=5, num_layers=1, hidden_size=8, vocab_size=11)
    >>> medusa(config, hash_model(vocab_size=11)).max_depth
    5
    """

    config: MedusaConfig  # configuration of the heads
    target: LanguageModel  # the model that the heads were trained for
    # Length of the chain; None: use all heads. Ignored if there is a tree.
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
        # Position length - 2 as an index into this chunk.
        chunk_index = length - 2 - first
        last_hidden = pick(output.hidden, jnp.clip(chunk_index, 0, n - 1)[:, None])
        in_chunk = (chunk_index >= 0) & (chunk_index < n)
        return jnp.where(in_chunk[:, None, None], last_hidden.astype(state.dtype), state)

    def propose(self, params: Params, state: Array, inputs: DraftInput) -> tuple[DraftTree, Array]:
        root = last_token(inputs)
        logits = heads.logits(params.draft, state, self.shape.depth)
        growth = Growth(logits, None, lambda *_: (logits, None), inputs.length)
        steering = Steering(growth, self.sample, inputs.guide)
        # The draft ends at the first head whose entropy is too high.
        alive = jnp.cumprod((~stops_at(logits, inputs.controls)).astype(jnp.int32), axis=1) > 0
        if not self.is_chain:
            return self._draft_tree(root, inputs, logits, alive, steering), state
        drafted_tokens, draft_logits = self._draft_chain(inputs, logits, steering)
        drafted_tokens = jnp.where(alive, drafted_tokens, NO_TOKEN)
        return chain(jnp.concatenate([root, drafted_tokens], axis=1), draft_logits), state

    def _draft_chain(
        self, inputs: DraftInput, logits: Array, steering: Steering
    ) -> tuple[Array, Array | None]:
        """Return the token of each head, i32[B, K], and the logits f32[B, N, V] that they were drawn from."""
        if steering.guide is not None:
            return self._steered_chain(inputs, logits, steering)
        if not self.sample:
            return argmax(logits), None
        q_logits = process(logits, inputs.controls)
        # The last node has no children, so its row is never read.
        head_id = jnp.broadcast_to(jnp.arange(self.shape.depth, dtype=jnp.int32), q_logits.shape[:2])
        return sample_processed(inputs.keys, head_id, q_logits), jnp.pad(q_logits, ((0, 0), (0, 1), (0, 0)))

    def _steered_chain(
        self, inputs: DraftInput, logits: Array, steering: Steering
    ) -> tuple[Array, Array | None]:
        """Draft like `_draft_chain` under a constraint: each token determines which tokens the next head may draft."""
        states, head_tokens, head_logits = steering.first, [], []
        for i in range(self.shape.depth):
            z = steering.logits(logits[:, i : i + 1], states)
            if self.sample:
                head_logits.append(process(z, inputs.controls))
                head_index = jnp.full(z.shape[:2], i, jnp.int32)
                head_tokens.append(sample_processed(inputs.keys, head_index, head_logits[-1]))
            else:
                head_tokens.append(steering.best(z, states))
            states = steering.moved(states, head_tokens[-1])
        drafted_tokens = jnp.concatenate(head_tokens, axis=1)
        if not self.sample:
            return drafted_tokens, None
        return drafted_tokens, jnp.pad(jnp.concatenate(head_logits, axis=1), ((0, 0), (0, 1), (0, 0)))

    def _draft_tree(
        self, root: Array, inputs: DraftInput, logits: Array, alive: Array, steering: Steering
    ) -> DraftTree:
        """Draft a static tree from logits f32[B, D, V], with padding at depths that are not `alive` bool[B, D]."""
        assert isinstance(self.shape, Static)
        level_tokens, level_logits, states = [root], [], steering.first
        for depth, width in enumerate(self.shape.branching):
            parent_tokens = level_tokens[-1]
            if self.sample:
                level_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(inputs.keys, depth)
                # The head's logits are the same for all nodes of a depth, but each node draws its own children.
                node_logits = jnp.repeat(logits[:, depth : depth + 1], parent_tokens.shape[1], axis=1)
                node_logits = steering.logits(node_logits, states)
                drawn = draw_siblings(node_logits, width, level_keys, inputs.controls)
                level_logits.append(drawn.logits)
                ids = jnp.where((parent_tokens != NO_TOKEN)[..., None], drawn.ids, NO_TOKEN)
                ids = ids.reshape(root.shape[0], -1)
            elif steering.guide is not None:
                node_logits = jnp.repeat(logits[:, depth : depth + 1], parent_tokens.shape[1], axis=1)
                node_logits = steering.logits(node_logits, states)
                ids = steering.tokens(top_k_logits(node_logits, width).ids, states)
                ids = jnp.where((parent_tokens != NO_TOKEN)[..., None], ids, NO_TOKEN)
                ids = ids.reshape(root.shape[0], -1)
            else:
                ids = jnp.tile(top_k_logits(logits[:, depth], width).ids, (1, parent_tokens.shape[1]))
            level_tokens.append(jnp.where(alive[:, depth, None], ids, NO_TOKEN))
            states = steering.moved(states, level_tokens[-1])
        tokens = jnp.concatenate(level_tokens, axis=1)
        parents, depths = static_topology(self.shape.branching)
        return DraftTree(
            tokens=tokens,
            parents=jnp.broadcast_to(jnp.asarray(parents), tokens.shape),
            depths=jnp.broadcast_to(jnp.asarray(depths), tokens.shape),
            draft_logits=with_leaves(level_logits, tokens.shape[1]) if self.sample else None,
            max_depth=self.shape.depth,
            is_chain=False,
        )

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
    """Load `medusa` from the heads' checkpoint.

    Raises:
      MarsError: as for `medusa_files.load_medusa`.
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
