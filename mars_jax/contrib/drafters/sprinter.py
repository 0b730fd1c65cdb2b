"""A small model that drafts until its own classifier doubts: the target is asked about that one token.

Source: SPRINTER 2502.04557. B batch, M tokens of a draft, E hidden size of the small model, T token buffer.
Oracle: the same loop in Python, from empty caches (tests/contrib/test_sprinter.py).

The invariant is that of `model`: the cache is valid in `[0, length - 2)`, since every trusted token was fed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.core.controls import is_stop
from mars_jax.core.drafter import TRUSTS, Drafter, DraftInput
from mars_jax.core.errors import check_count
from mars_jax.core.limits import DRAFT_TOKENS
from mars_jax.core.prefill import chunk_of, prefill
from mars_jax.core.sampling import argmax, is_greedy, process, sample_processed
from mars_jax.core.tree import chain, last_token
from mars_jax.core.types import NO_TOKEN, DraftTree, LanguageModel, Params, PyTree, Visible
from mars_jax.drafters.model import feed_last


class SprinterParams(NamedTuple):
    """`Params.draft` of SPRINTER."""

    model: PyTree  # weights of the small model
    weight: Array  # f32[E]; of the classifier on the model's hidden state at a drafted token
    bias: Array  # f32[]; of its logit
    # f32[]: the chance of acceptance below which the target is asked; above 1 it always is. A value, so that changing
    # it compiles nothing.
    threshold: Any = np.float32(0.5)


def chance(params: SprinterParams, hidden: Array) -> Array:
    """Return f32[...]: sigmoid(w . h + b), the chance that the target accepts a token with hidden state h [..., E]."""
    score = jnp.einsum("...e,e->...", hidden.astype(jnp.float32), params.weight) + params.bias
    return jax.nn.sigmoid(score)


def sprinter(model: LanguageModel, num_draft_tokens: int = 20, *, sample: bool = False) -> Drafter:
    """SPRINTER (arXiv 2502.04557): draft with a small model, and go on until a classifier doubts a token.

    The tokens before it are *trusted*: taken without a test, and known by their kind in `StepInfo`, beside what the
    target thinks of them (regret). The token in doubt is tested by the rule, and the target adds its own. At
    `num_draft_tokens` the last token is tested whatever it is. Lossy by design under every rule: the law of trusted
    text is the small model's.

    Strict rows, and a rule's `exact_prefix`, trust nothing; so does every row at a threshold above 1, which drafts one
    token a step. A stop token is never trusted, nor one that the request forbids. Without `sample` rows above
    temperature 0 trust nothing either, since their draft is not drawn. Rows wait for the longest draft of the batch,
    and their tokens do not depend on it.

    Args:
      model: the small model, of the target's vocabulary.
      num_draft_tokens: M, the most tokens of a step; the paper's 20.
      sample: draw the draft from the model with the request's own settings, and hand the true q to the verifier.

    Raises:
      MarsError: M is below 1 or above `DRAFT_TOKENS`.

    >>> from mars_jax.core.fake import hash_model
    >>> sprinter(hash_model(vocab_size=11)).num_nodes
    21
    """
    check_count("num_draft_tokens", num_draft_tokens, most=DRAFT_TOKENS)
    return _sprinter(model, num_draft_tokens, sample)


class _Run(NamedTuple):
    """A draft as it grows; all rows are at the same depth, or wait."""

    depth: Array  # i32[]; of the last drafted tokens
    last: Array  # i32[B, 1]; those tokens, NO_TOKEN of rows that wait
    tokens: Array  # i32[B, M]
    trusted: Array  # i32[B]
    cache: PyTree
    drawn_from: Array  # f32[B, M + 1, V], or [B, 0, V] of a draft that is not drawn


@functools.lru_cache
def _sprinter(model: LanguageModel, most: int, sample: bool) -> Drafter:
    def init(params: Params, tokens: Array, length: Array) -> PyTree:
        cache = model.init_cache(tokens.shape[0], tokens.shape[1] + most + 2)
        return prefill(model, params.draft.model, tokens, jnp.zeros_like(length), length - 2, cache)[0]

    def catch_up(params: Params, cache: PyTree, tokens: Array, cached: Array, length: Array) -> PyTree:
        chunk = model.prefill_chunk or chunk_of()
        return prefill(model, params.draft.model, tokens, cached, length - 2, cache, chunk=chunk)[0]

    def propose(params: Params, cache: PyTree, given: DraftInput) -> tuple[DraftTree, PyTree]:
        weights, controls = params.draft.model, given.controls
        batch = given.tokens.shape[0]
        # Strict rows draft what they would draft without the classifier's word: they are tested all the same.
        may_trust = jnp.ones((batch,), bool) if sample else is_greedy(controls)

        def pick(logits: Array, depth: Array) -> tuple[Array, Array]:
            """Return the next token i32[B, 1], and the logits f32[B, 1, V] that it was drawn from."""
            if not sample:
                return argmax(logits), logits
            processed = process(logits, controls)
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(given.keys, depth)
            return sample_processed(keys, jnp.zeros((batch, 1), jnp.int32), processed), processed

        def put(values: Array, new: Array, place: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(values, new, place, axis=1) if values.shape[1] else values

        def goes_on(at: _Run) -> Array:
            return (at.depth < most) & jnp.any(at.last != NO_TOKEN)

        def extend(at: _Run) -> _Run:
            visible = Visible.causal(given.length + at.depth - 1, 1)
            with jax.named_scope("level"):
                output = model.forward(weights, at.last, visible, at.cache)
                logits = model.unembed(weights, output.hidden)
            sure = chance(params.draft, output.hidden)[:, 0] >= params.draft.threshold
            stop = is_stop(at.last, controls.stop_tokens)[:, 0]
            trusted = (at.last[:, 0] != NO_TOKEN) & sure & ~stop & may_trust
            token, drawn_from = pick(logits, at.depth + 1)
            token = jnp.where(trusted[:, None], token, NO_TOKEN)
            return _Run(
                depth=at.depth + 1,
                last=token,
                tokens=put(at.tokens, token, at.depth),
                trusted=at.trusted + trusted.astype(jnp.int32),
                cache=output.cache,
                drawn_from=put(at.drawn_from, drawn_from, at.depth),
            )

        hidden, cache = feed_last(model, weights, cache, given.tokens, given.length)
        logits = model.unembed(weights, hidden)
        token, drawn_from = pick(logits, jnp.int32(1))
        rows = most + 1 if sample else 0
        start = _Run(
            depth=jnp.int32(1),
            last=token,
            tokens=put(jnp.full((batch, most), NO_TOKEN, jnp.int32), token, jnp.int32(0)),
            trusted=jnp.zeros((batch,), jnp.int32),
            cache=cache,
            drawn_from=put(jnp.zeros((batch, rows, logits.shape[-1]), jnp.float32), drawn_from, jnp.int32(0)),
        )
        end = lax.while_loop(goes_on, extend, start)
        tree = chain(
            jnp.concatenate([last_token(given), end.tokens], axis=1), end.drawn_from if sample else None
        )
        trusted = (tree.depths > 0) & (tree.depths <= end.trusted[:, None])
        return dataclasses.replace(tree, trusted=trusted), end.cache

    return Drafter(
        init=init,
        propose=propose,
        update=lambda params, state, tree, verdict, output, length: state,
        num_nodes=most + 1,
        max_depth=most,
        vocab_size=model.vocab_size,
        traits=(TRUSTS,),
        catch_up=catch_up,
        name=f"sprinter({most}{', sampled' if sample else ''})",
    )
