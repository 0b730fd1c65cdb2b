"""A small language model as drafter: a chain or a tree, static or dynamic, of its best tokens or sampled.

Source: Leviathan et al. 2211.17192 (sampled chain), SpecInfer 2305.09781 (static trees). B batch, N nodes,
V vocabulary. Oracle: the same model run from an empty cache each round (tests/drafters/test_model.py).

The invariant: the draft cache is valid in slots `[0, length - 2)`. The leaves of a round are drafted but never
fed, so a round that is accepted in full leaves its last token uncached; each round therefore begins by feeding
the last two committed tokens.
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
      num_draft_tokens: length K of the chain; not used where `tree` is given.
      tree: children per node at each depth, such as `(4, 2, 2, 1)`: the top-k tokens at every node; or
        `Dynamic(...)`, whose shape follows the model's confidence.
      sample: draw the draft from the model with the request's own temperature, top-k, top-p and min-p, and hand
        the true q to the verifier. Siblings of a tree are drawn without replacement. Rows at temperature 0 draft what
        they draft without sampling. `verify.rejection` is made for such drafts.
      vocab_size: the target's vocabulary, where checkpoints that share a tokenizer pad theirs differently.
        Draft logits are cut or padded with -inf to it. Default: the model's own.
      own_tokens: the model has another tokenizer than the target, and `Params.draft` is `shared_tokens.Shared`.

    Raises:
      MarsError: K or a branching factor is below 1, or a node has more children than there are tokens.

    >>> from mars_jax.core.fake import hash_model
    >>> language_model(hash_model(vocab_size=11), tree=(4, 2, 2, 1)).num_nodes
    45
    """
    shape = shape_of(num_draft_tokens, tree, min(vocab_size or model.vocab_size, model.vocab_size))
    model = translated(model) if own_tokens else model
    return _language_model(model, shape, sample, vocab_size or model.vocab_size, own_tokens)


def feed_last(
    model: LanguageModel, weights: PyTree, cache: PyTree, tokens: Array, length: Array
) -> tuple[Array, PyTree]:
    """The hidden state [B, 1, E] of the last committed token, feeding the last two."""
    first = jnp.maximum(length - 2, 0)
    window = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, 2))(tokens, first)
    output = model.forward(weights, window, Visible.causal(first, 2), cache)
    # i32[B, 1]: the last token is at place 1 of its window [length - 2, length).
    # A one-token prompt fills the window's first place only.
    return pick(output.hidden, (length - 1 - first)[:, None]), output.cache


@struct.dataclass(kw_only=True)
class ModelState:
    """Between two steps."""

    cache: PyTree  # the model's own
    # i32[B, N]; where `grow` put the nodes of the last tree; None of chains, whose rows stay
    rows: Array | None


def _put_at(rows: Array, new: Array, at: Array) -> Array:
    """[R, E] with [W, E] from row `at` on."""
    return lax.dynamic_update_slice_in_dim(rows, new, at, 0)


@functools.lru_cache
def _language_model(
    model: LanguageModel, shape: Shape, sample: bool, vocab: int, own_tokens: bool
) -> Drafter:
    is_chain = isinstance(shape, Static) and shape.is_chain

    def init(params: Params, tokens: Array, length: Array) -> ModelState:
        # One spare slot, since the two-token feed of a one-token prompt reaches a slot further.
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
        short = vocab - model.vocab_size
        return jnp.pad(logits, ((0, 0), (0, 0), (0, short)), constant_values=-jnp.inf)

    def propose(params: Params, state: ModelState, given: DraftInput) -> tuple[DraftTree, ModelState]:
        def extend(carry: tuple[PyTree, Array | None], level: Level) -> tuple[Array, Any]:
            cache, known = carry
            output = model.forward(params.draft, level.tokens, level.visible, cache)
            if known is not None:
                # Entry 0 is the root's, so the row in slot `length + r` is entry 1 + r, as `grow` counts them.
                known = jax.vmap(_put_at)(known, output.hidden, 1 + level.visible.slot - given.length)
            return unembed(params, output.hidden), (output.cache, known)

        hidden, cache = feed_last(model, params.draft, state.cache, given.tokens, given.length)
        logits = unembed(params, hidden)
        known = jnp.pad(hidden, ((0, 0), (0, shape.num_nodes), (0, 0))) if given.hidden else None
        growth = Growth(logits=logits, carry=(cache, known), extend=extend, first=given.length)
        if own_tokens:
            ids = params.draft.ids
            growth = growth._replace(
                to_target=lambda tokens: ids[tokens], widen=lambda logits: widen(logits, ids, vocab)
            )
        tree, rows, (cache, known) = grow(
            shape, sample, growth, last_token(given), given.keys, given.controls, given.guide
        )
        if known is not None:
            tree = dataclasses.replace(tree, hidden=pick(known, rows))
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
        # Rows are counted from 1 at slot `length`, and the root, 0, is in slot `length - 1`: so `commit` takes them as
        # nodes of a tree whose root is there. i32[B, D + 1].
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
    """`language_model` of a checkpoint, by the tokens that it shares with a target of another tokenizer.

    Raises:
      MarsError: as `hub.load` and `shared_tokens`.
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

    def made(length: int, **shape: Any) -> Drafter:
        vocab = target.config.vocab_size
        return language_model(draft.model, length, **shape, vocab_size=vocab, own_tokens=shared is not None)

    return LoadedDrafter(
        made(asked.chain, **asked.shape),
        params,
        draft_ids=ids,
        max_positions=draft.config.max_positions,
        resized=asked.resized(made),
    )
