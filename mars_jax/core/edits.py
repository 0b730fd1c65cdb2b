"""Per-request edits of the target's logits: biases, banned tokens, repetition penalties and a minimum length.

The edited logits define the target distribution, so the output of a lossless rule follows the edited distribution
exactly. Penalties at a draft node also take into account the drafted tokens on the path from the root to this node.

Dimensions: B batch, N nodes, T token buffer, K biased tokens per row, V vocabulary.

Sources: the bias, the repetition penalty (CTRL, arXiv 1909.05858) and the minimum length follow transformers:
`SequenceBiasLogitsProcessor`, `RepetitionPenaltyLogitsProcessor` and `MinNewTokensLengthLogitsProcessor`. The presence
and frequency penalties follow OpenAI's API. Tested against these processors, and against autoregression
(tests/core/test_edits.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core.controls import PerRow, one_per_row
from mars_jax.core.tree import ancestors
from mars_jax.core.types import NO_TOKEN, DraftTree, Edits
from mars_jax.utils.errors import MarsError, check_count, check_type, short_repr
from mars_jax.utils.limits import BATCH_ROWS
from mars_jax.utils.settings import LARGEST_FLOAT, LARGEST_INT


def make_edits(
    batch: int,
    *,
    logit_bias: Sequence[Mapping[int, float] | Sequence[tuple[int, float]]] | Mapping[int, float] = (),
    repetition_penalty: PerRow = 1.0,
    presence_penalty: PerRow = 0.0,
    frequency_penalty: PerRow = 0.0,
    min_new_tokens: PerRow = 0,
    width: int = 1,
) -> Edits:
    """Build the `Edits` of a batch; every setting is either one value for all rows or one value per row.

    Args:
      batch: B, the number of rows.
      logit_bias: mapping from token ids to numbers that are added to their logits; -inf bans a token.
      repetition_penalty: divides the positive logits of tokens in the prompt and the output, and multiplies the
        negative ones; 1 disables it.
      presence_penalty: subtracted from the logit of every token in the output; 0 disables it.
      frequency_penalty: subtracted from the logit of a token once for every occurrence in the output; 0 disables it.
      min_new_tokens: number of new tokens before a stop token is allowed; 0 disables it.
      width: minimum K. Batches with at most this many biased tokens per row share a compiled program.

    Returns:
      The edits, for `Controls.edits`.

    Raises:
      MarsError: a value is out of range.

    >>> make_edits(2, logit_bias={5: -jnp.inf}).bias_tokens.tolist()
    [[5], [5]]
    """
    check_count("batch", batch, most=BATCH_ROWS)
    check_count("width", width)
    expected_biases = "a mapping of token ids to numbers, or one for each row"
    check_type("logit_bias", logit_bias, (Mapping, list, tuple), expected_biases)
    if isinstance(logit_bias, Mapping):
        rows = [logit_bias] * batch
    else:
        rows = list(logit_bias) or [{}] * batch
    if len(rows) != batch:
        raise MarsError(f"logit_bias has {len(rows)} rows: expected one mapping, or one for each of {batch}.")
    for row in rows:
        check_type("logit_bias of a row", row, (Mapping, list, tuple), "a mapping of token ids to numbers")
    row_pairs = [list(row.items()) if isinstance(row, Mapping) else list(row) for row in rows]
    width = max(width, *(len(row) for row in row_pairs))
    tokens = np.full((batch, width), NO_TOKEN, np.int32)
    biases = np.zeros((batch, width), np.float32)
    for b, row in enumerate(row_pairs):
        for k, pair in enumerate(row):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise MarsError(
                    f"logit_bias has {short_repr(pair)}: expected pairs of a token id and a number."
                )
            tokens[b, k], biases[b, k] = bias_of(*pair)

    return Edits(
        bias_tokens=jnp.asarray(tokens),
        bias=jnp.asarray(biases),
        repetition=one_per_row("repetition_penalty", repetition_penalty, batch, np.float32),
        presence=one_per_row("presence_penalty", presence_penalty, batch, np.float32),
        frequency=one_per_row("frequency_penalty", frequency_penalty, batch, np.float32),
        min_new_tokens=one_per_row("min_new_tokens", min_new_tokens, batch, np.int32),
    )


def bias_of(
    token: Any, value: Any, vocab_size: int = LARGEST_INT, expected: str = "a token id"
) -> tuple[int, float]:
    """Validate one entry of a logit bias and convert it to Python numbers.

    Args:
      token: a token id from 0 to `vocab_size` - 1.
      value: the bias, which is a finite number or -inf.
      expected: description of a valid token, for the error message.

    Raises:
      MarsError: a value has the wrong type or is out of range.

    >>> bias_of(np.int32(5), 1)
    (5, 1.0)
    """
    if isinstance(token, np.generic | np.ndarray | Array) and token.ndim == 0:
        token = token.item()
    if isinstance(value, np.generic | np.ndarray | Array) and value.ndim == 0:
        value = value.item()
    is_token = type(token) is int and 0 <= token < vocab_size
    # The comparison also rejects NaN.
    is_bias = isinstance(value, int | float) and not isinstance(value, bool) and value <= LARGEST_FLOAT
    if not is_token or not is_bias:
        raise MarsError(
            f"logit_bias has {short_repr(token)}: {short_repr(value)}: expected {expected} and a number, or -inf to "
            "ban it."
        )
    return int(token), float(value)


def edited(
    logits: Array,
    edits: Edits,
    tree: DraftTree,
    tokens: Array,
    prompt_length: Array,
    length: Array,
    stop_tokens: Array,
) -> Array:
    """Apply each row's edits to the target's logits f32[B, N, V] at the nodes of a draft tree.

    Args:
      logits: f32[B, N, V]; the target's raw logits.
      edits: the edits of the batch.
      tree: the draft, whose root is the last committed token.
      tokens: i32[B, T]; the first `length` tokens of a row are committed.
      prompt_length, length: i32[B]; numbers of tokens in the prompt, and in the prompt and output together.
      stop_tokens: i32[B, S]; padded with NO_TOKEN.
    """
    vocab = logits.shape[-1]

    def scatter_add(ids: Array, values: Array) -> Array:
        """Sum values [B, M] by token id i32[B, M] into f32[B, V]; drop ids outside the vocabulary."""
        ids = jnp.where(ids < 0, vocab, ids)  # -1 would index the last token
        zeros = jnp.zeros((vocab,), jnp.float32)
        return jax.vmap(lambda i, v: zeros.at[i].add(v, mode="drop"))(ids, values)

    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    committed = place < length[:, None]
    # f32[B, V] each: how often every token occurs in the prompt and in the output. The presence and frequency penalties
    # use only the output; the repetition penalty uses both.
    prompt_counts = scatter_add(tokens, (committed & (place < prompt_length[:, None])).astype(jnp.float32))
    output_counts = scatter_add(tokens, (committed & (place >= prompt_length[:, None])).astype(jnp.float32))
    # bool[B, N, N]: entry [b, i, j] is True if node j is on the path to node i, including i itself and excluding the
    # root. These drafted tokens precede the token that node i predicts. The root is committed, so the counts above
    # include it.
    branch = ancestors(tree.parents, tree.max_depth).at[:, :, 0].set(False)
    drafted_one_hot = jax.nn.one_hot(tree.tokens, vocab, dtype=jnp.float32)
    # f32[B, N, V]: how often each token occurs in the output and on the path to each node.
    counts = output_counts[:, None] + jnp.einsum("bij,bjv->biv", branch.astype(jnp.float32), drafted_one_hot)

    def per_row(values: Array) -> Array:
        return values[:, None, None]

    # Apply the edits in the same order as transformers: bias, penalties, minimum length.
    z = logits.astype(jnp.float32) + scatter_add(edits.bias_tokens, edits.bias)[:, None]
    # The CTRL penalty as in transformers: a value above 1 lowers both positive and negative logits.
    is_repeated = (counts > 0) | (prompt_counts > 0)[:, None]
    repetition_factor = jnp.where(z < 0, per_row(edits.repetition), 1 / per_row(edits.repetition))
    z = jnp.where(is_repeated, z * repetition_factor, z)
    z = z - jnp.where(counts > 0, per_row(edits.presence), 0.0)
    z = z - per_row(edits.frequency) * counts
    # i32[B, N]: the number of output tokens that precede the token predicted by each node.
    num_generated = (length - prompt_length)[:, None] + jnp.sum(branch, axis=-1, dtype=jnp.int32)
    is_early = num_generated < edits.min_new_tokens[:, None]
    is_stop = scatter_add(stop_tokens, jnp.ones(stop_tokens.shape, jnp.float32)) > 0
    return jnp.where(is_early[..., None] & is_stop[:, None], -jnp.inf, z)
