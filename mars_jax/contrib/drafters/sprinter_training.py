"""Training of SPRINTER's classifier, which predicts whether the target would accept a token from the small model.

B rows, L tokens per row, n = L - 1 positions, E hidden size of the small model, V vocabulary. Source: arXiv 2502.04557,
section 3 (logistic regression on the last hidden state, binary cross entropy, Adam at 5e-4, 20 epochs). In the paper, a
label is the outcome of one acceptance test. Here it is the probability of acceptance, which is the mean of that
outcome. Tested against labels from separate forward passes for each branch, in tests/contrib/test_system_training.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.contrib.teaching import (
    Batch,
    Training,
    binary_loss,
    document_mask,
    in_documents,
    predict,
    shuffled,
)
from mars_jax.core.types import LanguageModel, PyTree, Visible

EPOCHS, ROWS = 20, 256
"""Number of epochs over the examples, and number of examples per step."""


class SprinterExamples(NamedTuple):
    """Training examples: the tokens that the small model would draft, one after each position of a document."""

    hidden: Any  # f32[..., E]; the small model's final hidden state at the drafted token
    # f32[...]; label: for a sampled token, the probability of acceptance min(1, p / q); for a greedy token, 1 if it is
    # the target's best token and 0 otherwise
    accepted: Any
    valid: Any  # bool[...]; True if the prefix and the drafted token belong to the same document


def examples(
    target: LanguageModel, teacher: PyTree, draft: LanguageModel, params: PyTree, batch: Batch, key: Array
) -> SprinterExamples:
    """Draft one token with the small model after every position of a batch and return the examples, [B, n].

    Even rows draft the best token; odd rows sample at temperature 1. All branches of a row run in one forward pass, in
    which a drafted token attends to the preceding tokens and to itself.
    """
    tokens, segments = batch.tokens[:, :-1], batch.segments[:, :-1]
    rows, n = tokens.shape
    p = jax.nn.log_softmax(predict(target, teacher, tokens, segments))
    text_output = draft.forward(params, tokens, in_documents(segments), draft.init_cache(rows, 2 * n))
    logits = draft.unembed(params, text_output.hidden)
    q = jax.nn.log_softmax(logits)
    drawn = (jnp.arange(rows) % 2 == 1)[:, None]
    x = jnp.where(drawn, jax.random.categorical(key, logits), jnp.argmax(logits, axis=-1)).astype(jnp.int32)

    def of_x(values: Array) -> Array:
        return jnp.take_along_axis(values, x[..., None], axis=-1)[..., 0]

    # The label of a sampled token is min(1, p / q). The label of a greedy token is 1 if it is the target's best token,
    # and 0 otherwise.
    accept_prob = jnp.exp(jnp.minimum(of_x(p) - of_x(q), 0.0))
    acceptance = jnp.where(drawn, accept_prob, (x == jnp.argmax(p, axis=-1)).astype(jnp.float32))
    text_positions = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (rows, n))
    # Slots [0, n) contain the document tokens. Slots [n, 2 n) contain the drafted tokens. The position of a drafted
    # token is that of the document token it follows, plus 1.
    sees_itself = jnp.broadcast_to(jnp.eye(n, dtype=bool), (rows, n, n))
    branch_visible = Visible(
        first=jnp.zeros((rows,), jnp.int32),
        positions=text_positions + 1,
        slot=jnp.full((rows,), n, jnp.int32),
        seen=jnp.concatenate([document_mask(segments), sees_itself], axis=2),
        seen_positions=jnp.concatenate([text_positions, text_positions + 1], axis=1),
    )
    hidden = draft.forward(params, x, branch_visible, text_output.cache).hidden
    is_valid = jnp.broadcast_to(batch.segments[:, 1:] == segments, (rows, n))
    return SprinterExamples(hidden.astype(jnp.float32), acceptance, is_valid)


def flattened(parts: Sequence[SprinterExamples]) -> SprinterExamples:
    """Join the valid examples of several batches into arrays [n, ...].

    >>> flattened([SprinterExamples(np.zeros((2, 3, 4)), np.zeros((2, 3)), np.ones((2, 3), bool))]).hidden.shape
    (6, 4)
    """
    valid_parts = []
    for part in parts:
        is_valid = np.asarray(part.valid)
        valid_parts.append([np.asarray(column)[is_valid] for column in part])
    return SprinterExamples(*map(np.concatenate, zip(*valid_parts, strict=True)))


def classifier_training(
    examples: SprinterExamples, *, learning_rate: float = 5e-4, seed: int = 0
) -> Training:
    """Return the training setup that fits `weight` f32[E] and `bias` f32[1] to the labels by binary cross entropy.

    Args:
      examples: training examples, from `flattened`.
      learning_rate: learning rate of Adam.
      seed: seed that determines the order of the examples.
    """
    import optax

    def loss(params: PyTree, batch: SprinterExamples, _: PyTree) -> tuple[Array, dict[str, Array]]:
        return binary_loss(batch.hidden @ params["weight"] + params["bias"], batch.accepted)

    num_examples, hidden_size = examples.hidden.shape
    return Training(
        init=lambda: {"weight": jnp.zeros((hidden_size,)), "bias": jnp.zeros((1,))},
        loss=loss,
        batches=shuffled(examples, ROWS, seed),
        optimizer=optax.adam(learning_rate),
        steps=EPOCHS * max(1, num_examples // ROWS),
        step_tokens=ROWS,
    )


def figures(examples: SprinterExamples, params: Mapping[str, Any], threshold: float) -> dict[str, float]:
    """Return the share of valid examples that would be trusted, and the mean label of the trusted ones.

    >>> some = SprinterExamples(np.asarray([[1.0], [-1.0]]), np.asarray([0.75, 0.0]), np.ones(2, bool))
    >>> figures(some, {"weight": np.asarray([4.0]), "bias": np.zeros(1)}, 0.5)
    {'trusted': 0.5, 'accepted': 0.75}
    """
    log_odds = examples.hidden @ np.asarray(params["weight"]) + np.asarray(params["bias"])
    is_trusted = (1 / (1 + np.exp(-log_odds)) >= threshold) & examples.valid
    trusted_share = float(is_trusted.sum() / max(1, examples.valid.sum()))
    accepted_share = float(examples.accepted[is_trusted].mean()) if is_trusted.any() else float("nan")
    return {"trusted": round(trusted_share, 4), "accepted": round(accepted_share, 4)}
