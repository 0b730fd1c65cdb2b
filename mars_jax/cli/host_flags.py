"""Support for commands that run in several processes. Only the first process prints."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import IO

import jax

from mars_jax.mesh import hosts
from mars_jax.utils.errors import MarsError, first_line


@contextlib.contextmanager
def joined(args: argparse.Namespace, rows: object, out: IO[str]) -> Iterator[IO[str]]:
    """Join the other processes of a run with a mesh, and yield the output stream of this process.

    Raises:
      MarsError: see `hosts.connect`; or flags or prompts differ between processes; or another process failed.
    """
    if args.mesh is None:
        yield out
        return
    hosts.connect(args.coordinator, args.num_processes, args.process_id)
    # All other flags, and the prompts, must be the same in every process.
    shared_flags = {k: v for k, v in vars(args).items() if k not in ("coordinator", "process_id")}
    try:
        with _printing(out) as output_stream:
            hosts.check_equal((shared_flags, rows), "flags or prompts")
            yield output_stream
    except jax.errors.JaxRuntimeError as error:
        # A collective raises this error if another process of the run has died.
        if jax.process_count() == 1:
            raise
        raise MarsError(
            f"one of the {jax.process_count()} processes of the run failed ({first_line(error)})."
        ) from error


@contextlib.contextmanager
def _printing(out: IO[str]) -> Iterator[IO[str]]:
    """Yield `out` in the first process, and a null stream in others. Output of C libraries goes to stderr."""
    if not jax.distributed.is_initialized():
        yield out
        return
    # The duplicate still writes to the user's stdout. The original descriptor is redirected to stderr, because C
    # libraries write to it directly, below `sys.stdout`.
    with os.fdopen(os.dup(out.fileno()), "w", encoding="utf-8") as stdout_copy:
        os.dup2(2, out.fileno())  # Gloo (CPU collectives) prints its connections
        if hosts.is_first():
            yield stdout_copy
            return
    # Other processes would only repeat the result and the notes of the first one.
    with open(os.devnull, "w") as null_stream, contextlib.redirect_stderr(null_stream):
        yield null_stream
