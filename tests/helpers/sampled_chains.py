"""Sampled chains with their q, and the probabilities of a table."""

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.core import sampling
from mars_jax.core import tree as trees
from tests.helpers import rule_oracles

sample_processed = jax.jit(sampling.sample_processed)


def probabilities(table):
    result = []
    for logits in table:
        weights = np.exp(logits.astype(np.float64))
        result.append(weights / weights.sum(-1, keepdims=True))
    return result


def sampled_chain(keys, q_table, settings, rows):
    """Return chains drawn from the processed draft tables, with their true q."""
    drafted, logits = np.zeros((rows, 0), int), []
    for i in range(len(q_table)):
        processed = rule_oracles.process(jnp.asarray(rule_oracles.after(q_table, drafted))[:, None], settings)
        logits.append(processed)
        token = sample_processed(keys, np.full((rows, 1), i, np.int32), processed)
        drafted = np.concatenate([drafted, np.asarray(token)], 1)
    logits.append(jnp.zeros_like(logits[0]))
    tokens = np.concatenate([np.zeros((rows, 1), int), drafted], 1)
    return trees.chain(jnp.asarray(tokens, jnp.int32), jnp.concatenate(logits, 1)), drafted
