"""Prompt lookup on the device: what followed the longest earlier match of the text's own last tokens.

Source: prompt lookup decoding (Saxena 2023), in `transformers` as `prompt_lookup_num_tokens`. B batch, T buffer.
Oracle: a Python search in tests/drafters/test_ngram.py.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from mars_jax.core.drafter import SPARSE, Drafter, DraftInput
from mars_jax.core.errors import MarsError, check_count, short_repr
from mars_jax.core.limits import DRAFT_TOKENS, NGRAM_TOKENS
from mars_jax.core.tree import chain, last_token
from mars_jax.core.types import NO_TOKEN, DraftTree, Params, PyTree
from mars_jax.drafters.asked import Asked, LoadedDrafter


def ngram(num_draft_tokens: int = 8, *, max_ngram: int = 3, min_ngram: int = 1) -> Drafter:
    """Propose the tokens that followed the latest of the longest earlier matches of the current suffix.

    Where the continuation runs into the end of the text it starts over at the match, which continues a
    repetition for as long as is asked. Without a match the nodes are padding and the step emits one token.

    Args:
      num_draft_tokens: length K of the chain, from 1 to `DRAFT_TOKENS`.
      max_ngram: longest suffix that is looked for.
      min_ngram: shortest suffix that counts as a match.

    Raises:
      MarsError: an argument is out of range.

    >>> ngram(4).num_nodes
    5
    """
    check_count("num_draft_tokens", num_draft_tokens, most=DRAFT_TOKENS)
    check_count("max_ngram", max_ngram, most=NGRAM_TOKENS)
    check_count("min_ngram", min_ngram)
    if min_ngram > max_ngram:
        raise MarsError(
            f"min_ngram is {short_repr(min_ngram)} and max_ngram {max_ngram}: give 1 <= min_ngram <= max_ngram."
        )
    return _ngram(num_draft_tokens, max_ngram, min_ngram)


@functools.lru_cache
def _ngram(num_draft_tokens: int, max_ngram: int, min_ngram: int) -> Drafter:
    def propose(params: Params, state: PyTree, given: DraftInput) -> tuple[DraftTree, PyTree]:
        drafted, matched = lookup(
            given.tokens, given.length, num_draft_tokens, max_ngram=max_ngram, min_ngram=min_ngram
        )
        tokens = jnp.concatenate([last_token(given), drafted], axis=1)
        return chain(tokens, expected=expected(matched)), state

    return Drafter(
        init=lambda params, tokens, length: (),
        propose=propose,
        update=lambda params, state, tree, verdict, output, length: state,
        num_nodes=num_draft_tokens + 1,
        max_depth=num_draft_tokens,
        traits=(SPARSE,),
        name=f"ngram({num_draft_tokens})",
    )


def expected(matched: Array) -> Array:
    """The share of a copy's tested tokens that are accepted, f32[B], after a match of so many tokens i32[B]; 0 of none.

    Round numbers to begin with: the longer the match, the surer the copy. `drafters.sized` scales them by how the
    drafts of a text turned out.

    >>> [round(x, 2) for x in expected(jnp.asarray([0, 1, 2, 6])).tolist()]
    [0.0, 0.3, 0.55, 0.8]
    """
    return jnp.asarray([0.0, 0.3, 0.55, 0.8], jnp.float32)[jnp.minimum(matched, 3)]


def lookup(
    tokens: Array, length: Array, count: int, *, max_ngram: int, min_ngram: int
) -> tuple[Array, Array]:
    """The proposed continuation, all `NO_TOKEN` in a row without a match.

    Args:
      tokens: i32[B, T]; valid below `length`.
      length: i32[B], at least 1.

    Returns:
      The tokens, i32[B, count], and how many tokens matched, i32[B].

    >>> lookup(jnp.asarray([[5, 6, 7, 5, 6, 0]], jnp.int32), jnp.asarray([5], jnp.int32), 2,
    ...        max_ngram=3, min_ngram=1)[0].tolist()
    [[7, 5]]
    """
    found, best, matched = longest_match(
        tokens, length, tokens, length, max_ngram=max_ngram, min_ngram=min_ngram
    )
    period = jnp.maximum(length - best, 1)
    step = jnp.arange(count, dtype=jnp.int32)[None] % period[:, None]
    drafted = jnp.take_along_axis(tokens, jnp.minimum(best[:, None] + step, tokens.shape[1] - 1), axis=1)
    return jnp.where(found[:, None], drafted, NO_TOKEN), matched


def longest_match(
    tokens: Array, length: Array, past: Array, until: Array, *, max_ngram: int, min_ngram: int
) -> tuple[Array, Array, Array]:
    """Find the last tokens of a row in `past`: the latest of the longest matches that something follows.

    Args:
      tokens: i32[B, T]; valid below `length` i32[B], at least 1.
      past: i32[B, C], searched below `until` i32[B]; NO_TOKEN parts texts.

    Returns:
      found bool[B]; the place i32[B] after the match, which is below `until`; and how many tokens matched, i32[B].
    """
    size = past.shape[1]
    end = jnp.arange(size, dtype=jnp.int32)[None]  # a match ends just before this place
    matched = jnp.zeros(past.shape, jnp.int32)
    alive = (end >= 1) & (end < until[:, None])
    for back in range(1, max_ngram + 1):
        # past[end - back] == tokens[length - back], for as many steps back as the two suffixes agree
        shifted = jnp.pad(past, ((0, 0), (back, 0)), constant_values=NO_TOKEN)[:, :size]
        wanted = jnp.take_along_axis(tokens, jnp.maximum(length - back, 0)[:, None], axis=1)
        alive &= (shifted == wanted) & (end >= back) & (length >= back)[:, None]
        matched += alive.astype(jnp.int32)
    score = jnp.where(matched >= min_ngram, matched * size + end, -1)
    best = jnp.argmax(score, axis=1).astype(jnp.int32)
    top = jnp.max(score, axis=1)
    return top >= 0, best, jnp.maximum(top, 0) // size


def load_ngram(asked: Asked) -> LoadedDrafter:
    """`ngram` of the length that is asked for, whatever the target."""
    return LoadedDrafter(ngram(asked.chain), (), resized=ngram)
