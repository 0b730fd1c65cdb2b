"""Replay on the device: draft the tokens that followed an earlier match, in a corpus or in the row's own context.

Source: SPEC-RL (2509.23232), where drafts come from the rollouts of the previous epoch. Matches are found as in
`ngram`. C tokens in the corpus, B batch, T token buffer. Tested against a Python search in
tests/contrib/test_replay.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core.types import NO_TOKEN, DraftTree, Params, PyTree
from mars_jax.drafters import DraftInput, LoadedDrafter, chain, last_token, register
from mars_jax.drafters.asked import Asked
from mars_jax.drafters.ngram import NGram, expected, longest_match, lookup
from mars_jax.utils.errors import MarsError
from mars_jax.utils.paths import read_text

CORPUS = 1 << 16
"""Default number of tokens in a corpus, enough for a few hundred answers."""


@dataclasses.dataclass(frozen=True)
class Replay(NGram):
    """A drafter that copies tokens from a corpus of earlier answers, or from the row's own context.

    Search a corpus of answers and the row's own tokens for the row's last tokens, and draft the tokens after the
    longest match. If several matches are equally long, prefer one in the row's own tokens, and then the latest. A draft
    ends at the end of the answer that it copies. If no match of at least `min_ngram` tokens is found in the corpus, the
    draft is the same as with `ngram`.

    The corpus is `Params.draft`, an array i32[C] from `corpus`. A new corpus of the same size, such as the last epoch's
    rollouts, does not trigger recompilation. Lossless rules stay lossless with this drafter, because a draft depends
    only on the committed tokens and the corpus.

    Raises:
      MarsError: a field is out of range.

    >>> replay(4).num_nodes
    5
    """

    _: dataclasses.KW_ONLY
    max_ngram: int = 6  # longest suffix to search for in the corpus (in the row's own tokens: always 3)
    min_ngram: int = 2  # shortest suffix that counts as a match in the corpus

    def propose(self, params: Params, state: PyTree, inputs: DraftInput) -> tuple[DraftTree, PyTree]:
        tokens, length, count = inputs.tokens, inputs.length, self.num_draft_tokens
        own_tokens, own_matched = lookup(tokens, length, count, max_ngram=3, min_ngram=1)
        corpus_size = params.draft.shape[0]
        corpus_rows = jnp.broadcast_to(params.draft[None], (tokens.shape[0], corpus_size))
        corpus_length = jnp.full_like(length, corpus_size)
        in_corpus, corpus_start, corpus_matched = longest_match(
            tokens, length, corpus_rows, corpus_length, max_ngram=self.max_ngram, min_ngram=self.min_ngram
        )
        indices = corpus_start[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        corpus_tokens = jnp.take_along_axis(corpus_rows, jnp.minimum(indices, corpus_size - 1), axis=1)
        # End the draft at the end of the answer, which is marked by NO_TOKEN or is the end of the corpus.
        past_end = jnp.cumsum(((corpus_tokens < 0) | (indices >= corpus_size)).astype(jnp.int32), axis=1) > 0
        corpus_tokens = jnp.where(past_end, NO_TOKEN, corpus_tokens)
        use_corpus = in_corpus & (corpus_matched > own_matched)
        drafted_tokens = jnp.where(use_corpus[:, None], corpus_tokens, own_tokens)
        copied = jnp.concatenate([last_token(inputs), drafted_tokens], axis=1)
        return chain(copied, expected=expected(jnp.where(use_corpus, corpus_matched, own_matched))), state


replay = Replay


def corpus(texts: Iterable[Sequence[int]], size: int = CORPUS) -> Array:
    """Join token sequences into a corpus i32[size] for `replay`, right-aligned. If they do not fit, drop the earliest.

    Pass each prompt and its answer as one sequence, so that the first tokens of the answer can be drafted as well.

    Args:
      texts: token ids of each sequence, including the stop token.
      size: C, the size of the corpus. Corpora of the same size share compiled programs.

    Raises:
      MarsError: the size is below 2.

    >>> corpus([[5, 6], [7, 8, 9]], 8).tolist()
    [-1, -1, 5, 6, -1, 7, 8, 9]
    """
    if size < 2:
        raise MarsError(f"the corpus has {size} tokens: give it room for at least 2.")
    ids: list[int] = []
    for text in texts:
        ids += [NO_TOKEN, *(int(i) for i in text)]
    padded_ids = np.full(size, NO_TOKEN, np.int32)
    last_ids = ids[-size:]
    padded_ids[size - len(last_ids) :] = last_ids
    return jnp.asarray(padded_ids)


def load_replay(asked: Asked) -> LoadedDrafter:
    """Load a `replay` drafter with a corpus from a file.

    Each line of a .jsonl file must have `tokens` and may have `prompt_tokens`, as written by
    `mars_jax.generate --output`. In any other file, each line is the text of one document.

    Raises:
      MarsError: the file cannot be read, is empty, or contains tokens that are not in the target's vocabulary.
    """
    path = Path(asked.path)
    try:
        lines = [line for line in read_text(path).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise MarsError(f"'{path}' cannot be read ({error}): give a file of texts or of rows.") from None
    if not lines:
        raise MarsError(f"'{path}' is empty: give a file of texts, or of rows with their tokens.")
    documents = [_tokens(asked, path, number, line) for number, line in enumerate(lines, start=1)]
    for document in documents:
        asked.target.check_tokens(document)
    corpus_size = max(CORPUS, 1 << (sum(map(len, documents)) + len(documents) - 1).bit_length())
    corpus_ids = corpus(documents, min(corpus_size, 1 << 20))
    return LoadedDrafter(replay(asked.chain), corpus_ids)


def _tokens(asked: Asked, path: Path, number: int, line: str) -> list[int]:
    if path.suffix != ".jsonl":
        return asked.target.encode(line)
    try:
        row = json.loads(line)
        ids = row.get("prompt_tokens", []) + row["tokens"]
        if not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise ValueError  # excludes 1.9 and true, which int() would accept
        return ids
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise MarsError(
            f"line {number} of '{path}' is no row with tokens: give what mars_jax.generate --output wrote."
        ) from None


register("replay", Replay, load_replay, path="FILE", copies=True, paper="2509.23232")
