"""Find where a rule would have let the runner-up pass, on texts that are given.

B rows, L tokens of a text. Oracle: the margins of the likelihoods, in tests/lab/evaluate/test_compounding.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax import verify
from mars_jax.contrib.teaching import read
from mars_jax.core.errors import MarsError
from mars_jax.core.mesh import by_rows, size_of
from mars_jax.core.rule import LoadedRule, facts, for_rows
from mars_jax.core.tree import chain
from mars_jax.core.types import LanguageModel
from mars_jax.hub.pretrained import Pretrained
from mars_jax.placement.hosts import fetch
from mars_jax.serve.likelihood import POSITIONS, ROWS, batches


def check_low(rule: Any) -> None:
    """Raise MarsError for a rule that does not say at which nodes it relaxes.

    >>> check_low(verify.mars())
    """
    if not isinstance(rule, verify.Relaxed) or type(rule).low is verify.Relaxed.low:
        raise MarsError(
            f"the rule {facts(rule).name} does not say at which nodes it lets the runner-up pass, so there are no "
            "places where it refused: choose a rule with a method low, as docs/rules.md describes."
        )


def low_nodes(target: Pretrained, rule: LoadedRule, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """bool[L - 1] of each text: whether the rule is indifferent where token t + 1 was chosen.

    Args:
      target: the model.
      rule: whose numbers are one for all texts.
      texts: token ids, at least two each and within the model's context.

    Raises:
      MarsError: as `check_low`.
    """
    check_low(rule.rule)
    found = [np.zeros(0, bool)] * len(texts)
    rows = ROWS
    if target.mesh is not None:
        rows += -rows % size_of("data", target.mesh)
    for group, tokens in batches(texts, rows, target.config.max_positions):
        with target.on_mesh():
            spread = for_rows(rule.rule, len(tokens))
            weights = (target.params, rule.params)
            low = fetch(_low(target.model, weights, jnp.asarray(tokens), spread))
        for row, i in enumerate(group):
            found[i] = low[row, : len(texts[i]) - 1]
    return found


@functools.partial(jax.jit, static_argnums=0)
def _low(model: LanguageModel, weights, tokens, rule):
    return by_rows(functools.partial(_low_rows, model))(weights, tokens, rule)


def _low_rows(model: LanguageModel, weights, tokens, rule):
    params, of_rule = weights
    rows, length = tokens.shape
    hidden = read(model, params, tokens, jnp.zeros_like(tokens)).hidden
    size = min(POSITIONS, length)
    hidden = jnp.pad(hidden, ((0, 0), (0, -length % size), (0, 0)))
    nodes = jnp.pad(tokens, ((0, 0), (0, -length % size)))

    def part(first):
        here = jax.lax.dynamic_slice_in_dim(hidden, first, size, axis=1)
        tree = chain(jax.lax.dynamic_slice_in_dim(nodes, first, size, axis=1))
        start = jnp.full((rows,), first, jnp.int32)
        logits = model.unembed(params, here)
        return rule.low(verify.evidence(tree, logits, hidden=here, start=start, params=of_rule))

    found = jax.lax.map(part, jnp.arange(0, nodes.shape[1], size, dtype=jnp.int32))
    return found.swapaxes(0, 1).reshape(rows, -1)[:, : length - 1]
