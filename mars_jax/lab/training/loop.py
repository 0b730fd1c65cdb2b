"""The training loop: a jitted step over batches, Orbax checkpoints, a progress bar and a log of the losses."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mars_jax.core import activity
from mars_jax.core.errors import MarsError
from mars_jax.core.types import PyTree
from mars_jax.lab.training.checkpoints import Checkpoints

Objective = Callable[[PyTree, Any], tuple[Array, Mapping[str, Array]]]
"""(params, batch) -> (loss, figures to log); differentiable in params."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apprentice:
    """A drafter in training: its static config, its first params (float32), and what training minimises."""

    config: Any
    init: Callable[[], PyTree]
    objective: Objective  # of (params, (batch, target params))
    panels: dict[str, tuple[str, ...]]  # of the plot
    ids: Any = None  # i32[W]; of a head with a draft vocabulary


def panels_of(steps: int) -> dict[str, tuple[str, ...]]:
    """`Apprentice.panels` of drafts of so many tokens."""
    names = range(1, steps + 1)
    return {"loss": tuple(f"loss_{i}" for i in names), "acceptance": tuple(f"accept_{i}" for i in names)}


def warmup_stable_decay(peak: float, steps: int, *, warmup: int, decay: float) -> optax.Schedule:
    """Linear warm-up, a plateau, and a linear decay to zero over the last `decay` share (arXiv 2404.06395, 4).

    The plateau does not depend on `steps`, so a run can be shortened or prolonged until its decay begins.

    >>> schedule = warmup_stable_decay(0.1, 100, warmup=10, decay=0.2)
    >>> [round(float(schedule(i)), 3) for i in (0, 10, 80, 90, 100)]
    [0.0, 0.1, 0.1, 0.05, 0.0]
    """
    falling = _falling(steps, decay)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, falling),
        ],
        [warmup, steps - falling],
    )


def _on_device(x: Any) -> Array:
    return x if isinstance(x, Array) else jnp.asarray(x)


def _falling(steps: int, decay: float) -> int:
    return max(1, round(steps * decay)) if decay else 0


def make_step(objective: Objective, optimizer: optax.GradientTransformation) -> Callable:
    """(params, opt_state, batch) -> (params, opt_state, figures), jitted, params and opt_state donated."""

    def step(params: PyTree, opt_state: PyTree, batch: Any):
        (loss, figures), gradient = jax.value_and_grad(objective, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        figures = {"loss": loss, **figures, "gradient_norm": optax.tree.norm(gradient)}
        return optax.apply_updates(params, updates), opt_state, figures

    return jax.jit(step, donate_argnums=(0, 1))


def fit(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    init: Callable[[], PyTree],
    batches: Callable[[int], Any],
    *,
    steps: int,
    directory: str | os.PathLike[str],
    tokens_per_step: int,
    decay: float = 0.0,
    save_every: int = 100,
    held_out: Callable[[PyTree], Mapping[str, float]] | None = None,
    description: str = "training",
) -> PyTree:
    """Minimise `objective`; killed and called again with the same arguments it continues bit for bit.

    Args:
      objective: see `Objective`.
      optimizer: from optax.
      init: the params to start from, where `directory` holds no checkpoint. Params are float32.
      batches: step number -> batch; a pure function.
      steps: in all. Another number may be given to go on with, until the old one's decay has begun.
      directory: of the checkpoints and of `log.jsonl`, one line of figures per step.
      tokens_per_step: for the progress bar and `held_out.jsonl`.
      decay: share of the steps over which the optimizer's rate falls; see `warmup_stable_decay`.
      save_every: steps between checkpoints.
      held_out: figures of params, logged with each checkpoint in `held_out.jsonl`.
      description: left of the progress bar.

    Returns:
      The trained params.

    Raises:
      MarsError: the checkpoint in `directory` is of other params, or `steps` cannot be changed to what is given.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "log.jsonl"
    params = init()
    opt_state = jax.jit(optimizer.init)(params)  # placed as params are
    done = 0
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with (
        activity.doing(description) as going,
        Checkpoints(directory / "checkpoints") as kept,
        Progress(
            *columns, TextColumn("{task.fields[rate]:,.0f} tokens/s  loss {task.fields[loss]:.3f}")
        ) as bar,
    ):
        if (latest := kept.latest()) is not None:
            restored = kept.restore(latest, {"params": params, "opt_state": opt_state})
            params, opt_state, done = restored["params"], restored["opt_state"], latest
        _set_steps(directory, done, steps, decay, tokens_per_step)
        _cut(log, done)
        step = make_step(objective, optimizer)
        task = bar.add_task(description, total=steps, completed=done, rate=0.0, loss=float("nan"))
        with log.open("a", buffering=1) as file:
            for i in range(done, steps):
                began = time.perf_counter()
                params, opt_state, figures = step(params, opt_state, jax.tree.map(_on_device, batches(i)))
                figures = {name: float(value) for name, value in figures.items()}
                rate = tokens_per_step / (time.perf_counter() - began)
                file.write(json.dumps({"step": i + 1, "tokens_per_s": round(rate), **figures}) + "\n")
                bar.update(task, advance=1, rate=rate, loss=figures["loss"])
                going.detail = f"{i + 1} of {steps} steps, {rate:,.0f} tokens/s, loss {figures['loss']:.3f}"
                if (i + 1) % save_every == 0 or i + 1 == steps:
                    os.fsync(file.fileno())  # a checkpoint has all of its lines
                    kept.save(i + 1, {"params": params, "opt_state": opt_state})
                    if held_out is not None:
                        figures = {"step": i + 1, "tokens": (i + 1) * tokens_per_step, **held_out(params)}
                        with (directory / "held_out.jsonl").open("a") as lines:
                            lines.write(json.dumps(figures) + "\n")
    return params


def _set_steps(directory: Path, done: int, steps: int, decay: float, tokens_per_step: int) -> None:
    """Record how many steps a training is to have, where `done` of them leave that open.

    Raises:
      MarsError: more are done, or they are done at a rate that already fell towards another number.
    """
    path = directory / "steps.json"
    # Trainings of before it was recorded have no such file, and may go on.
    before = json.loads(path.read_text()) if done and path.exists() else steps
    if done > steps:
        raise MarsError(
            f"the training in '{directory}' has done {done} steps ({done * tokens_per_step:,} tokens), which is more "
            f"than {steps}: give it more tokens, or train in another directory."
        )
    if steps != before and done > (plateau := before - _falling(before, decay)):
        raise MarsError(
            f"the training in '{directory}' is of {before} steps and its learning rate falls from step {plateau} on, "
            f"so that at step {done} it can no longer be made one of {steps}: give it the "
            f"{before * tokens_per_step:,} tokens that it had, or train in another directory."
        )
    staged = path.with_name(f"{path.name}.partial")
    with staged.open("w") as file:
        file.write(json.dumps(steps))
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)


def _cut(log: Path, lines: int) -> None:
    """Leave the first lines of a file, in place: killed at any moment, they are there."""
    with log.open("ab+") as file:
        file.seek(0)
        for _ in range(lines):
            file.readline()
        file.truncate()
