"""A small language model as drafter of chains, static trees or dynamic trees, greedy or sampled.

Source: Leviathan et al. 2211.17192 (sampled chain), SpecInfer 2305.09781 (static trees). B batch, N nodes,
V vocabulary. Oracle: the same model run from an empty cache each round (tests/drafters/test_model.py).

Invariant: the draft cache is valid in slots `[0, length - 2)`. Leaves are drafted but never fed, so a fully accepted
draft leaves its last token uncached. Each step therefore begins by feeding the last two committed tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from mars_jax import hub
from mars_jax.core import struct
from mars_jax.core.drafter import STOPS, Drafter, DraftInput
from mars_jax.core.errors import check_count, check_switch, check_type
from mars_jax.core.pick import pick
from mars_jax.core.prefill import chunk_of, prefill
from mars_jax.core.tree import last_token
from mars_jax.core.types import DraftTree, LanguageModel, Params, PyTree, Visible
from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.grow import Growth, Level, grow
from mars_jax.drafters.shared_tokens import shared_tokens, translated
from mars_jax.drafters.tree_shapes import Dynamic, Shape, Static, describe, shape_of
from mars_jax.models.heads import widen
from mars_jax.placement import hosts


def language_model(
    model: LanguageModel,
    num_draft_tokens: int = 5,
    *,
    tree: Sequence[int] | Dynamic | None = None,
    sample: bool = False,
    vocab_size: int | None = None,
    own_tokens: bool = False,
) -> Drafter:
    """Draft with a language model; its weights are `Params.draft`.

    Args:
      model: the small model.
      num_draft_tokens: length K of the chain; ignored if `tree` is given.
      tree: children per node at each depth, such as `(4, 2, 2, 1)`, filled with the top-k tokens at every node; or
        `Dynamic(...)`, whose shape follows the model's confidence.
      sample: draw the draft from the model with the request's temperature, top-k, top-p and min-p, and pass the true
        q to the verifier, such as `verify.rejection`. Siblings of a tree are drawn without replacement. Rows at
        temperature 0 get the greedy draft.
      vocab_size: the target's vocabulary size, if checkpoints that share a tokenizer pad it differently. Draft logits
        are cut or padded with -inf to this size. Default: the model's own.
      own_tokens: the model's tokenizer differs from the target's, and `Params.draft` is `shared_tokens.Shared`.

    Raises:
      MarsError: K or a branching factor is below 1, or a node has more children than there are tokens.

    >>> from mars_jax.core.fake import hash_model
    >>> language_model(hash_model(vocab_size=11), tree=(4, 2, 2, 1)).num_nodes
    45
    """
    check_type("the model", model, LanguageModel, "a LanguageModel")
    for name, value in {"sample": sample, "own_tokens": own_tokens}.items():
        check_switch(name, value)
    if vocab_size is not None:
        check_count("vocab_size", vocab_size)
    shape = shape_of(num_draft_tokens, tree, min(vocab_size or model.vocab_size, model.vocab_size))
    model = translated(model) if own_tokens else model
    return _language_model(model, shape, sample, vocab_size or model.vocab_size, own_tokens)


def feed_last(
    model: LanguageModel, weights: PyTree, cache: PyTree, tokens: Array, length: Array
) -> tuple[Array, PyTree]:
    """Feed the last two committed tokens; return the hidden state [B, 1, E] of the last one, and the cache."""
    first = jnp.maximum(length - 2, 0)
    window = jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, 2))(tokens, first)
    output = model.forward(weights, window, Visible.causal(first, 2), cache)
    # i32[B, 1]: the last token is at index 1 of the window [length - 2, length), or 0 for a one-token prompt.
    return pick(output.hidden, (length - 1 - first)[:, None]), output.cache


@struct.dataclass(kw_only=True)
class ModelState:
    """Draft state of a language model."""

    cache: PyTree  # the model's key-value cache
    # i32[B, N]; the row of each node of the last tree, from `grow`; None for chains, whose rows stay in place
    rows: Array | None


def _write_rows(rows: Array, new: Array, first: Array) -> Array:
    """Write [W, E] into [R, E] from row `first` on."""
    return lax.dynamic_update_slice_in_dim(rows, new, first, 0)


@functools.lru_cache
def _language_model(
    model: LanguageModel, shape: Shape, sample: bool, vocab: int, own_tokens: bool
) -> Drafter:
    is_chain = isinstance(shape, Static) and shape.is_chain

    def init(params: Params, tokens: Array, length: Array) -> ModelState:
        # The two-token feed of a one-token prompt needs one spare slot.
        cache = model.init_cache(tokens.shape[0], tokens.shape[1] + shape.rows + 2)
        cache = prefill(model, params.draft, tokens, jnp.zeros_like(length), length - 2, cache)[0]
        rows = None if is_chain else jnp.zeros((tokens.shape[0], shape.num_nodes), jnp.int32)
        return ModelState(cache=cache, rows=rows)

    def unembed(params: Params, hidden: Array) -> Array:
        logits = model.unembed(params.draft, hidden)
        if own_tokens:
            return logits
        if vocab <= model.vocab_size:
            return logits[..., :vocab]
        missing = vocab - model.vocab_size
        return jnp.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)

    def propose(params: Params, state: ModelState, inputs: DraftInput) -> tuple[DraftTree, ModelState]:
        def extend(carry: tuple[PyTree, Array | None], level: Level) -> tuple[Array, Any]:
            cache, hidden_rows = carry
            output = model.forward(params.draft, level.tokens, level.visible, cache)
            if hidden_rows is not None:
                # Entry 0 is the root's. Slot `length + r` is entry 1 + r, the numbering of `grow`.
                entries = 1 + level.visible.slot - inputs.length
                hidden_rows = jax.vmap(_write_rows)(hidden_rows, output.hidden, entries)
            return unembed(params, output.hidden), (output.cache, hidden_rows)

        hidden, cache = feed_last(model, params.draft, state.cache, inputs.tokens, inputs.length)
        logits = unembed(params, hidden)
        hidden_rows = jnp.pad(hidden, ((0, 0), (0, shape.num_nodes), (0, 0))) if inputs.hidden else None
        growth = Growth(logits=logits, carry=(cache, hidden_rows), extend=extend, first=inputs.length)
        if own_tokens:
            ids = params.draft.ids
            growth = growth._replace(
                to_target=lambda tokens: ids[tokens], widen=lambda logits: widen(logits, ids, vocab)
            )
        tree, rows, (cache, hidden_rows) = grow(
            shape, sample, growth, last_token(inputs), inputs.keys, inputs.controls, inputs.guide
        )
        if hidden_rows is not None:
            tree = dataclasses.replace(tree, hidden=pick(hidden_rows, rows))
        return tree, ModelState(cache=cache, rows=state.rows if is_chain else rows)

    def catch_up(
        params: Params, state: ModelState, tokens: Array, cached: Array, length: Array
    ) -> ModelState:
        chunk = model.prefill_chunk or chunk_of()
        cache, _ = prefill(model, params.draft, tokens, cached, length - 2, state.cache, chunk=chunk)
        return dataclasses.replace(state, cache=cache)

    def update(params, state: ModelState, tree: DraftTree, verdict, output, length: Array) -> ModelState:
        if state.rows is None:
            return state
        # i32[B, D + 1]. Row 1 is in slot `length` and the root, row 0, in slot `length - 1`, so to `commit` they are
        # the nodes of a tree that is rooted at `length - 1`.
        path = pick(state.rows, verdict.path)
        return dataclasses.replace(state, cache=model.commit(state.cache, length - 1, path))

    return Drafter(
        init=init,
        propose=propose,
        update=update,
        num_nodes=shape.num_nodes,
        max_depth=shape.depth,
        vocab_size=vocab,
        traits=(STOPS,),
        name=f"model({describe(shape, sample)})",
        catch_up=catch_up,
    )


def load_model(asked: Asked) -> LoadedDrafter:
    """Load `language_model` from a checkpoint.

    If its tokenizer differs from the target's, it drafts the tokens that both share.

    Raises:
      MarsError: as for `hub.load` and `shared_tokens`.
    """
    target = asked.target
    draft = hub.load(
        asked.path, dtype=asked.dtype, mesh=target.mesh, prefill_chunk=target.model.prefill_chunk
    )
    shared = shared_tokens(target, draft)
    if shared is not None and target.mesh is not None:
        everywhere = NamedSharding(target.mesh, PartitionSpec())
        shared = hosts.put(shared, jax.tree.map(lambda _: everywhere, shared))
    params = draft.params if shared is None else shared._replace(weights=draft.params)
    ids = None if shared is None else shared.ids

    def factory(length: int, **shape: Any) -> Drafter:
        vocab = target.config.vocab_size
        return language_model(draft.model, length, **shape, vocab_size=vocab, own_tokens=shared is not None)

    return LoadedDrafter(
        factory(asked.chain, **asked.shape),
        params,
        draft_ids=ids,
        max_positions=draft.config.max_positions,
        resized=asked.resized(factory),
    )
