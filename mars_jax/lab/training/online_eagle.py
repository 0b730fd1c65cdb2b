"""An EAGLE-3 head that learns from its failures: the update and the measure of `training.online` for it.

Source: as `head_training.eagle3`, at the tokens where drafts were rejected (OSD 2310.07177). The head learns there at
every step of its chain, from the target's features and from its own. B rows, T tokens, n entries, W draft vocabulary.

Oracle: the drafter itself on the same texts (tests/lab/training/test_online.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax import hub
from mars_jax.core.errors import MarsError
from mars_jax.core.types import LanguageModel, Params, PyTree
from mars_jax.lab.training import head_training
from mars_jax.lab.training.data import Batch
from mars_jax.models.eagle_head import EagleConfig

load = hub.load_eagle
DTYPE = "float32"
"""Dtype of the computation: updates are small, and of few texts."""


def with_layers(config: EagleConfig, target: LanguageModel) -> LanguageModel:
    """The target that returns what the head reads.

    Raises:
      MarsError: an EAGLE-1 head, or a target of another form.
    """
    config.check_target(target)
    if config.version != 3:
        raise MarsError(
            "an EAGLE-1 head learns features and not tokens, and is not refined from its failures: train it by "
            "mars_jax.distill."
        )
    if target.with_features is None:
        raise MarsError("an EAGLE-3 head reads the target's layers, and this target gives none: set LanguageModel."
                        "with_features.")  # fmt: skip
    return target.with_features(config.feature_layers)


def without_ids(params: PyTree) -> tuple[PyTree, Any]:
    """(what is trained of a head, its draft vocabulary or None)."""
    return {name: value for name, value in params.items() if name != "ids"}, params.get("ids")


@functools.lru_cache
def updater(config: EagleConfig, target: LanguageModel, depth: int, optimizer: Any) -> Callable[..., Any]:
    """`(params, ids, state, target params, tokens i32[B, T], wanted bool[B, T]) -> (params, state, loss)`, compiled."""
    import optax

    def update(params: PyTree, ids: Any, state: Any, teacher: PyTree, tokens: Array, wanted: Array) -> Any:
        objective = head_training.eagle3(config, target, ids=ids, steps=depth, dtype=DTYPE)
        batch = head_training.Weighed(tokens, jnp.zeros_like(tokens), wanted)
        loss = lambda params: objective(params, (batch, teacher))[0]  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(params)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, value

    return jax.jit(update)


@functools.lru_cache
def measurer(
    config: EagleConfig, target: LanguageModel, depth: int, temperature: float
) -> Callable[..., tuple[Array, Array]]:
    """(sum over positions of the expected tau of a chain that begins there, how many positions), compiled."""

    def measure(
        params: PyTree, ids: Any, teacher: PyTree, tokens: Array, length: Array
    ) -> tuple[Array, Array]:
        both = Params(target=teacher, draft=params | ({} if ids is None else {"ids": ids}))
        segments = jnp.zeros_like(tokens)
        said = head_training.teach(target, teacher, Batch(tokens, segments))
        wanted = said.logits[:, 1:]
        n = wanted.shape[1]
        output = head_training.entries(said.output, n)
        place = jnp.arange(n, dtype=jnp.int32)[None]
        # A chain that begins at entry t is about tokens t + 2 to t + 1 + depth, all inside of the text.
        begins = place + depth + 1 < length[:, None]
        tau = jnp.ones(wanted.shape[:2], jnp.float32)
        reach = jnp.ones_like(tau)
        chain = head_training.drafted_ahead(config, target, both, output, tokens, segments, depth, DTYPE)
        for ahead, (drafted, _) in enumerate(chain):
            drafted = config.widen(both, drafted)
            if temperature == 0:
                accept = (jnp.argmax(wanted, -1) == jnp.argmax(drafted, -1)).astype(jnp.float32)
            else:
                p, q = jax.nn.softmax(wanted / temperature), jax.nn.softmax(drafted / temperature)
                accept = jnp.sum(jnp.minimum(p, q), axis=-1)
            # Entry t of this step continues the chain that began at entry t - ahead.
            reach = reach * jnp.pad(accept[:, ahead:], ((0, 0), (0, ahead)))
            tau = tau + reach
        return jnp.sum(jnp.where(begins, tau, 0.0)), jnp.sum(begins)

    return jax.jit(measure)
