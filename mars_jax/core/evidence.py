"""The input of a rule. B batch, N nodes, V vocabulary, E hidden size. Oracle: none, it makes no decision."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from kernels_pallas import MarginStats, margin_stats, sharded_margin_stats
from mars_jax.core import struct
from mars_jax.core.controls import make_controls
from mars_jax.core.mesh import vocabulary_axes
from mars_jax.core.types import Controls, DraftTree, PyTree, keys_from_seeds


@struct.dataclass(kw_only=True)
class Evidence:
    """The input of a rule in one step. New fields change no rule's signature.

    Row i of the logits is p(. | the text up to node i), so a node's token is judged by the logits of its parent. In the
    example, the target's top token after the root is 1, which node 1 holds; after node 1 it is 3, but node 2 holds 2.

    >>> from mars_jax.core.tree import at_parent, chain
    >>> tree = chain(jnp.asarray([[0, 1, 2]], jnp.int32))
    >>> inputs = evidence(tree, jnp.asarray([[[0.0, 9.0, 0.0, 0.0], [0.0, 0.0, 1.0, 8.0], [0.0] * 4]]))
    >>> (tree.tokens == at_parent(tree, inputs.stats.id1)).tolist()  # the root has no parent and is not judged
    [[False, True, False]]
    """

    keys: Array  # key[B]; constant over a row's life: fold in the position, as `sampling.node_uniforms` does
    start: Array  # i32[B]; position of the root
    prompt_length: Array  # i32[B]; tokens of the prompt
    tree: DraftTree  # the draft, [B, N]
    # f32[B, N, V]; target logits before temperature, with the edits and the constraint of the row applied
    logits: Array
    hidden: Array  # [B, N, E]; hidden states of the target after its final norm
    controls: Controls  # of the rows, [B]
    params: PyTree = ()  # Params.verify
    # bool[B, N] or None; a span makes the edges below these nodes strict, see `guide`
    strict_nodes: Array | None = None

    @property
    def positions(self) -> Array:
        """i32[B, N]: the absolute position of every node."""
        return self.start[:, None] + self.tree.depths

    @property
    def generated(self) -> Array:
        """i32[B]: the number of tokens generated before this step, not counting the prompt."""
        return self.start + 1 - self.prompt_length

    @property
    def stats(self) -> MarginStats:
        """The two largest raw logits of every node and their ids, [B, N] each. XLA merges repeated computations."""
        return node_stats(self.logits)


def node_stats(logits: Array, *, logsumexp: bool = False) -> MarginStats:
    """Compute margin statistics per node, [B, N] each, of logits f32[B, N, V], possibly sharded over the vocabulary."""
    axes = vocabulary_axes(logits.shape[-1])
    if axes:
        return sharded_margin_stats(logits, axis=axes, logsumexp=logsumexp)
    return margin_stats(logits, logsumexp=logsumexp)


def evidence(tree: DraftTree, logits: Array, *, seeds: Any = None, **given: Any) -> Evidence:
    """Build `Evidence` by hand, to call a rule outside of a step.

    Args:
      tree, logits: of the step.
      seeds: u32[B]; default: 0, 1, 2, ...
      **given: other fields of `Evidence`, or arguments of `make_controls`; default: greedy rows that start at 0.

    >>> from mars_jax.core.tree import chain
    >>> inputs = evidence(chain(jnp.asarray([[0, 1]], jnp.int32)), jnp.zeros((1, 2, 4)), temperature=0.7)
    >>> inputs.positions.tolist(), inputs.controls.temperature.tolist()
    ([[0, 1]], [0.699999988079071])
    """
    batch, n = tree.tokens.shape
    fields = {name: given.pop(name) for name in Evidence.__dataclass_fields__ if name in given}
    if "controls" not in fields:
        fields["controls"] = make_controls(batch, **{"limit": 1 << 20, **given})
    zeros = jnp.zeros((batch,), jnp.int32)
    defaults: dict[str, Any] = {
        "keys": keys_from_seeds(jnp.arange(batch) if seeds is None else jnp.asarray(seeds)),
        "start": zeros,
        "prompt_length": zeros + 1,
        "hidden": jnp.zeros((batch, n, 1)),
    }
    return Evidence(tree=tree, logits=logits, **defaults | fields)
