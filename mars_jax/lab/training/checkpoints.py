"""Checkpoints of a training, in Orbax; of several processes the first one reads and writes them.

Oracle: a run that was killed, against one that was not (tests/lab/training/test_loop.py, tests/cli/test_hosts.py).
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from mars_jax.core.errors import MarsError
from mars_jax.core.types import PyTree
from mars_jax.placement import hosts


class Checkpoints:
    """The last two states of a training in a directory. A context manager; `with` it ends what is being written."""

    def __init__(self, directory: Path):
        import orbax.checkpoint as ocp

        self._directory, self._alone = directory, jax.process_count() == 1
        self._manager = None
        if hosts.is_first():
            processes: Any = ocp.options.MultiprocessingOptions(
                primary_host=0, active_processes=None if self._alone else {0}
            )
            options = ocp.CheckpointManagerOptions(
                # Where others do not take part the folder has to be there.
                max_to_keep=2,
                create=self._alone,
                multiprocessing_options=processes,
            )
            if not self._alone:
                directory.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(directory, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._manager is not None:
            self._manager.close()

    def latest(self) -> int | None:
        """The step of the newest one; None where there is none."""
        step = None if self._manager is None else self._manager.latest_step()
        step = hosts.broadcast(-1 if step is None else step)
        return None if step < 0 else step

    def restore(self, step: int, state: PyTree) -> PyTree:
        """The state of a step, placed as `state` is.

        Raises:
          MarsError: it is of another training.
        """
        if self._alone:
            return self._read(step, state)
        host = hosts.fetch(state)
        failed = ""
        if self._manager is not None:
            try:
                host = self._read(step, host)
            except MarsError as error:
                failed = str(error)
        if said := hosts.broadcast_bytes(failed.encode()).decode():
            raise MarsError(said)
        from jax.experimental import multihost_utils

        host = multihost_utils.broadcast_one_to_all(host)
        return hosts.put(host, jax.tree.map(lambda x: x.sharding, state))

    def save(self, step: int, state: PyTree) -> None:
        """Write the state, and wait until it is there: the next step takes its buffers."""
        kept = state if self._alone else hosts.fetch(state)  # in which all take part
        if self._manager is None:
            return
        import orbax.checkpoint as ocp

        self._manager.save(step, args=ocp.args.StandardSave(kept))  # pyright: ignore
        self._manager.wait_until_finished()

    def _read(self, step: int, state: PyTree) -> PyTree:
        import orbax.checkpoint as ocp

        assert self._manager is not None
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(state))  # pyright: ignore
        except (ValueError, KeyError, TypeError) as error:  # of a tree or shapes that are not these
            reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            raise MarsError(
                f"the checkpoint in '{self._directory.parent}' is of another training ({reason[:200].rstrip('.:')}): "
                "remove that directory, or train in another."
            ) from error
