"""A small language model as drafter: a chain, greedy or sampled, or a static top-k tree.

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

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.cache import commit
from mars_jax.errors import MarsError
from mars_jax.prefill import prefill
from mars_jax.sampling import process, sample_processed
from mars_jax.tree import attention_mask, chain, static_topology
from mars_jax.types import Controls, Drafter, DraftTree, KVCache, LanguageModel, Params


def language_model(
    model: LanguageModel,
    num_draft_tokens: int = 5,
    *,
    tree: Sequence[int] | None = None,
    sample: bool = False,
    vocab_size: int | None = None,
) -> Drafter:
    """Draft with a language model; its weights are `Params.draft`.

    Args:
      model: the small model.
      num_draft_tokens: length K of the chain; not used where `tree` is given.
      tree: children per node at each depth, such as `(4, 2, 2, 1)`: the top-k tokens at every node.
      sample: draw the chain from the model with the request's own temperature, top-k, top-p and min-p, and hand
        the true q to the verifier. Rows at temperature 0 stay greedy. What `verify.rejection` is made for.
      vocab_size: the target's vocabulary, where checkpoints that share a tokenizer pad theirs differently.
        Draft logits are cut or padded with -inf to it. Default: the model's own.

    Raises:
      MarsError: K or a branching factor is below 1, or a tree is asked to sample.

    >>> from mars_jax.fake import hash_model
    >>> language_model(hash_model(vocab_size=11), tree=(4, 2, 2, 1)).num_nodes
    45
    """
    branching = tuple(tree) if tree is not None else (1,) * num_draft_tokens
    if not branching or min(branching) < 1:
        raise MarsError(
            f"a draft of shape {branching} has a level without nodes: give at least 1 draft token and at least "
            "1 child at each level."
        )
    vocab = vocab_size or model.vocab_size
    if max(branching) > min(vocab, model.vocab_size):
        raise MarsError(f"a node cannot have {max(branching)} children in a vocabulary of {vocab} tokens.")
    is_chain = max(branching) == 1
    if sample and not is_chain:
        raise MarsError(
            "sample=True drafts chains only: leave `tree` out, or draft the tree without sampling."
        )
    return _language_model(model, branching, sample, vocab)


@functools.lru_cache
def _language_model(model: LanguageModel, branching: tuple[int, ...], sample: bool, vocab: int) -> Drafter:
    parents, depths = static_topology(branching)
    n, max_depth, is_chain = len(parents), len(branching), max(branching) == 1
    first_of_level = [int(np.searchsorted(depths, depth)) for depth in range(max_depth + 2)]

    def init(params: Params, tokens: Array, length: Array) -> KVCache:
        # One spare slot, since the two-token feed of a one-token prompt reaches a slot further.
        cache = model.init_cache(tokens.shape[0], tokens.shape[1] + n + 1)
        return prefill(model, params.draft, tokens, length - 2, cache)

    def unembed(params: Params, hidden: Array) -> Array:
        logits = model.unembed(params.draft, hidden)
        if vocab <= model.vocab_size:
            return logits[..., :vocab]
        short = vocab - model.vocab_size
        return jnp.pad(logits, ((0, 0), (0, 0), (0, short)), constant_values=-jnp.inf)

    def feed_committed(params: Params, cache: KVCache, tokens: Array, length: Array) -> tuple[Array, KVCache]:
        """Logits f32[B, 1, V] after the last committed token, feeding the last two."""
        first = jnp.maximum(length - 2, 0)
        window = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, 2))(tokens, first)
        position = first[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
        slot = jnp.arange(cache.slots, dtype=jnp.int32)
        mask = slot[None, None] <= position[:, :, None]
        output = model.forward(params.draft, window, position, mask, cache, first)
        # A one-token prompt fills the window's first place only.
        last = jnp.take_along_axis(output.hidden, (length - 1 - first)[:, None, None], axis=1)
        return unembed(params, last), output.cache

    def children(keys: Array, logits: Array, width: int, controls: Controls) -> tuple[Array, Array | None]:
        """Tokens i32[B, W * width] under W nodes, and the processed logits they were drawn from."""
        if sample:
            processed = process(logits, controls)
            return sample_processed(keys, processed), processed
        if width == 1:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), None
        return lax.top_k(logits, width)[1].astype(jnp.int32).reshape(logits.shape[0], -1), None

    def propose(
        params: Params, keys: Array, state: KVCache, tokens: Array, length: Array, controls: Controls
    ) -> tuple[DraftTree, KVCache]:
        batch, start = tokens.shape[0], length - 1
        root = jnp.take_along_axis(tokens, start[:, None], axis=1)
        logits, cache = feed_committed(params, state, tokens, length)

        def level_children(depth, logits: Array, width: int) -> tuple[Array, Array | None]:
            level_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, depth)
            return children(level_keys, logits, width, controls)

        drafted, processed = level_children(1, logits, branching[0])
        if is_chain:
            # A chain's levels are alike: a loop compiles one forward, however long the chain.
            def body(carry, depth):
                drafted, cache = carry
                slot = jnp.arange(cache.slots, dtype=jnp.int32)
                position = start[:, None] + depth
                mask = slot[None, None] <= position[:, :, None]
                output = model.forward(params.draft, drafted, position, mask, cache, start + depth)
                drafted, q = level_children(depth + 1, unembed(params, output.hidden), 1)
                return (drafted, output.cache), (drafted[:, 0], None if q is None else q[:, 0])

            depths_fed = jnp.arange(1, max_depth, dtype=jnp.int32)
            (_, cache), (rest, rest_processed) = lax.scan(body, (drafted, cache), depths_fed)
            draft_logits = None
            if (
                processed is not None and rest_processed is not None
            ):  # the last node has no children, so its row is never read
                draft_logits = jnp.concatenate(
                    [processed, jnp.moveaxis(rest_processed, 0, 1), jnp.zeros_like(processed)], axis=1
                )
            return chain(jnp.concatenate([root, drafted, rest.T], axis=1), draft_logits), cache

        tree = DraftTree(
            tokens=jnp.zeros((batch, n), jnp.int32),
            parents=jnp.broadcast_to(jnp.asarray(parents), (batch, n)),
            depths=jnp.broadcast_to(jnp.asarray(depths), (batch, n)),
            max_depth=max_depth,
            is_chain=False,
        )
        mask = attention_mask(tree, start, state.slots)
        levels = [root, drafted]
        for depth in range(1, max_depth):
            a, b = first_of_level[depth], first_of_level[depth + 1]
            output = model.forward(
                params.draft, levels[-1], start[:, None] + tree.depths[:, a:b], mask[:, a:b], cache, start + a
            )
            cache = output.cache
            levels.append(level_children(depth + 1, unembed(params, output.hidden), branching[depth])[0])
        return dataclasses.replace(tree, tokens=jnp.concatenate(levels, axis=1)), cache

    def update(params, state: KVCache, tree: DraftTree, verdict, output, length: Array) -> KVCache:
        return state if is_chain else commit(state, length - 1, verdict.path)

    shape = "-".join(map(str, branching)) if not is_chain else str(max_depth)
    return Drafter(
        init=init,
        propose=propose,
        update=update,
        num_nodes=n,
        max_depth=max_depth,
        vocab_size=vocab,
        name=f"model({shape}{', sampled' if sample else ''})",
    )
