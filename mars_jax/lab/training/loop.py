"""The training loop: a jitted step over the batches of a grain dataset, with Orbax checkpoints and a log.

Tested by killing and resuming runs, and comparing them with an uninterrupted run (tests/lab/training/test_loop.py,
tests/cli/test_hosts.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import optax
from jax import Array

from mars_jax.cli.progress import progress
from mars_jax.contrib.teaching import Loss, Training
from mars_jax.core.types import PyTree
from mars_jax.utils import hosts
from mars_jax.utils.errors import MarsError

CHECKPOINTS = "orbax"
"""Directory of the checkpoints, inside the directory of a training run."""
WARMUP, DECAY = 50, 0.35
"""Number of warm-up steps of the learning rate, and share of the last steps, in which it decays to zero."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apprentice:
    """A drafter in training."""

    config: Any  # config of a model or of a kind of head
    init: Callable[[], PyTree]  # returns the initial params, in float32
    loss: Loss
    ids: Array | None = None  # i32[W]; draft vocabulary of the head, if it has one


def muon(peak: float, steps: int) -> optax.GradientTransformation:
    """Return the project's optimizer: Muon for matrices inside the layers and Adam for all other params.

    Embeddings and unembeddings use Adam, as Muon's author advises (Jordan 2024). Updates of both kinds have the same
    root mean square (arXiv 2502.16982, section 2.2), so they can share one learning rate. The rate rises linearly,
    stays at its peak, and falls linearly to zero (arXiv 2404.06395, section 4).

    Args:
      peak: learning rate of the plateau.
      steps: total number of training steps.

    >>> muon(1e-3, 100).init({"q": jax.numpy.ones((4, 4))}) is not None
    True
    """
    warmup_steps = min(WARMUP, max(1, steps // 10))
    fall_steps = max(1, round(steps * DECAY))
    # A linear schedule stays at its last value, so `rise` also provides the plateau.
    rise, fall = optax.linear_schedule(0.0, peak, warmup_steps), optax.linear_schedule(peak, 0.0, fall_steps)
    schedule = optax.join_schedules([rise, fall], [steps - fall_steps])

    def matrices(params: PyTree) -> PyTree:
        def dimensions(path: jax.tree_util.KeyPath, x: Array) -> optax.contrib.MuonDimensionNumbers | None:
            # Params without dimension numbers are updated by Adam.
            if x.ndim == 2 and "embed" not in jax.tree_util.keystr(path):
                return optax.contrib.MuonDimensionNumbers()
            return None

        return jax.tree_util.tree_map_with_path(dimensions, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule,
            weight_decay=0.1,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=matrices,
        ),
    )


def make_step(loss: Loss, optimizer: optax.GradientTransformation, *, donates: bool = True) -> Callable:
    """Return a jitted function `(params, opt_state, batch, teacher) -> (params, opt_state, figures)`.

    If `donates` is True, the function overwrites its first two arguments.
    """

    def step(params: PyTree, opt_state: PyTree, batch: Any, teacher: PyTree):
        (loss_value, figures), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch, teacher)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        figures = {"loss": loss_value, **figures, "gradient_norm": optax.tree.norm(gradient)}
        return optax.apply_updates(params, updates), opt_state, figures

    return jax.jit(step, donate_argnums=(0, 1) if donates else ())


def fit(
    training: Training,
    directory: str | os.PathLike[str],
    *,
    teacher: PyTree = (),
    prepare: Callable[[PyTree, Any], Any] = lambda params, batch: batch,
    save_every: int = 100,
    minutes: float | None = None,
    held_out: Callable[[PyTree], Mapping[str, float]] | None = None,
    description: str = "training",
) -> PyTree:
    """Train and return the params.

    To continue a run that was killed or reached its limit of `minutes`, repeat the call. The result is the same, bit
    for bit, as that of an uninterrupted run.

    Args:
      training: see `Training`.
      directory: holds the checkpoints, and `log.jsonl` with one line of metrics per step.
      teacher: frozen params, passed to the loss.
      prepare: (params, batch) -> the batch for the loss, for example the same batch placed on devices.
      save_every: steps between checkpoints.
      minutes: time after which training ends early; default: no limit.
      held_out: params -> metrics, logged in `held_out.jsonl` with each checkpoint.
      description: label of the progress bar.

    Raises:
      MarsError: `directory` holds a checkpoint of a different training run.
    """
    import grain

    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    # Copy the initial params, because the steps overwrite them.
    params = jax.jit(lambda params: jax.tree.map(jax.numpy.copy, params))(training.init())
    opt_state = jax.jit(training.optimizer.init)(params)  # same placement as params
    # Batches are small and in memory, so prefetching threads would not pay off.
    batches = iter(training.batches.to_iter_dataset(grain.ReadOptions(num_threads=0)))
    # A template for checkpoints, with the structure, shapes and placement to restore.
    checkpoint_state = {"params": params, "opt_state": opt_state, "data": batches.get_state()}
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    checkpoints = Checkpoints(directory, training.steps)
    with progress(description, deadline=deadline) as show, contextlib.closing(checkpoints):
        completed_steps, checkpoint_state = checkpoints.restore(checkpoint_state)
        params, opt_state = checkpoint_state["params"], checkpoint_state["opt_state"]
        # grain expects integers, but a restored checkpoint may contain arrays.
        batches.set_state(jax.tree.map(int, checkpoint_state["data"]))
        show(completed_steps, training.steps, "")
        train_step = make_step(training.loss, training.optimizer)
        with _log(directory / "log.jsonl", completed_steps) as log:
            for i in range(completed_steps + 1, training.steps + 1):
                start_time = time.perf_counter()
                batch = prepare(params, next(batches))
                params, opt_state, figures = train_step(params, opt_state, batch, teacher)
                # `float` waits until the step is done, so the rate below includes its time on the device.
                figures = {name: float(value) for name, value in figures.items()}
                tokens_per_second = round(training.step_tokens / (time.perf_counter() - start_time))
                log.write(json.dumps({"step": i, "tokens_per_s": tokens_per_second, **figures}) + "\n")
                show(i, training.steps, f"{tokens_per_second:,} tokens/s, loss {figures['loss']:.3f}")
                is_last = i == training.steps
                if deadline is not None:
                    # The processes of a mesh must stop after the same step, so process 0 decides.
                    is_last |= bool(hosts.broadcast(int(time.monotonic() > deadline)))
                if i % save_every and not is_last:
                    continue
                checkpoint_state = {"params": params, "opt_state": opt_state, "data": batches.get_state()}
                checkpoints.save(i, checkpoint_state)
                if held_out is not None:
                    held_out_row = {"step": i, "tokens": i * training.step_tokens, **held_out(params)}
                    with (directory / "held_out.jsonl").open("a") as file:
                        file.write(json.dumps(held_out_row) + "\n")
                if is_last:
                    break
    return params


