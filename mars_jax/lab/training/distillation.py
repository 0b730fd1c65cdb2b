"""Train a drafter for a target: heads on its features, small language models on its distributions.

Sources: see the objectives of each kind of head, and `training.objectives`. W draft vocabulary. Oracle: the acceptance
that a decode with the exported drafter reaches (tests/lab/commands/test_distill.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mars_jax.core.errors import MarsError
from mars_jax.core.mesh import names_of, size_of
from mars_jax.core.types import PyTree
from mars_jax.lab.training import data
from mars_jax.lab.training.features import Feed
from mars_jax.lab.training.loop import Apprentice, fit
from mars_jax.lab.training.objectives import Divergence, predict
from mars_jax.lab.training.recipe import DECAY, muon, plot
from mars_jax.models.config import ModelConfig
from mars_jax.models.transformer import init_params, language_model
from mars_jax.placement import hosts


def draft_vocabulary(
    streams: Sequence[data.Stream], size: int, vocab_size: int, always: Sequence[int] = ()
) -> np.ndarray:
    """The `size` tokens that are most frequent in a text, those of `always` among them: i32[size], ascending.

    Args:
      streams: the text; each counts by its weight.
      size: W.
      vocab_size: V of the target.
      always: stop tokens, which a draft should be able to say.

    Raises:
      MarsError: size is not in 1..vocab_size.

    >>> text = data.Stream(np.asarray([3, 3, 1, 5, 5, 5], np.uint16), np.zeros(6, np.int32), 1.0)
    >>> draft_vocabulary([text], 3, 8, always=[7]).tolist()
    [3, 5, 7]
    """
    if not 1 <= size <= vocab_size:
        raise MarsError(f"a draft vocabulary of {size}: expected 1 to {vocab_size}, the target's vocabulary.")
    share = np.zeros(vocab_size)
    for stream in streams:
        counts = np.bincount(stream.tokens, minlength=vocab_size)[:vocab_size]
        share += stream.weight * counts / len(stream.tokens)
    share[list(always)] = np.inf
    return np.sort(np.argsort(-share, kind="stable")[:size]).astype(np.int32)


def small_model(
    target: ModelConfig, draft: ModelConfig, first: PyTree | None, *, divergence: Divergence, seed: int = 0
) -> Apprentice:
    """A small language model on the target's distributions (DistillSpec 2310.08461).

    Args:
      target, draft: the configs; one vocabulary.
      first: float32 params to go on from, or None for random ones.
      divergence: of the draft's distribution from the target's.
      seed: of random params.

    Raises:
      MarsError: the vocabularies differ.
    """
    if target.vocab_size != draft.vocab_size:
        raise MarsError(
            f"the draft has a vocabulary of {draft.vocab_size} tokens and the target one of {target.vocab_size}: "
            "distil between models that share a tokenizer."
        )

    def objective(params: PyTree, lesson: tuple[data.Batch, PyTree]):
        batch, teacher = lesson
        tokens, segments = batch.tokens[:, :-1], batch.segments[:, :-1]
        p = jax.lax.stop_gradient(
            predict(language_model(target, dtype="bfloat16"), teacher, tokens, segments)
        )
        low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        q = predict(language_model(draft, dtype="bfloat16"), low, tokens, segments)
        same = (jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)).astype(jnp.float32)
        return jnp.mean(divergence(p, q)), {"accept_1": jnp.mean(same)}

    def init() -> PyTree:
        return init_params(draft, jax.random.key(seed)) if first is None else jax.tree.map(jnp.array, first)

    return Apprentice(
        config=draft,
        init=init,
        objective=objective,
        panels={"loss": ("loss",), "acceptance": ("accept_1",)},
    )


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
    devices: Sequence[Any] | None = None,
    mesh: Mesh | None = None,
) -> PyTree:
    """Train an apprentice; killed and called again with the same arguments it continues bit for bit.

    Args:
      apprentice: of a head, from the module of its objective, or from `small_model`.
      teacher: the target's params, on the mesh if there is one.
      streams: the text.
      work: directory of checkpoints, log.jsonl and plot.png.
      tokens: to train on.
      step_tokens, length: rows of `length` tokens, `step_tokens` in all.
      learning_rate: the peak; see `recipe.muon`.
      seed: of the order of the text.
      devices: to train on, the rows of a step divided among them; default: one.
      mesh: instead of them, the target divided over its axis `model`, as it was loaded, and the rows over `data`. The
        apprentice is whole on every device.

    Returns:
      The trained params in float32, `ids` among them where there is a draft vocabulary.

    Raises:
      MarsError: the rows cannot be divided among the devices, or the text is shorter than a row.
    """
    devices = list(devices or jax.devices()[:1])
    rows = max(1, step_tokens // length)
    parts = len(devices) if mesh is None else size_of("data", mesh)
    if rows % parts:
        raise MarsError(
            f"{rows} rows of {length} tokens cannot be divided among {parts} devices: choose a number of tokens "
            "per step that makes a multiple of them."
        )
    by_row = everywhere = SingleDeviceSharding(devices[0])
    over = mesh
    if mesh is None and len(devices) > 1:
        over = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    if over is not None:
        names = ("data",) if mesh is None else names_of("data", over)
        by_row = NamedSharding(over, PartitionSpec(names or None))
        everywhere = NamedSharding(over, PartitionSpec())
    steps = max(1, round(tokens / (rows * length)))
    batches = data.batches(streams, steps=steps, tokens=rows * length, lengths={length: 1.0}, seed=seed)
    # Cast once: the copy that the objective reads.
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), teacher)
    if mesh is None:
        low = jax.device_put(low, everywhere)

    def place(tree: PyTree, sharding: Any) -> PyTree:
        def one(x: Any) -> Array:
            if isinstance(x, Array) and not x.is_fully_addressable:  # of the target's, over several processes
                return jax.jit(lambda whole: whole, out_shardings=sharding)(x)
            return hosts.put(x, sharding)

        return jax.tree.map(one, tree)

    work = Path(work)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        params = fit(
            apprentice.objective,
            muon(learning_rate, steps),
            lambda: place(apprentice.init(), everywhere),
            lambda step: (place(batches(step), by_row), low),
            steps=steps,
            directory=work,
            tokens_per_step=rows * length,
            decay=DECAY,
            description="distilling",
        )
    plot(work / "log.jsonl", work / "plot.png", apprentice.panels, tokens=rows * length)
    return params if apprentice.ids is None else {**params, "ids": apprentice.ids}


def train_on_features(
    apprentice: Apprentice,
    teacher: PyTree,
    feed: Feed,
    work: str | os.PathLike[str],
    *,
    tokens: float,
    learning_rate: float = 1e-3,
) -> PyTree:
    """`train` of a head on what its target said before; figures of held-out rows are in `held_out.jsonl`.

    Args:
      apprentice: whose objective takes `Recorded` rows.
      teacher: the target's params, of which its embedding is read.
      feed: the batches.
      work, learning_rate: as for `train`.
      tokens: to train on, padding among them. A run that was killed may be given another number until its rate falls.

    Raises:
      MarsError: a run goes on with other tokens and its rate has begun to fall, or more are done.
    """
    low = {"embed": teacher["embed"].astype(jnp.bfloat16)}
    figures = jax.jit(lambda params, batch: apprentice.objective(params, (batch, low))[1])
    held_out = feed.held_out()

    def measure(params: PyTree) -> dict[str, float]:
        found = [figures(params, jax.tree.map(jnp.asarray, batch)) for batch in held_out]
        mean = {name: float(np.mean([f[name] for f in found])) for name in found[0]}
        return mean | {"tau": tau(mean)}

    work, steps = Path(work), max(1, round(tokens / feed.step_tokens))
    params = fit(
        apprentice.objective,
        muon(learning_rate, steps),
        apprentice.init,
        lambda step: (feed.batch(step), low),
        steps=steps,
        directory=work,
        tokens_per_step=feed.step_tokens,
        decay=DECAY,
        save_every=25,
        held_out=measure if held_out else None,
        description="distilling",
    )
    plot(work / "log.jsonl", work / "plot.png", apprentice.panels, tokens=feed.step_tokens)
    return params if apprentice.ids is None else {**params, "ids": apprentice.ids}


def tau(figures: Mapping[str, float]) -> float:
    """Tokens of a step with a chain of drafts, of which the i-th is right with `accept_i` where those before it are.

    >>> tau({"accept_1": 0.5, "accept_2": 0.5, "loss": 3.0})
    1.75
    """
    count = sum(name.startswith("accept_") for name in figures)
    return 1 + float(np.cumprod([figures[f"accept_{i}"] for i in range(1, count + 1)]).sum())
