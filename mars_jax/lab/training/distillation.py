"""Distillation of drafters from a target, on text or stored features; constructors for Medusa heads and small models.

B rows, L tokens per row, V vocabulary. Tested against the acceptance that is measured when decoding with the exported
drafter (tests/lab/commands/test_distill.py).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mars_jax.contrib.models import medusa_layers
from mars_jax.contrib.models.medusa_layers import MedusaConfig
from mars_jax.contrib.teaching import Batch, Training, predict, teach
from mars_jax.core.axes import names_of, size_of
from mars_jax.core.types import PyTree
from mars_jax.lab.training import data, features, objectives
from mars_jax.lab.training.eagle_training import unembedding
from mars_jax.lab.training.loop import Apprentice, fit, muon
from mars_jax.lab.training.objectives import Divergence, cast, with_ids
from mars_jax.models.config import ModelConfig
from mars_jax.models.heads import init_params
from mars_jax.models.transformer import language_model
from mars_jax.utils import hosts
from mars_jax.utils.errors import MarsError


def small_model(
    target: ModelConfig, draft: ModelConfig, params: PyTree, *, divergence: Divergence
) -> Apprentice:
    """Return an `Apprentice` for a small model that learns the target's distributions (DistillSpec 2310.08461).

    Args:
      target, draft: configs with the same vocabulary.
      params: params of the small model.
      divergence: divergence of the draft's distribution from the target's.
    """

    def loss(params: PyTree, batch: Batch, teacher: PyTree) -> tuple[Array, dict[str, Array]]:
        tokens, segments = batch.tokens[:, :-1], batch.segments[:, :-1]
        teacher_model = language_model(target, dtype="bfloat16")
        # Logits f32[B, L, V] of the target and the draft. Row j predicts token j + 1.
        p = jax.lax.stop_gradient(predict(teacher_model, teacher, tokens, segments))
        q = predict(language_model(draft, dtype="bfloat16"), cast(params, jnp.bfloat16), tokens, segments)
        is_same = (jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)).astype(jnp.float32)
        return jnp.mean(divergence(p, q)), {"accept_1": jnp.mean(is_same)}

    return Apprentice(config=draft, init=lambda: cast(params, jnp.float32), loss=loss)


def new_medusa(
    target: ModelConfig, params: PyTree, *, count: int = 4, divergence: Divergence, seed: int = 0
) -> Apprentice:
    """Return an `Apprentice` for `count` heads with one block each, whose unembeddings are copied from the target.

    Head i learns the target's distribution i + 2 tokens ahead (Medusa 2401.10774, section 2.2).
    """
    config = MedusaConfig(
        num_heads=count, num_layers=1, hidden_size=target.hidden_size, vocab_size=target.vocab_size
    )
    model = language_model(target, dtype="bfloat16")

    def init() -> PyTree:
        initial_params = init_params(config, jax.random.key(seed))
        for head in initial_params["heads"]:
            head["unembed"] = unembedding(params)
            head["blocks"][0]["weight"] = jnp.zeros_like(head["blocks"][0]["weight"])
        return initial_params

    def loss(params: PyTree, batch: Batch, teacher: PyTree) -> tuple[Array, dict[str, Array]]:
        lesson = teach(model, teacher, batch)
        rows, length, hidden_size = lesson.output.hidden.shape
        hidden = lesson.output.hidden.reshape(rows * length, 1, hidden_size)
        head_params = cast(params, jnp.bfloat16)
        draft_logits = medusa_layers.logits(head_params, hidden, count).reshape(rows, length, count, -1)
        segments, head_losses, head_acceptance = batch.segments, [], []
        for i in range(count):
            # Head i reads position t and drafts token t + 2 + i, which the target predicts at position t + 1 + i.
            n = length - 1 - i
            logits, target_logits = draft_logits[:, :n, i], lesson.logits[:, 1 + i :]
            valid = segments[:, :n] == segments[:, 1 + i : length]
            is_same = (jnp.argmax(logits, axis=-1) == jnp.argmax(target_logits, axis=-1)).astype(jnp.float32)
            head_losses.append(objectives.masked_mean(divergence(target_logits, logits), valid))
            head_acceptance.append(objectives.masked_mean(is_same, valid))
        return objectives.chain_mean(head_losses), objectives.chain_figures(head_losses, head_acceptance)

    return Apprentice(config=config, init=init, loss=loss)


def train(
    apprentice: Apprentice,
    teacher: PyTree,
    streams: Sequence[data.Stream],
    work: str | os.PathLike[str],
    *,
    tokens: float,
    step_tokens: int = 2048,
    length: int = 256,
    learning_rate: float = 1e-3,
    seed: int = 0,
    minutes: float | None = None,
    mesh: Mesh | None = None,
) -> PyTree:
    """Train an `Apprentice` on text. To continue a killed run, start it again: the result is the same bit for bit.

    Args:
      apprentice: see `small_model`, and the module of each kind of head.
      teacher: the target's params, on the mesh if there is one.
      streams: the text.
      work: directory of checkpoints and log.jsonl.
      tokens: number of tokens to train on.
      step_tokens, length: each step uses rows of `length` tokens, `step_tokens` in total.
      learning_rate: peak learning rate; see `loop.muon`.
      seed: seed that determines the order of the text.
      minutes: time after which training ends early; default: no limit.
      mesh: the target is sharded over its axis `model`, and the rows of each step over its axis `data`. The
        apprentice's params are replicated on every device.

    Returns:
      The trained params in float32, with `ids` if there is a draft vocabulary.

    Raises:
      MarsError: the rows cannot be divided among the devices, or the text is shorter than a row.
    """
    batch_rows = max(1, step_tokens // length)
    data_shards = size_of("data", mesh)
    if batch_rows % data_shards:
        raise MarsError(
            f"{batch_rows} rows of {length} tokens cannot be divided among {data_shards} devices: choose a number of "
            f"tokens per step that makes the number of rows a multiple of {data_shards}."
        )
    batches = data.batches(streams, rows=batch_rows, length=length, seed=seed)
    training = _training(apprentice, batches, tokens, batch_rows * length, learning_rate)
    low = cast(teacher, jnp.bfloat16)
    fit_params = functools.partial(
        fit, directory=work, teacher=low, minutes=minutes, description="distilling"
    )
    if mesh is None:
        return with_ids(fit_params(training), apprentice.ids)
    replicated_sharding = NamedSharding(mesh, PartitionSpec())
    row_sharding = NamedSharding(mesh, PartitionSpec(names_of("data", mesh) or None))
    training = training._replace(init=lambda: _placed(apprentice.init(), replicated_sharding))
    with jax.set_mesh(mesh):
        params = fit_params(training, prepare=lambda params, batch: _placed(batch, row_sharding))
    return with_ids(params, apprentice.ids)


def _placed(tree: PyTree, sharding: NamedSharding) -> PyTree:
    def place(x: Array | np.ndarray) -> Array:
        if isinstance(x, Array) and not x.is_fully_addressable:
            # This array is one of the target's weights, sharded over several processes.
            return jax.jit(lambda array: array, out_shardings=sharding)(x)
        return hosts.put(x, sharding)

    return jax.tree.map(place, tree)


def _training(
    apprentice: Apprentice, batches: Any, tokens: float, step_tokens: int, learning_rate: float
) -> Training:
    steps = max(1, round(tokens / step_tokens))
    return Training(apprentice.init, apprentice.loss, batches, muon(learning_rate, steps), steps, step_tokens)


def train_on_features(
    apprentice: Apprentice,
    teacher: PyTree,
    dumps: Sequence[Path],
    work: str | os.PathLike[str],
    *,
    tokens: float,
    step_tokens: int = 2048,
    learning_rate: float = 1e-3,
    seed: int = 0,
    minutes: float | None = None,
) -> PyTree:
    """Train a head on stored features of its target. Metrics on held-out rows are logged in `held_out.jsonl`.

    Args:
      apprentice: the head to train, whose loss must accept `Recorded` rows.
      teacher: the target's params; only the embedding is read.
      dumps: folders of features.
      work, step_tokens, learning_rate, seed, minutes: as for `train`.
      tokens: number of tokens to train on, including padding.

    Raises:
      MarsError: there are too few features.
    """
    batches, held_out, mean_tokens = features.dump_batches(dumps, step_tokens=step_tokens, seed=seed)
    bf16_embed = {"embed": teacher["embed"].astype(jnp.bfloat16)}
    batch_figures = jax.jit(lambda params, batch: apprentice.loss(params, batch, bf16_embed)[1])

    def measure(params: PyTree) -> dict[str, float]:
        figure_rows = [jax.device_get(batch_figures(params, batch)) for batch in held_out]
        means = {name: float(np.mean([row[name] for row in figure_rows])) for name in figure_rows[0]}
        return means | {"tau": tau(means)}

    training = _training(apprentice, batches, tokens, mean_tokens, learning_rate)
    options = {"save_every": 25, "minutes": minutes, "held_out": measure, "description": "distilling"}
    return with_ids(fit(training, work, teacher=bf16_embed, **options), apprentice.ids)


def tau(figures: Mapping[str, float]) -> float:
    """Return tau for a chain whose draft token i, if it is reached, is accepted with probability `accept_i`.

    >>> tau({"accept_1": 0.5, "accept_2": 0.5, "loss": 3.0})
    1.75
    """
    chain_length = sum(name.startswith("accept_") for name in figures)
    return 1 + float(np.cumprod([figures[f"accept_{i}"] for i in range(1, chain_length + 1)]).sum())