class Checkpoints:
    """The last two states of a training run on disk. Only the first of several processes reads and writes them."""

    def __init__(self, directory: Path, steps: int):
        import orbax.checkpoint as ocp

        self._directory, self._steps, self._manager = directory, steps, None
        if hosts.is_first():
            (directory / CHECKPOINTS).mkdir(exist_ok=True)
            # By default, Orbax waits for all processes, but only the first one calls it. These options prevent this
            # wait, but Orbax cannot create the directory when they are set.
            first_process = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
            options = ocp.CheckpointManagerOptions(
                max_to_keep=2, create=False, multiprocessing_options=first_process
            )
            self._manager = ocp.CheckpointManager(directory / CHECKPOINTS, options=options)

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()

    def restore(self, state: dict[str, PyTree]) -> tuple[int, dict[str, PyTree]]:
        """Return the number of completed steps and the state after them, placed like `state`.

        Without a checkpoint, return 0 and `state` itself.

        Raises:
          MarsError: the checkpoint is damaged or belongs to a different training run.
        """
        completed_steps = hosts.broadcast((self._manager and self._manager.latest_step()) or 0)
        if not completed_steps:
            return 0, state
        # Every process must call `fetch`, because the arrays may be sharded over processes.
        state_on_host, error_message = hosts.fetch(state), ""
        if self._manager is not None:
            try:
                state_on_host = self._read(completed_steps, state_on_host)
            except MarsError as error:
                error_message = str(error)
        # Raise the error in every process: if only the first one raised it, the others would wait in the broadcast of
        # the state.
        if error_message := hosts.broadcast_bytes(error_message.encode()).decode():
            raise MarsError(error_message)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            state_on_host = multihost_utils.broadcast_one_to_all(state_on_host)
        placed_state = {
            name: hosts.put(state_on_host[name], jax.tree.map(lambda x: x.sharding, state[name]))
            for name in ("params", "opt_state")
        }
        return completed_steps, placed_state | {"data": state_on_host["data"]}

    def _read(self, step: int, state: dict[str, PyTree]) -> dict[str, PyTree]:
        import orbax.checkpoint as ocp

        assert self._manager is not None
        template = ocp.args.StandardRestore({**state, "steps": 0})  # pyright: ignore
        try:
            restored_state = self._manager.restore(step, args=template)
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            raise MarsError(
                f"the checkpoint in '{self._directory}' is damaged or of another run "
                f"({reason[:200].rstrip('.:')}): remove that directory, or train in another."
            ) from error
        stored_steps = int(restored_state["steps"])
        if stored_steps != self._steps:
            raise MarsError(
                f"the training run in '{self._directory}' has {stored_steps} steps and this one has {self._steps}: "
                "give it the same number of tokens, or train in another directory."
            )
        return {name: restored_state[name] for name in state}

    def save(self, step: int, state: PyTree) -> None:
        """Write the state, and wait until it is on disk, because the next step overwrites its buffers."""
        host_state = hosts.fetch(state)  # collective: every process calls it
        if self._manager is not None:
            import orbax.checkpoint as ocp

            save_args = ocp.args.StandardSave({**host_state, "steps": self._steps})  # pyright: ignore
            self._manager.save(step, args=save_args)
            self._manager.wait_until_finished()


def _log(path: Path, lines: int) -> TextIO:
    """Open a log for appending, truncated to its first `lines` lines.

    A killed run may have logged steps after its last checkpoint.
    """
    with path.open("ab+") as file:
        file.seek(0)
        for _ in range(lines):
            file.readline()
        file.truncate()
    return path.open("a", buffering=1)
