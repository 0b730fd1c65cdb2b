"""Random arguments of `margin_accept`."""

import jax.numpy as jnp
import numpy as np

from kernels_pallas import AcceptControls


def random_controls(rng, batch, *, stops=2, vocab=40):
    theta = rng.choice([0.3, 0.8, 0.9, 2.0, np.inf], size=batch, p=[0.3, 0.2, 0.2, 0.2, 0.1])
    stop_tokens = np.where(rng.random((batch, stops)) < 0.5, rng.integers(0, vocab, (batch, stops)), -1)
    return AcceptControls(
        jnp.asarray(theta, jnp.float32),
        jnp.asarray(rng.random(batch) < 0.1),
        jnp.asarray(rng.choice([0, 1, 2, 99], size=batch), jnp.int32),
        jnp.asarray(stop_tokens, jnp.int32),
    )


def random_trees(rng, logits, depth, *, chain=False):
    """Return trees whose tokens are mostly among the target's best three, so that walks go deep; some are padding."""
    batch, nodes, vocab = logits.shape
    best = np.argsort(-np.asarray(logits, np.float32), axis=-1)[..., : min(3, vocab)]
    parents = np.full((batch, nodes), -1)
    depths = np.zeros((batch, nodes), np.int64)
    tokens = rng.integers(0, vocab, (batch, nodes))
    for b in range(batch):
        for i in range(1, nodes):
            parent = i - 1 if chain else rng.choice(np.flatnonzero(depths[b, :i] < depth))
            parents[b, i], depths[b, i] = parent, depths[b, parent] + 1
            kind = rng.random()
            if kind < 0.9:
                tokens[b, i] = rng.choice(best[b, parent])
            elif kind < 0.95:
                tokens[b, i] = -1
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(parents, jnp.int32)


def accept_case(seed, batch, nodes, depth, vocab, *, chain=False, sampled=False, dtype=jnp.float32):
    """Return (logits, tokens, parents, y, controls), and the option `max_depth`."""
    rng = np.random.default_rng(seed)
    # Round the logits, so that ties and margins exactly at theta occur.
    z = np.round(rng.normal(1.0, 2.0, size=(batch, nodes, vocab)) * 4) / 4
    logits = jnp.asarray(z, jnp.float32).astype(dtype)
    tokens, parents = random_trees(rng, logits, depth, chain=chain)
    y = None
    if sampled:
        best = np.argsort(-z, axis=-1, kind="stable")
        y = np.take_along_axis(best, rng.integers(0, min(3, vocab), (batch, nodes, 1)), axis=-1)[..., 0]
        # -1 leaves the choice of some nodes to the rule, which takes the best token.
        y = jnp.asarray(np.where(rng.random(y.shape) < 0.2, -1, y), jnp.int32)
    return (logits, tokens, parents, y, random_controls(rng, batch, vocab=vocab)), {"max_depth": depth}
