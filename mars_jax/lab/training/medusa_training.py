"""Training of Medusa heads: head i learns the target's distribution i + 2 tokens ahead.

Source: Medusa 2401.10774, section 2.2. B rows, L tokens per row, E hidden size, V vocabulary, H heads.
Oracle: acceptance of the exported heads (tests/lab/commands/test_distill.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.contrib.models import medusa_layers
from mars_jax.contrib.models.medusa_layers import MedusaConfig
from mars_jax.contrib.teaching import Batch, teach
from mars_jax.core.types import PyTree
from mars_jax.lab.training import objectives
from mars_jax.lab.training.eagle_training import unembedding
from mars_jax.lab.training.loop import Apprentice
from mars_jax.lab.training.objectives import Divergence, cast
from mars_jax.models.config import ModelConfig
from mars_jax.models.heads import init_params
from mars_jax.models.transformer import language_model


def new_medusa(
    target: ModelConfig, params: PyTree, *, count: int = 4, divergence: Divergence, seed: int = 0
) -> Apprentice:
    """Return an apprentice for `count` heads of one block each that start from the target's unembedding."""
    config = MedusaConfig(
        num_heads=count, num_layers=1, hidden_size=target.hidden_size, vocab_size=target.vocab_size
    )
    model = language_model(target, dtype="bfloat16")

    def init() -> PyTree:
        initial_params = init_params(config, jax.random.key(seed))
        for head in initial_params["heads"]:
            head["unembed"] = unembedding(params)
            head["blocks"][0]["weight"] = jnp.zeros_like(head["blocks"][0]["weight"])
        return initial_params

    def loss(params: PyTree, batch: Batch, teacher: PyTree) -> tuple[Array, dict[str, Array]]:
        lesson = teach(model, teacher, batch)
        rows, length, hidden_size = lesson.output.hidden.shape
        hidden = lesson.output.hidden.reshape(rows * length, 1, hidden_size)
        head_params = cast(params, "bfloat16")
        draft_logits = medusa_layers.logits(head_params, hidden, count).reshape(rows, length, count, -1)
        segments, head_losses, head_acceptance = batch.segments, [], []
        for i in range(count):
            # Head i reads position t and drafts token t + 2 + i, which the target predicts at position t + 1 + i.
            n = length - 1 - i
            logits, target_logits = draft_logits[:, :n, i], lesson.logits[:, 1 + i :]
            valid = segments[:, :n] == segments[:, 1 + i : length]
            is_same = (jnp.argmax(logits, axis=-1) == jnp.argmax(target_logits, axis=-1)).astype(jnp.float32)
            head_losses.append(objectives.masked_mean(divergence(target_logits, logits), valid))
            head_acceptance.append(objectives.masked_mean(is_same, valid))
        return objectives.chain_mean(head_losses), objectives.chain_figures(head_losses, head_acceptance)

    return Apprentice(config=config, init=init, loss=loss)
