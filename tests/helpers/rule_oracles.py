"""Helpers of the verifier tests: tables of a prefix-dependent target, completions, and slow references."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from mars_jax.core import sampling
from tests.helpers import make_rows

# Per-row settings of the distribution tests: temperature, top_k, top_p, min_p.
SETTINGS = [
    (0.7, 0, 1.0, 0.0),
    (0.7, 3, 1.0, 0.0),
    (0.7, 0, 0.8, 0.0),
    (1.3, 3, 0.9, 0.0),
    (1.0, 0, 1.0, 0.15),
]


def controls_of(rows, **settings):
    columns = np.asarray(rows, float).T
    return make_rows(
        len(rows),
        limit=99,
        temperature=columns[0],
        top_k=columns[1].astype(int),
        top_p=columns[2],
        min_p=columns[3],
        **settings,
    )


def tables(seed: int, vocab: int, depth: int, scale: float = 1.5) -> list[np.ndarray]:
    """Return logits of the next token after every prefix: entry d is f32[V, ..., V] with d + 1 axes."""
    rng = np.random.default_rng(seed)
    return [rng.normal(0, scale, (vocab,) * (d + 1)).astype(np.float32) for d in range(depth)]


def after(table: list[np.ndarray], prefixes: np.ndarray) -> np.ndarray:
    """Look up the logits f32[R, V] after the prefixes int[R, d]."""
    depth = prefixes.shape[1]
    return table[depth][tuple(prefixes.T)] if depth else np.tile(table[0], (len(prefixes), 1))


process = jax.jit(sampling.process)


def processed_tables(table: list[np.ndarray], row) -> list[np.ndarray]:
    """Return the probabilities f64 under one row of settings."""
    vocab = table[0].size
    # All prefixes at once, for a single compilation.
    nodes = np.concatenate([logits.reshape(-1, vocab) for logits in table])
    weights = np.exp(np.asarray(process(jnp.asarray(nodes)[None], controls_of([row])), np.float64))[0]
    weights /= weights.sum(-1, keepdims=True)
    ends = np.cumsum([logits.size // vocab for logits in table])
    return [p.reshape(x.shape) for p, x in zip(np.split(weights, ends[:-1]), table, strict=True)]


def sequence_probabilities(probabilities: list[np.ndarray]) -> np.ndarray:
    """Return f64[V, ..., V]: the probability of every sequence of the table's length."""
    joint = probabilities[0]
    for p in probabilities[1:]:
        joint = joint[..., None] * p
    return joint


def emitted(tokens: np.ndarray, verdict) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens int[B, D + 1] that a step emits (garbage after the count) and their count int[B]."""
    path, count = np.asarray(verdict.path), np.asarray(verdict.num_accepted)
    walked = np.take_along_axis(np.asarray(tokens), path[:, 1:], 1)
    out = np.concatenate([walked, np.zeros((len(path), 1), int)], 1)
    out[np.arange(len(path)), count] = np.asarray(verdict.next_token)
    return out, count + 1


def complete(rng, out: np.ndarray, count: np.ndarray, probabilities: list[np.ndarray]) -> np.ndarray:
    """Continue every row with samples of the target: after a lossless step the sequences have the target's law."""
    out = out.copy()
    for i in range(out.shape[1]):
        p = after(probabilities, out[:, :i])
        draw = (rng.random((len(out), 1)) < np.cumsum(p, -1) / p.sum(-1, keepdims=True)).argmax(-1)
        out[:, i] = np.where(i < count, out[:, i], draw)
    return out


def chi_square(sequences: np.ndarray, joint: np.ndarray) -> float:
    """Return the p-value of sequences int[R, L] under joint f64[V, ..., V]. Rare categories are merged into one."""
    counts = np.bincount(np.ravel_multi_index(tuple(sequences.T), joint.shape), minlength=joint.size)
    expected = joint.ravel() * len(sequences)
    assert counts[expected == 0].sum() == 0, "a token that the processed target excludes was emitted"
    rare = expected < 5
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    used = expected > 0
    return float(stats.chisquare(counts[used], expected[used]).pvalue) if used.sum() > 1 else 1.0


def keys_of(seed: int, rows: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), rows)


def same_verdict(a, b) -> None:
    for name in ("path", "num_accepted", "next_token", "relaxed"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
