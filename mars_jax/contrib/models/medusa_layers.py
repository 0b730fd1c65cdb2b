"""Medusa heads: small feed-forward heads on the target's final hidden state, one for each future position.

Source: Medusa 2401.10774, section 2.1. B batch, K heads in use, H heads, E hidden size of the target, V vocabulary.
Tested against a reimplementation in numpy (tests/contrib/test_medusa.py).

Head i predicts the token at position p + 2 + i from the target's hidden state after the final norm at position p. The
target itself predicts the token at p + 1.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.types import PyTree
from mars_jax.models.config import ModelConfig
from mars_jax.models.heads import Axes, HeadConfig
from mars_jax.models.heads import init_params as init_params
from mars_jax.models.layers import dense
from mars_jax.models.weights import Weight
from mars_jax.utils.errors import MarsError


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Static configuration of a set of Medusa heads.

    Raises:
      MarsError: a size is out of range.
    """

    kind = "medusa"
    axes: ClassVar[Axes] = {"weight": (None, "features")}
    num_heads: int  # H
    num_layers: int  # number of residual blocks in each head
    hidden_size: int  # E, hidden size of the target
    vocab_size: int  # V, vocabulary size of the target

    def __post_init__(self):
        if min(self.num_heads, self.hidden_size, self.vocab_size) < 1 or self.num_layers < 0:
            raise MarsError(f"Medusa heads of {self}: give at least 1 head, and the sizes of the target.")

    @classmethod
    def outline(cls, target: ModelConfig) -> Self:
        """Return the config of heads with the published shape: five heads with one block each."""
        return cls(num_heads=5, num_layers=1, hidden_size=target.hidden_size, vocab_size=target.vocab_size)

    def weights(self) -> tuple[Weight, ...]:
        e, v = self.hidden_size, self.vocab_size
        rows = []
        for i in range(self.num_heads):
            for j in range(self.num_layers):
                block = ("heads", i, "blocks", j)
                rows.append(Weight((*block, "weight"), f"{i}.{j}.linear.weight", (e, e), "normal"))
                rows.append(Weight((*block, "bias"), f"{i}.{j}.linear.bias", (e,), "zeros"))
            rows.append(Weight(("heads", i, "unembed"), f"{i}.{self.num_layers}.weight", (v, e), "normal"))
        return tuple(rows)


@jax.named_scope("unembed")
def logits(params: PyTree, hidden: Array, count: int) -> Array:
    """Return the logits f32[B, K, V] of the first `count` heads from hidden states [B, 1, E].

    >>> config = MedusaConfig(num_heads=3, num_layers=1, hidden_size=4, vocab_size=6)
    >>> logits(init_params(config, jax.random.key(0)), jnp.ones((1, 1, 4)), 2).shape
    (1, 2, 6)
    """

    def head_logits(head: dict) -> Array:
        x = hidden.astype(head["unembed"].dtype)
        for block in head.get("blocks", ()):
            x = x + jax.nn.silu(dense(x, block["weight"], block["bias"]))
        return dense(x, head["unembed"], dtype=jnp.float32)

    return jnp.concatenate([head_logits(head) for head in params["heads"][:count]], axis=1)
