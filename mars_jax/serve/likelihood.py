"""Scoring of given token sequences under the target: the log-probability and the two best tokens at each position.

R rows, L tokens per row, V vocabulary. Tested against PyTorch transformers on the same inputs, in
tests/integrations/test_harness.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.core.axes import by_rows
from mars_jax.core.rule import node_stats
from mars_jax.core.types import LanguageModel, Visible
from mars_jax.hub.pretrained import Pretrained, check_pretrained
from mars_jax.serve.prepare import bucket, of_mesh
from mars_jax.utils.errors import MarsError, check_count, short_repr
from mars_jax.utils.hosts import fetch

ROWS = 4
"""Number of rows per forward pass."""
POSITIONS = 128
"""Number of positions per row whose logits are in memory at the same time."""


class Scored(NamedTuple):
    """Scores of one token sequence. Entry t scores token t + 1, given the tokens before it."""

    log_p: np.ndarray  # f32[L - 1]; log-probability of the token
    best: np.ndarray  # i32[L - 1]; the target's most probable token
    second: np.ndarray  # i32[L - 1]; the target's second most probable token
    z1: np.ndarray  # f32[L - 1]; raw logit of `best`
    z2: np.ndarray  # f32[L - 1]; raw logit of `second`
    tokens: tuple[int, ...] = ()  # the L token ids


def score(
    target: Pretrained, texts: Sequence[str] | Sequence[Sequence[int]], *, rows: int = ROWS
) -> list[Scored]:
    """Compute the target's log-probability of every token of each text except the first, given the tokens before it.

    Each forward pass processes rows of similar lengths. For a generated completion, the log-probabilities of its new
    tokens equal its `TokenLogProbs.log_prob`, up to rounding.

    Args:
      target: the model. On a mesh, rows are sharded over `data`, and the weights keep their sharding over the other
        axes.
      texts: strings or lists of token ids, each no longer than the model's context.
      rows: number of rows per forward pass, which is rounded up to a multiple of the mesh axis `data`.

    Returns:
      For each text of L tokens: `log_p` f32[L - 1], whose entry t is the natural logarithm of the probability of token
      t + 1; `best` and `second` i32[L - 1], the target's two most probable tokens at that position; `z1` and `z2`
      f32[L - 1], their raw logits; and `tokens`, the L token ids.

    Raises:
      MarsError: a text is empty or longer than the context, or a token is outside the vocabulary.

    >>> import mars_jax as mj  # doctest: +SKIP
    >>> [scored] = mj.score(mj.load(), ["Once upon a time"])  # doctest: +SKIP
    >>> float(scored.log_p.sum())  # doctest: +SKIP
    """
    check_pretrained(target)
    if isinstance(texts, str):
        raise MarsError("texts is one text: give a list of texts.")
    try:
        raw_texts = list(texts)  # an iterator can only be consumed once
    except TypeError:  # not iterable, or an array with no axes
        raw_texts = None
    if raw_texts is None or isinstance(texts, bytes | Mapping):
        raise MarsError(f"texts is {short_repr(texts)}: expected a list of strings or of lists of token ids.")
    check_count("rows", rows)
    texts = [
        target.check_tokens(target.encode(text) if isinstance(text, str) else text) for text in raw_texts
    ]
    context_length = target.config.max_positions
    for number, text in enumerate(texts):
        if len(text) > context_length:
            raise MarsError(
                f"text {number} has {len(text)} tokens and '{target.name}' has a context of {context_length}: cut it."
            )
    # The batches are ordered by length, so collect the scores by text index.
    scored_by_index: dict[int, Scored] = {}
    for indices, tokens in _batches_by_length(texts, of_mesh(target, rows), context_length):
        with target.on_mesh():
            log_p, logit_stats = fetch(_score(target.model, target.params, jnp.asarray(tokens)))
        for row, i in enumerate(indices):
            # The last token predicts no token of the text, and the columns after it are padding.
            length = len(texts[i]) - 1
            columns = (log_p, logit_stats.id1, logit_stats.id2, logit_stats.top1, logit_stats.top2)
            scored_by_index[i] = Scored(*(column[row, :length] for column in columns), tokens=tuple(texts[i]))
    return [scored_by_index[i] for i in range(len(texts))]


def _batches_by_length(
    texts: Sequence[Sequence[int]], rows: int, longest: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield batches of texts with similar lengths: (indices, tokens i32[rows, L]), padded with zeros.

    The padded length L of a text depends only on its own length, so that its scores are bit-identical in any batch.
    """
    padded_lengths = [min(bucket(len(text)), longest) for text in texts]
    text_order = sorted(range(len(texts)), key=padded_lengths.__getitem__)
    for padded_length, group_indices in itertools.groupby(text_order, padded_lengths.__getitem__):
        group_indices = list(group_indices)
        for first in range(0, len(group_indices), rows):
            indices = group_indices[first : first + rows]
            tokens = np.zeros((rows, padded_length), np.int32)
            for row, i in enumerate(indices):
                tokens[row, : len(texts[i])] = texts[i]
            yield indices, tokens


@functools.partial(jax.jit, static_argnums=0)
def _score(model: LanguageModel, params, tokens):
    return by_rows(functools.partial(_score_rows, model))(params, tokens)


def _score_rows(model: LanguageModel, params, tokens):
    rows, length = tokens.shape
    visible = Visible.causal(jnp.zeros(tokens.shape[:1], jnp.int32), tokens.shape[1])
    hidden = model.forward(params, tokens, visible, model.init_cache(*tokens.shape)).hidden
    # Score token j + 1 at position j, for `part_length` positions at a time. Drop the scores of the last position and
    # of padding.
    part_length = min(POSITIONS, length)
    hidden = jnp.pad(hidden, ((0, 0), (0, -length % part_length), (0, 0)))
    next_tokens = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1 + -length % part_length)))

    def part(first):
        logits = model.unembed(params, jax.lax.dynamic_slice_in_dim(hidden, first, part_length, axis=1))
        stats = node_stats(logits, logsumexp=True)
        target_tokens = jax.lax.dynamic_slice_in_dim(next_tokens, first, part_length, axis=1)
        assert stats.logsumexp is not None
        # log p(token) = z[token] - logsumexp(z)
        return jnp.take_along_axis(logits, target_tokens[..., None], axis=2)[..., 0] - stats.logsumexp, stats

    # Concatenate the parts [parts, R, part_length] into [R, L - 1].
    scores = jax.lax.map(part, jnp.arange(0, next_tokens.shape[1], part_length, dtype=jnp.int32))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(rows, -1)[:, : length - 1], scores)
