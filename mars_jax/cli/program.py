"""What every command does around its work: exit codes, one sentence for bad input, a cache of compilations."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import IO

from mars_jax.errors import MarsError

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 141  # 128 + SIGPIPE


def program(run: Callable[[Sequence[str] | None, IO[str]], None], argv: Sequence[str] | None) -> int:
    """Run `run(argv, stdout)`; returns the exit code."""
    out = sys.stdout
    try:
        # Whatever a library prints is no part of the result.
        with contextlib.redirect_stdout(sys.stderr):
            run(argv, out)
            out.flush()
    except MarsError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _discard(out)
        return BROKEN_PIPE
    return 0


def keep_compilations() -> None:
    """Keep what XLA compiles between runs, in the user's cache folder unless JAX is told where.

    JAX reads JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE itself.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(home, "mars_jax", "compiled"))
        # A start compiles many programs that take less than the second below which JAX keeps none.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def _discard(out: IO[str]) -> None:
    """Let the flush at exit go nowhere, rather than complain about the closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
