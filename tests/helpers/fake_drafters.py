"""Drafters on the hash model, a fake target that exposes wrong masks, positions, slots and rollbacks."""

import dataclasses

import jax
import jax.numpy as jnp

from mars_jax import drafters
from mars_jax.core import fake
from mars_jax.core.drafter import Drafter
from mars_jax.core.tree import last_token
from mars_jax.core.types import DraftTree

VOCAB = 13
TARGET = fake.hash_model(vocab_size=VOCAB, agree=0.8)
SMALL = fake.hash_model(vocab_size=VOCAB, seed=5, agree=0.8)


@dataclasses.dataclass(frozen=True)
class RandomTree(Drafter):
    """Draft a new random tree per row and step, whose shape is data. Tokens are below 3, or padding."""

    max_depth: int = 4
    num_nodes: int = 10
    name: str = "random tree"

    def propose(self, params, state, inputs):
        def one(key):
            spread, token = jax.random.split(key)
            picks = jax.random.uniform(spread, (self.num_nodes,))
            parents, depths = [jnp.int32(-1)], [jnp.int32(0)]
            for i in range(1, self.num_nodes):
                # Nodes at the maximum depth take no children; the root always can.
                open_ = jnp.stack([d < self.max_depth for d in depths])
                rank = jnp.floor(picks[i] * jnp.sum(open_, dtype=jnp.float32)).astype(jnp.int32)
                parent = jnp.argmax(jnp.cumsum(open_, dtype=jnp.int32) == rank + 1).astype(jnp.int32)
                parents.append(parent)
                depths.append(jnp.stack(depths)[parent] + 1)
            # Few ids give long accepted paths and repeated siblings.
            drafted = jax.random.randint(token, (self.num_nodes,), -1, 3)
            return jnp.stack(parents), jnp.stack(depths), drafted

        parents, depths, drafted = jax.vmap(one)(inputs.keys)
        tree = DraftTree(
            tokens=jnp.concatenate([last_token(inputs), drafted[:, 1:]], axis=1),
            parents=parents,
            depths=depths,
            max_depth=self.max_depth,
            is_chain=False,
        )
        return tree, state


DRAFTERS = {
    "ngram": drafters.ngram(4),
    "chain": drafters.language_model(SMALL, 5),
    "chain of 1": drafters.language_model(SMALL, 1),
    "sampled chain": drafters.language_model(SMALL, 4, sample=True),
    "static tree": drafters.language_model(SMALL, tree=(4, 2, 2, 1)),
    "random tree": RandomTree(),
}
