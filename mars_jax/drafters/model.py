"""A drafter that runs a small language model. It drafts chains and static or dynamic trees, greedily or by sampling.

Source: Leviathan et al. 2211.17192 (sampled chain), SpecInfer 2305.09781 (static trees). B batch, N nodes, V
vocabulary. Tested against the same model, whose cache is rebuilt from scratch in every step
(tests/drafters/test_model.py).

Invariant: slots `[0, length - 2)` of the draft model's KV cache are valid. Leaves are drafted but never fed to the
model, so if a draft is fully accepted, its last token is missing from the cache. Each step therefore begins by feeding
the last two committed tokens.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from mars_jax import hub
from mars_jax.core import struct
from mars_jax.core.drafter import DraftInput
from mars_jax.core.given import check_draft_model
from mars_jax.core.pick import pick
from mars_jax.core.prefill import chunk_of, prefill
from mars_jax.core.tree import last_token
from mars_jax.core.types import DraftTree, ForwardOutput, LanguageModel, Params, PyTree, Verdict, Visible
from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.grow import Growth, Level, grow
from mars_jax.drafters.registry import register
from mars_jax.drafters.shared_tokens import shared_tokens, translated
from mars_jax.drafters.tree_shapes import ShapedDrafter
from mars_jax.models.heads import widen
from mars_jax.utils import hosts
from mars_jax.utils.errors import check_count, check_switch, check_type


@struct.dataclass(kw_only=True)
class ModelState:
    """Draft state of a `DraftModel`."""

    cache: PyTree  # KV cache of the draft model
    # i32[B, N]; cache row of each node of the last tree, as returned by `grow`; None for chains
    rows: Array | None


@dataclasses.dataclass(frozen=True)
class DraftModel(ShapedDrafter):
    """A small language model, preferably one with the target's tokenizer.

    The model's weights are `Params.draft`. If `sample` is set, drafting follows the request's temperature, top-k, top-p
    and min-p, and siblings of a tree are drawn without replacement. Rows at temperature 0 are drafted greedily.

    Raises:
      MarsError: K or a branching factor is below 1, or a node has more children than there are tokens.

    >>> from mars_jax.core.fake import hash_model
    >>> language_model(hash_model(vocab_size=11), tree=(4, 2, 2, 1)).num_nodes
    45
    """

    model: LanguageModel  # the small model
    # K, the length of the chain; ignored if `tree` is set.
    num_draft_tokens: int = dataclasses.field(default=5, compare=False)
    # The target's vocabulary size, to which draft logits are truncated or padded with -inf. It can differ from the
    # model's size, because checkpoints that share a tokenizer may pad their embeddings differently. Default: the
    # model's size.
    vocab_size: int | None = dataclasses.field(default=None, kw_only=True)
    # True if the model's tokenizer differs from the target's; `Params.draft` is then `shared_tokens.Shared`.
    own_tokens: bool = dataclasses.field(default=False, kw_only=True)

    resizes = True

    def __post_init__(self):
        check_type("the model", self.model, LanguageModel, "a LanguageModel")
        check_draft_model(self.model)
        check_switch("own_tokens", self.own_tokens)
        if self.vocab_size is not None:
            check_count("vocab_size", self.vocab_size)
        object.__setattr__(self, "vocab_size", self._vocab)
        self._set_shape(self.num_draft_tokens, min(self._vocab, self.model.vocab_size))

    @property
    def _vocab(self) -> int:
        return self.vocab_size or self.model.vocab_size

    @property
    def kind(self) -> str:
        return "model"

    @functools.cached_property
    def _model(self) -> LanguageModel:
        """The draft model as a function of target token ids."""
        return translated(self.model) if self.own_tokens else self.model

    def init(self, params: Params, tokens: Array, length: Array) -> ModelState:
        # Each draft begins by feeding two tokens. If the prompt has only one, the second needs a spare slot.
        cache = self.model.init_cache(tokens.shape[0], tokens.shape[1] + self.shape.rows + 2)
        cache = prefill(self._model, params.draft, tokens, jnp.zeros_like(length), length - 2, cache)[0]
        rows = None if self.is_chain else jnp.zeros((tokens.shape[0], self.num_nodes), jnp.int32)
        return ModelState(cache=cache, rows=rows)

    def _unembed(self, params: Params, hidden: Array) -> Array:
        logits = self._model.unembed(params.draft, hidden)
        # With a different tokenizer, keep the logits in the draft vocabulary: `grow` converts tokens and logits to the
        # target's vocabulary.
        padding = self._vocab - self.model.vocab_size
        if self.own_tokens or padding == 0:
            return logits
        # Models that share a tokenizer may pad their embeddings to different sizes. Truncate or pad the logits.
        if padding < 0:
            return logits[..., : self._vocab]
        return jnp.pad(logits, ((0, 0), (0, 0), (0, padding)), constant_values=-jnp.inf)

    def propose(self, params: Params, state: ModelState, inputs: DraftInput) -> tuple[DraftTree, ModelState]:
        def extend(carry: tuple[PyTree, Array | None], level: Level) -> tuple[Array, PyTree]:
            cache, hidden_rows = carry
            output = self._model.forward(params.draft, level.tokens, level.visible, cache)
            if hidden_rows is not None:
                # `hidden_rows` uses `grow`'s row numbers: the root has row 0, and the node in slot `length + r` has row
                # 1 + r.
                entries = 1 + level.visible.slot - inputs.length
                write = functools.partial(lax.dynamic_update_slice_in_dim, axis=0)
                hidden_rows = jax.vmap(write)(hidden_rows, output.hidden, entries)
            return self._unembed(params, output.hidden), (output.cache, hidden_rows)

        hidden, cache = feed_last(self._model, params.draft, state.cache, inputs.tokens, inputs.length)
        logits = self._unembed(params, hidden)
        # [B, 1 + N, E]: the hidden state of the root, followed by space for those of the extended nodes, in row order.
        hidden_rows = jnp.pad(hidden, ((0, 0), (0, self.num_nodes), (0, 0))) if inputs.hidden else None
        growth = Growth(logits=logits, carry=(cache, hidden_rows), extend=extend, first=inputs.length)
        if self.own_tokens:
            ids = params.draft.ids
            growth = growth._replace(
                to_target=lambda tokens: ids[tokens],
                widen=lambda logits: widen(logits, ids, self._vocab),
            )
        tree, rows, (cache, hidden_rows) = grow(
            self.shape, self.sample, growth, last_token(inputs), inputs.keys, inputs.controls, inputs.guide
        )
        if hidden_rows is not None:
            # Reorder the hidden states from row order to node order.
            tree = dataclasses.replace(tree, hidden=pick(hidden_rows, rows))
        return tree, ModelState(cache=cache, rows=state.rows if self.is_chain else rows)

    def catch_up(
        self, params: Params, state: ModelState, tokens: Array, cached: Array, length: Array
    ) -> ModelState:
        # Feed the tokens from index `cached` on, except the last two, which the next draft feeds.
        chunk = self.model.prefill_chunk or chunk_of()
        cache, _ = prefill(self._model, params.draft, tokens, cached, length - 2, state.cache, chunk=chunk)
        return dataclasses.replace(state, cache=cache)

    def update(
        self,
        params: Params,
        state: ModelState,
        tree: DraftTree,
        verdict: Verdict,
        output: ForwardOutput,
        length: Array,
    ) -> ModelState:
        # The keys and values of a chain are already in token order, so there is nothing to move.
        if state.rows is None:
            return state
        # i32[B, D + 1]. Row 1 is in slot `length` and the root, row 0, in slot `length - 1`, so `commit` can treat them
        # as the nodes of a tree rooted at `length - 1`.
        path_rows = pick(state.rows, verdict.path)
        return dataclasses.replace(state, cache=self.model.commit(state.cache, length - 1, path_rows))


language_model = DraftModel


def feed_last(
    model: LanguageModel, weights: PyTree, cache: PyTree, tokens: Array, length: Array
) -> tuple[Array, PyTree]:
    """Feed the last two committed tokens; return the hidden state [B, 1, E] of the last token, and the cache."""
    window_start = jnp.maximum(length - 2, 0)
    window_tokens = jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, 2))(tokens, window_start)
    output = model.forward(weights, window_tokens, Visible.causal(window_start, 2), cache)
    # i32[B, 1]: the last token is at index 1 of the window [length - 2, length), or at index 0 for a one-token prompt.
    return pick(output.hidden, (length - 1 - window_start)[:, None]), output.cache


def load_model(arguments: Asked) -> LoadedDrafter:
    """Load a `language_model` drafter from a checkpoint.

    If the model's tokenizer differs from the target's, the drafter proposes only tokens that are in both vocabularies.

    Raises:
      MarsError: see `hub.load` and `shared_tokens`.
    """
    target = arguments.target
    draft = hub.load(
        arguments.path, dtype=arguments.dtype, mesh=target.mesh, prefill_chunk=target.model.prefill_chunk
    )
    token_tables = shared_tokens(target, draft)
    params, draft_ids = draft.params, None
    if token_tables is not None:
        if target.mesh is not None:
            replicated_sharding = NamedSharding(target.mesh, PartitionSpec())
            token_tables = hosts.put(token_tables, jax.tree.map(lambda _: replicated_sharding, token_tables))
        params, draft_ids = token_tables._replace(weights=draft.params), token_tables.ids
    drafter = language_model(
        draft.model,
        arguments.chain,
        **arguments.shape,
        vocab_size=target.config.vocab_size,
        own_tokens=token_tables is not None,
    )
    return LoadedDrafter(drafter, params, draft_ids=draft_ids, max_positions=draft.config.max_positions)


register("model", DraftModel, load_model, path="PATH", learns=True, paper="2211.17192")
