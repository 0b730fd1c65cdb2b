"""Drafters on the hash model, a fake target that exposes wrong masks, positions, slots and rollbacks."""

import functools

import jax
import jax.numpy as jnp

from mars_jax import drafters
from mars_jax.core import fake
from mars_jax.core.drafter import Drafter
from mars_jax.core.types import DraftTree

VOCAB = 13
TARGET = fake.hash_model(vocab_size=VOCAB, agree=0.8)
SMALL = fake.hash_model(vocab_size=VOCAB, seed=5, agree=0.8)


@functools.lru_cache
def random_tree_drafter(num_nodes=10, max_depth=4):
    """Return a drafter of a new random tree per row and step, whose shape is data. Tokens are below 3, or padding."""

    def propose(params, state, given):
        keys, tokens, length = given.keys, given.tokens, given.length

        def one(key):
            spread, token = jax.random.split(key)
            picks = jax.random.uniform(spread, (num_nodes,))
            parents, depths = [jnp.int32(-1)], [jnp.int32(0)]
            for i in range(1, num_nodes):
                # Nodes at the maximum depth take no children; the root always can.
                open_ = jnp.stack([d < max_depth for d in depths])
                rank = jnp.floor(picks[i] * jnp.sum(open_, dtype=jnp.float32)).astype(jnp.int32)
                parent = jnp.argmax(jnp.cumsum(open_, dtype=jnp.int32) == rank + 1).astype(jnp.int32)
                parents.append(parent)
                depths.append(jnp.stack(depths)[parent] + 1)
            # Few ids give long accepted paths and repeated siblings.
            drafted = jax.random.randint(token, (num_nodes,), -1, 3)
            return jnp.stack(parents), jnp.stack(depths), drafted

        parents, depths, drafted = jax.vmap(one)(keys)
        root = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
        tree = DraftTree(
            tokens=jnp.concatenate([root, drafted[:, 1:]], axis=1),
            parents=parents,
            depths=depths,
            max_depth=max_depth,
            is_chain=False,
        )
        return tree, state

    return Drafter(
        init=lambda params, tokens, length: (),
        propose=propose,
        update=lambda params, state, tree, verdict, output, length: state,
        num_nodes=num_nodes,
        max_depth=max_depth,
        name="random tree",
    )


DRAFTERS = {
    "ngram": drafters.ngram(4),
    "chain": drafters.language_model(SMALL, 5),
    "chain of 1": drafters.language_model(SMALL, 1),
    "sampled chain": drafters.language_model(SMALL, 4, sample=True),
    "static tree": drafters.language_model(SMALL, tree=(4, 2, 2, 1)),
    "random tree": random_tree_drafter(),
}
