"""Replay on the device: what followed the same words in a corpus of earlier answers, or in the text itself.

Source: SPEC-RL (2509.23232) drafts the previous epoch's rollouts; suffix lookup as in `ngram`. C tokens of the corpus,
B batch, T buffer. Oracle: a Python search in tests/contrib/test_replay.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core.drafter import SPARSE, Drafter, DraftInput
from mars_jax.core.errors import MarsError, check_count
from mars_jax.core.limits import DRAFT_TOKENS, NGRAM_TOKENS
from mars_jax.core.reading import read_text
from mars_jax.core.tree import chain, last_token
from mars_jax.core.types import NO_TOKEN, DraftTree, Params, PyTree
from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.ngram import expected, longest_match

CORPUS = 1 << 16
"""Tokens of a corpus unless told otherwise: some hundreds of answers."""


@functools.lru_cache
def replay(num_draft_tokens: int = 8, *, max_ngram: int = 6, min_ngram: int = 2) -> Drafter:
    """Propose what followed the longest match of the row's last tokens, in the corpus or in the row's own text.

    The corpus is `Params.draft`, i32[C] of `corpus`: another one, such as the last epoch's rollouts, compiles nothing.
    The longer match wins, the row's own where they are equal, and the latest of equal ones. A draft ends where the
    answer that it is taken from ends. Without a match of `min_ngram` tokens in the corpus it is `ngram`.

    Lossless under lossless rules: a draft is a function of committed tokens and of the corpus.

    Args:
      num_draft_tokens: length K of the chain, from 1 to `DRAFT_TOKENS`.
      max_ngram: longest suffix that is looked for in the corpus; of the row's own text 3.
      min_ngram: shortest suffix that counts as a match in the corpus.

    Raises:
      MarsError: an argument is out of range.

    >>> replay(4).num_nodes
    5
    """
    check_count("num_draft_tokens", num_draft_tokens, most=DRAFT_TOKENS)
    check_count("max_ngram", max_ngram, most=NGRAM_TOKENS)
    if not 1 <= min_ngram <= max_ngram:
        raise MarsError(
            f"min_ngram is {min_ngram} and max_ngram {max_ngram}: give 1 <= min_ngram <= max_ngram."
        )

    def propose(params: Params, state: PyTree, given: DraftInput) -> tuple[DraftTree, PyTree]:
        tokens, length = given.tokens, given.length
        own, at, matched_own = longest_match(tokens, length, tokens, length, max_ngram=3, min_ngram=1)
        size = params.draft.shape[0]
        past = jnp.broadcast_to(params.draft[None], (tokens.shape[0], size))
        whole = jnp.full_like(length, size)
        found, place, matched = longest_match(
            tokens, length, past, whole, max_ngram=max_ngram, min_ngram=min_ngram
        )
        steps = jnp.arange(num_draft_tokens, dtype=jnp.int32)[None]
        # What follows the match; a repetition in the row's own text goes on as `ngram` has it.
        period = jnp.maximum(length - at, 1)[:, None]
        mine = jnp.take_along_axis(
            tokens, jnp.minimum(at[:, None] + steps % period, tokens.shape[1] - 1), axis=1
        )
        follows = place[:, None] + steps
        theirs = jnp.take_along_axis(past, jnp.minimum(follows, size - 1), axis=1)
        ended = jnp.cumsum(((theirs < 0) | (follows >= size)).astype(jnp.int32), axis=1) > 0
        theirs = jnp.where(ended, NO_TOKEN, theirs)
        mine = jnp.where(own[:, None], mine, NO_TOKEN)
        better = found & (~own | (matched > matched_own))
        drafted = jnp.where(better[:, None], theirs, mine)
        copied = jnp.concatenate([last_token(given), drafted], axis=1)
        return chain(copied, expected=expected(jnp.where(better, matched, matched_own))), state

    return Drafter(
        init=lambda params, tokens, length: (),
        propose=propose,
        update=lambda params, state, tree, verdict, output, length: state,
        num_nodes=num_draft_tokens + 1,
        max_depth=num_draft_tokens,
        traits=(SPARSE,),
        name=f"replay({num_draft_tokens})",
    )


def corpus(texts: Iterable[Sequence[int]], size: int = CORPUS) -> Array:
    """Return the token ids of texts as the corpus of `replay`: i32[size], the last ones at its end; the first are left
    out where there is no room.

    A prompt before its answer, as one text, lets the first tokens of an answer be drafted too.

    Args:
      texts: of each its token ids, the token that ended it included.
      size: C. Corpora of one size share what is compiled.

    Raises:
      MarsError: the size is below 2.

    >>> corpus([[5, 6], [7, 8, 9]], 8).tolist()
    [-1, -1, 5, 6, -1, 7, 8, 9]
    """
    if size < 2:
        raise MarsError(f"the corpus has {size} tokens: give it room for at least 2.")
    made: list[int] = []
    for text in texts:
        made += [NO_TOKEN, *(int(i) for i in text)]
    filled = np.full(size, NO_TOKEN, np.int32)
    kept = made[-size:]
    filled[size - len(kept) :] = kept
    return jnp.asarray(filled)


def load_replay(asked: Asked) -> LoadedDrafter:
    """`replay:FILE`: rows with `prompt_tokens` and `tokens`, as `mars_jax.generate --output` writes them, in a file
    that is called .jsonl; or a plain text, whose lines are texts.

    Raises:
      MarsError: the file cannot be read, holds no text, or tokens that the target does not have.
    """
    path = Path(asked.path)
    try:
        lines = [line for line in read_text(path).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise MarsError(f"'{path}' cannot be read ({error}): give a file of texts or of rows.") from None
    if not lines:
        raise MarsError(f"'{path}' is empty: give a file of texts, or of rows with their tokens.")
    texts = [_tokens(asked, path, number, line) for number, line in enumerate(lines, start=1)]
    for text in texts:
        asked.target.check_tokens(text)
    room = max(CORPUS, 1 << (sum(map(len, texts)) + len(texts) - 1).bit_length())
    made = corpus(texts, min(room, 1 << 20))
    return LoadedDrafter(replay(asked.chain), made, resized=replay)


def _tokens(asked: Asked, path: Path, number: int, line: str) -> list[int]:
    if path.suffix != ".jsonl":
        return asked.target.encode(line)
    try:
        row = json.loads(line)
        parts = row.get("prompt_tokens", []), row["tokens"]
        if not all(isinstance(part, list) and all(type(i) is int for i in part) for part in parts):
            raise ValueError  # 1.9 and true are no tokens, though Python takes them for whole numbers
        return [*parts[0], *parts[1]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise MarsError(
            f"line {number} of '{path}' is no row with tokens: give what mars_jax.generate --output wrote."
        ) from None
