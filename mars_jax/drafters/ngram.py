"""Prompt lookup on the device: draft the tokens that followed the longest earlier match of the current suffix.

Source: prompt lookup decoding (Saxena 2023), in `transformers` as `prompt_lookup_num_tokens`. B batch, T token buffer.
Tested against a Python search in tests/drafters/test_ngram.py.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from mars_jax.core.drafter import Drafter, DraftInput
from mars_jax.core.tree import chain, last_token
from mars_jax.core.types import NO_TOKEN, DraftTree, Params, PyTree
from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.registry import register
from mars_jax.utils.errors import MarsError, check_count, short_repr
from mars_jax.utils.limits import DRAFT_TOKENS, NGRAM_TOKENS


@dataclasses.dataclass(frozen=True)
class NGram(Drafter):
    """Copies of the tokens that followed an earlier occurrence of the last few tokens.

    Search the context for earlier matches of its last tokens, and draft the tokens that followed the longest match, or
    the latest of equally long ones. If the copy reaches the end of the context, it starts over at the token after the
    match, so that a repetition continues. Without a match all draft tokens are padding, and the step emits one token.

    Raises:
      MarsError: a field is out of range.

    >>> ngram(4).num_nodes
    5
    """

    num_draft_tokens: int = 8  # K, length of the chain, from 1 to `DRAFT_TOKENS`
    _: dataclasses.KW_ONLY
    max_ngram: int = 3  # longest suffix to search for
    min_ngram: int = 1  # shortest suffix that counts as a match

    resizes = sparse = True

    def __post_init__(self):
        check_count("num_draft_tokens", self.num_draft_tokens, most=DRAFT_TOKENS)
        check_lengths(self.min_ngram, self.max_ngram)

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    def propose(self, params: Params, state: PyTree, inputs: DraftInput) -> tuple[DraftTree, PyTree]:
        drafted_tokens, match_length = lookup(
            inputs.tokens,
            inputs.length,
            self.num_draft_tokens,
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
        )
        tokens = jnp.concatenate([last_token(inputs), drafted_tokens], axis=1)
        return chain(tokens, expected=expected(match_length)), state


ngram = NGram


def check_lengths(min_ngram: int, max_ngram: int) -> None:
    """Raise MarsError unless 1 <= min_ngram <= max_ngram <= `NGRAM_TOKENS`."""
    check_count("max_ngram", max_ngram, most=NGRAM_TOKENS)
    check_count("min_ngram", min_ngram)
    if min_ngram > max_ngram:
        raise MarsError(
            f"min_ngram is {short_repr(min_ngram)} and max_ngram {max_ngram}: give 1 <= min_ngram <= max_ngram."
        )


def expected(matched: Array) -> Array:
    """Return the expected acceptance rate f32[B] of drafts that follow matches of length `matched` i32[B].

    The rate is 0 without a match, and higher after longer matches. The numbers are rough priors, which `drafters.sized`
    corrects with the observed acceptance rate.

    >>> [round(x, 2) for x in expected(jnp.asarray([0, 1, 2, 6])).tolist()]
    [0.0, 0.3, 0.55, 0.8]
    """
    return jnp.asarray([0.0, 0.3, 0.55, 0.8], jnp.float32)[jnp.minimum(matched, 3)]


def lookup(
    tokens: Array, length: Array, count: int, *, max_ngram: int, min_ngram: int
) -> tuple[Array, Array]:
    """Return a draft for each row: the tokens that followed the longest match in the row's own context.

    Args:
      tokens: i32[B, T]; valid below `length`.
      length: i32[B], at least 1.

    Returns:
      The draft i32[B, count], which is all `NO_TOKEN` in rows without a match, and the length of the match i32[B].

    >>> lookup(jnp.asarray([[5, 6, 7, 5, 6, 0]], jnp.int32), jnp.asarray([5], jnp.int32), 2,
    ...        max_ngram=3, min_ngram=1)[0].tolist()
    [[7, 5]]
    """
    has_match, start, match_length = longest_match(
        tokens, length, tokens, length, max_ngram=max_ngram, min_ngram=min_ngram
    )
    # Treat the tokens from the match to the end as one period of a repetition: after the last of them, continue with
    # the first.
    period = jnp.maximum(length - start, 1)
    offsets = jnp.arange(count, dtype=jnp.int32)[None] % period[:, None]
    draft = jnp.take_along_axis(tokens, jnp.minimum(start[:, None] + offsets, tokens.shape[1] - 1), axis=1)
    return jnp.where(has_match[:, None], draft, NO_TOKEN), match_length


def longest_match(
    tokens: Array, length: Array, past: Array, past_length: Array, *, max_ngram: int, min_ngram: int
) -> tuple[Array, Array, Array]:
    """Find each row's longest suffix that also occurs in `past`, and locate its last occurrence.

    An occurrence counts only if another token follows it.

    Args:
      tokens: i32[B, T]; valid below `length` i32[B], at least 1.
      past: i32[B, C]; the tokens to search, valid below `past_length` i32[B]. NO_TOKEN separates documents.

    Returns:
      Whether each row has a match, bool[B]; the index of the token after the match, i32[B], which is below
      `past_length`; and the length of the match, i32[B].
    """
    past_size = past.shape[1]
    # i32[1, C]: candidate e is a match that ends just before index e, so that the draft begins at e. `match_length`
    # counts how many tokens before e equal those at the end of the row.
    match_end = jnp.arange(past_size, dtype=jnp.int32)[None]
    match_length = jnp.zeros(past.shape, jnp.int32)
    is_matching = (match_end >= 1) & (match_end < past_length[:, None])
    for steps_back in range(1, max_ngram + 1):
        # Compare past[e - steps_back] with tokens[length - steps_back]. A candidate's match stops growing at the first
        # difference.
        shifted = jnp.pad(past, ((0, 0), (steps_back, 0)), constant_values=NO_TOKEN)[:, :past_size]
        suffix_token = jnp.take_along_axis(tokens, jnp.maximum(length - steps_back, 0)[:, None], axis=1)
        is_matching &= (shifted == suffix_token) & (match_end >= steps_back) & (length >= steps_back)[:, None]
        match_length += is_matching.astype(jnp.int32)
    # Choose the longest match, and the latest of equally long ones: in base C, the match's length is the high digit of
    # the score, and its end is the low digit.
    match_score = jnp.where(match_length >= min_ngram, match_length * past_size + match_end, -1)
    best_end = jnp.argmax(match_score, axis=1).astype(jnp.int32)
    best_score = jnp.max(match_score, axis=1)
    return best_score >= 0, best_end, jnp.maximum(best_score, 0) // past_size


def load_ngram(arguments: Asked) -> LoadedDrafter:
    """Make an `ngram` drafter that drafts chains of the requested length."""
    return LoadedDrafter(ngram(arguments.chain), ())


register("ngram", NGram, load_ngram, copies=True, paper="2304.04487")
