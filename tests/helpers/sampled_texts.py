"""Sampled completions of three tokens, and the exact law of their tokens."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np

from mars_jax.core import fake
from tests.helpers import decode_all, logits_after, rule_oracles

SMALL_VOCAB, PROMPT = 6, [3, 1, 4]
TARGET = fake.hash_model(vocab_size=SMALL_VOCAB, agree=0.5)
SMALL = fake.hash_model(vocab_size=SMALL_VOCAB, seed=5, agree=0.5)
SETTINGS = (0.9, 4, 1.0, 0.0)


@functools.cache
def law(model):
    """Return the processed probabilities of the next three tokens; entry d is f64 with d + 1 axes."""
    tables = []
    for depth in range(3):
        prefixes = itertools.product(range(SMALL_VOCAB), repeat=depth)
        logits = [logits_after(model, [*PROMPT, *prefix], width=8) for prefix in prefixes]
        tables.append(np.stack(logits).reshape((SMALL_VOCAB,) * (depth + 1)))
    return rule_oracles.processed_tables(tables, SETTINGS)


def sampled(drafter, rule, rows=12_000):
    """Return three tokens after the prompt in every row, and the mean tokens per step."""
    prompts = jnp.tile(jnp.asarray([[*PROMPT, 0, 0, 0]], jnp.int32), (rows, 1))
    lengths = jnp.full((rows,), len(PROMPT), jnp.int32)
    temperature, top_k, *_ = SETTINGS
    state, stats = decode_all(TARGET, drafter, rule, prompts, lengths, temperature=temperature, top_k=top_k)
    return np.asarray(state.tokens)[:, 3:], float(stats.emitted.sum() / stats.steps.sum())
