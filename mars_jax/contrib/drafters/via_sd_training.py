"""Search for VIA-SD's slim verifier: the target without the sublayers whose removal changes its output least.

L layers. Source: arXiv 2606.12243, section 3. About 45% of the sublayers (attention or MLP) are removed, but none from
the first or the last layer. A random search followed by a guided one looks for the mask with the lowest mean
KL(target || slim). If there are no more masks than evaluations, all masks are tried. Otherwise, half of the evaluations
try random masks, and the other half take the best mask and swap a kept sublayer with a removed one. Tested against
models that lack the removed sublayers, one mask at a time, in tests/contrib/test_system_training.py.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from mars_jax.contrib.teaching import Batch, predict
from mars_jax.core.types import LanguageModel, PyTree
from mars_jax.utils.errors import MarsError

Mask = tuple[tuple[bool, bool], ...]
"""For each layer, whether its attention and its MLP are kept, as (attention, MLP)."""
Sublayers = frozenset[tuple[int, int]]
"""A set of sublayers, each given as (layer, 0 for attention or 1 for MLP)."""
_OUT = {"o": 0, "o_bias": 0, "down": 1, "down_bias": 1, "expert_down": 1}
"""Weights whose output is added to the residual stream, each with the index of its sublayer in a mask's pair."""


class Found(NamedTuple):
    """A mask and its divergence from the target."""

    mask: Mask
    kl: float  # KL(target || slim) in nats per token
    same: float  # share of positions at which both models have the same best next token


def leave_out(params: PyTree, mask: Array) -> PyTree:
    """Disable the sublayers for which mask f32[L, 2] is 0, by scaling their outputs. All masks share one program.

    >>> params = {"layers": ({"o": jnp.ones((2, 2)), "down": jnp.ones((2, 2))},)}
    >>> [float(x.sum()) for x in leave_out(params, jnp.asarray([[0.0, 1.0]]))["layers"][0].values()]
    [0.0, 4.0]
    """
    layers = [dict(layer) for layer in params["layers"]]
    for i, layer in enumerate(layers):
        for name in [name for name in layer if name in _OUT]:
            layer[name] = layer[name] * mask[i, _OUT[name]].astype(layer[name].dtype)
    return {**params, "layers": tuple(layers)}


def search(
    model: LanguageModel,
    params: PyTree,
    batches: Sequence[Batch],
    *,
    log: Path,
    left_out: float,
    evaluations: int = 128,
    seed: int = 0,
) -> Found:
    """Search for the mask with the lowest mean KL(target || slim) over the batches.

    Args:
      model, params: the target, a transformer of this library whose weights are not 8-bit.
      batches: batches of tokens on which to compare the models.
      log: file that records each mask on a line of its own; an interrupted search resumes from it.
      left_out: share of all sublayers to remove.
      evaluations: maximum number of masks to try.
      seed: seed of the search.

    Raises:
      MarsError: the weights are 8-bit, or `left_out` removes no sublayer at all, or more sublayers than there are
        between the first and the last layer.
    """
    num_layers = len(params["layers"])
    # (layer, 0 for attention or 1 for MLP). The first and the last layer are always kept.
    sublayers = [(i, j) for i in range(1, num_layers - 1) for j in range(2)]
    num_out = round(left_out * 2 * num_layers)
    if not 0 < num_out <= len(sublayers):
        raise MarsError(
            f"{num_out} of {2 * num_layers} sublayers are to be left out, and {len(sublayers)} lie between the first "
            "and the last layer: choose another share."
        )
    output_matrices = [layer[name] for layer in params["layers"] for name in _OUT if name in layer]
    if not all(isinstance(matrix, Array) for matrix in output_matrices):
        raise MarsError("the target's weights are in 8 bits: search on the checkpoint in bfloat16.")

    @jax.jit
    def measure(params: PyTree, mask: Array, batch: Batch) -> tuple[Array, Array]:
        tokens, segments = batch.tokens[:, :-1], batch.segments[:, :-1]
        p = predict(model, params, tokens, segments)
        q = predict(model, leave_out(params, mask), tokens, segments)
        is_same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
        # optax takes the predictions first: this is KL(p || q) for the target's p and the slim model's q.
        divergence = optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(q), jax.nn.log_softmax(p))
        return jnp.mean(divergence), jnp.mean(is_same.astype(jnp.float32))

    def as_mask(out: Sublayers) -> Mask:
        return tuple(((i, 0) not in out, (i, 1) not in out) for i in range(num_layers))

    results_by_mask = _logged(log)

    def evaluate(out: Sublayers) -> Found:
        mask = as_mask(out)
        if mask not in results_by_mask:
            mask_array = jnp.asarray(mask, jnp.float32)
            kl_and_same = np.mean(
                [[float(x) for x in measure(params, mask_array, batch)] for batch in batches], axis=0
            )
            results_by_mask[mask] = Found(mask, float(kl_and_same[0]), float(kl_and_same[1]))
            with log.open("a") as file:
                file.write(json.dumps(results_by_mask[mask]._asdict()) + "\n")
        return results_by_mask[mask]

    return min(_evaluate(sublayers, num_out, evaluations, seed, evaluate), key=lambda result: result.kl)


def _evaluate(
    places: list[tuple[int, int]],
    count: int,
    evaluations: int,
    seed: int,
    evaluate: Callable[[Sublayers], Found],
) -> Iterator[Found]:
    """Yield the result of each mask that the search tries. A mask removes `count` of the sublayers in `places`."""
    if math.comb(len(places), count) <= evaluations:
        yield from (evaluate(frozenset(removed)) for removed in itertools.combinations(places, count))
        return
    rng, best_result, best_removed = np.random.default_rng(seed), None, frozenset()
    for evaluation in range(evaluations):
        if best_result is None or evaluation < evaluations // 2:
            candidate = frozenset(places[i] for i in rng.choice(len(places), count, replace=False))
        else:
            # Start from the best mask, and swap one of the sublayers that it removes for one that it keeps.
            removed, kept = sorted(best_removed), sorted(set(places) - best_removed)
            candidate = best_removed - {removed[rng.integers(len(removed))]} | {kept[rng.integers(len(kept))]}
        result = evaluate(candidate)
        if best_result is None or result.kl < best_result.kl:
            best_result, best_removed = result, candidate
        yield result


def _logged(log: Path) -> dict[Mask, Found]:
    """Read the results of an earlier search. Skip a line that is incomplete because the search was killed."""
    results_by_mask: dict[Mask, Found] = {}
    with log.open("a+") as file:
        file.seek(0)
        text = file.read()
        if text and not text.endswith("\n"):
            file.write("\n")  # so that the next line is not appended to the incomplete one
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        mask = tuple((bool(a), bool(m)) for a, m in record["mask"])
        results_by_mask[mask] = Found(mask, record["kl"], record["same"])
    return results_by_mask
