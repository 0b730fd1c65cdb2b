"""Train SPRINTER's classifier: would the target accept this token of the small model's?

B rows, L tokens of a row, n = L - 1 places, E hidden size of the small model, V vocabulary. Source: arXiv 2502.04557,
section 3 (logistic regression on the last hidden state, binary cross entropy, Adam at 5e-4, 20 epochs). The paper's
label is the outcome of one test of acceptance; ours is its chance, the mean of that label.
Oracle: labels from full forwards, branch by branch, in tests/lab/training/test_systems.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from mars_jax.core.types import LanguageModel, PyTree, Visible
from mars_jax.lab.training.data import Batch
from mars_jax.lab.training.loop import fit
from mars_jax.lab.training.objectives import document_mask, in_documents, predict


class Examples(NamedTuple):
    """Tokens that the small model would draft, each after a place of a text."""

    hidden: Any  # f32[..., E], on the host or a device; of the small model at the drafted token, after its final norm
    # f32[...]; the chance that the target accepts it: min(1, p / q), or whether it is p's best token
    accepted: Any
    valid: Any  # bool[...]; text and draft are of one document


def examples(
    target: LanguageModel, teacher: PyTree, draft: LanguageModel, params: PyTree, batch: Batch, key: Array
) -> Examples:
    """Drafts of the small model at every place of a batch, [B, n].

    Even rows draft the best token, odd ones draw it at temperature 1. All branches of a row are read at once: a drafted
    token sees the text before it and itself.
    """
    tokens, segments = batch.tokens[:, :-1], batch.segments[:, :-1]
    rows, n = tokens.shape
    p = jax.nn.log_softmax(predict(target, teacher, tokens, segments))
    read = draft.forward(params, tokens, in_documents(segments), draft.init_cache(rows, 2 * n))
    logits = draft.unembed(params, read.hidden)
    q = jax.nn.log_softmax(logits)
    drawn = (jnp.arange(rows) % 2 == 1)[:, None]
    x = jnp.where(drawn, jax.random.categorical(key, logits), jnp.argmax(logits, axis=-1)).astype(jnp.int32)

    def of_x(values: Array) -> Array:
        return jnp.take_along_axis(values, x[..., None], axis=-1)[..., 0]

    chance = jnp.where(
        drawn,
        jnp.exp(jnp.minimum(of_x(p) - of_x(q), 0.0)),
        (x == jnp.argmax(p, axis=-1)).astype(jnp.float32),
    )
    place = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (rows, n))
    own = jnp.broadcast_to(jnp.eye(n, dtype=bool), (rows, n, n))
    branches = Visible(
        first=jnp.zeros((rows,), jnp.int32),
        positions=place + 1,
        slot=jnp.full((rows,), n, jnp.int32),
        seen=jnp.concatenate([document_mask(segments), own], axis=2),
        seen_positions=jnp.concatenate([place, place + 1], axis=1),
    )
    hidden = draft.forward(params, x, branches, read.cache).hidden
    valid = jnp.broadcast_to(batch.segments[:, 1:] == segments, (rows, n))
    return Examples(hidden.astype(jnp.float32), chance, valid)


def train(
    data: Examples,
    work: str | os.PathLike[str],
    *,
    epochs: int = 20,
    rows: int = 256,
    learning_rate: float = 5e-4,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Minimise the cross entropy of `accepted`; killed and called again it continues bit for bit.

    Args:
      data: from `examples`, as one array of n examples each.
      work: directory of checkpoints and log.jsonl.
      epochs, rows: over the examples, in steps of `rows`.
      learning_rate: of Adam.
      seed: of the order.

    Returns:
      `weight` f32[E] and `bias` f32[1], as `system_files.save_system` takes them.
    """
    data = Examples(*(np.asarray(x) for x in data))
    kept = np.flatnonzero(data.valid)
    per_epoch = max(1, len(kept) // rows)

    def objective(params: PyTree, batch: Any):
        score = batch.hidden @ params["weight"] + params["bias"]
        loss = jnp.mean(optax.sigmoid_binary_cross_entropy(score, batch.accepted))
        right = jnp.mean(((score > 0) == (batch.accepted > 0.5)).astype(jnp.float32))
        return loss, {"right": right}

    def batch(step: int) -> Examples:
        order = np.random.default_rng((seed, step // per_epoch)).permutation(kept)
        chosen = order[step % per_epoch * rows :][:rows]
        return Examples(*(column[chosen] for column in data))

    size = data.hidden.shape[-1]
    params = fit(
        objective,
        optax.adam(learning_rate),
        lambda: {"weight": jnp.zeros((size,)), "bias": jnp.zeros(())},
        batch,
        steps=epochs * per_epoch,
        directory=Path(work),
        tokens_per_step=rows,
        description="classifier",
    )
    return {
        "weight": np.asarray(params["weight"], np.float32),
        "bias": np.asarray(params["bias"], np.float32)[None],
    }


def flattened(parts: list[Examples]) -> Examples:
    """Examples of several batches as one array of n each.

    >>> flattened([Examples(np.zeros((2, 3, 4)), np.zeros((2, 3)), np.ones((2, 3), bool))]).hidden.shape
    (6, 4)
    """
    size = parts[0].hidden.shape[-1]
    return Examples(
        np.concatenate([np.asarray(x.hidden).reshape(-1, size) for x in parts]),
        *(np.concatenate([np.asarray(x[i]).reshape(-1) for x in parts]) for i in (1, 2)),
    )


def figures(data: Examples, arrays: Mapping[str, np.ndarray], threshold: float) -> dict[str, float]:
    """The share of held-out examples that is trusted, and how much of that the target would accept.

    >>> some = Examples(np.asarray([[1.0], [-1.0]]), np.asarray([0.75, 0.0]), np.ones(2, bool))
    >>> figures(some, {"weight": np.asarray([4.0]), "bias": np.zeros(1)}, 0.5)
    {'trusted': 0.5, 'accepted': 0.75}
    """
    score = data.hidden @ arrays["weight"] + arrays["bias"]
    trusted = (1 / (1 + np.exp(-score)) >= threshold) & data.valid
    share = float(trusted.sum() / max(1, data.valid.sum()))
    accepted = float(data.accepted[trusted].mean()) if trusted.any() else float("nan")
    return {"trusted": round(share, 4), "accepted": round(accepted, 4)}
