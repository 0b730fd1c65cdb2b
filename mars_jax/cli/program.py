"""What every command does around its work: exit codes, one sentence for bad input, a cache of compilations."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, NoReturn

from mars_jax.core.errors import MarsError

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 141  # 128 + SIGPIPE


class Parser(argparse.ArgumentParser):
    """Every command's: descriptions keep their lines, and an abbreviation, whose meaning the next flag would change,
    is no flag."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """One sentence, as for every other error, in place of argparse's usage block."""
        raise MarsError(f"{message.removeprefix('argument ').rstrip('.')}; --help lists the flags.")


class Ticker:
    """A line on stderr every few seconds: `ticker("theta=0.9", 12, 200)`."""

    def __init__(self, things: str, seconds: float = 5.0):
        self._things, self._seconds, self._last = things, seconds, time.monotonic()

    def __call__(self, what: str, done: int, of: int) -> None:
        if done == of or time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            print(f"{what}: {done} of {of} {self._things}", file=sys.stderr, flush=True)


def program(run: Callable[[Sequence[str] | None, IO[str]], None], argv: Sequence[str] | None) -> int:
    """Run `run(argv, stdout)`; returns the exit code."""
    code = _program(run, argv)
    if code and "jax" in sys.modules:
        from mars_jax.placement import hosts

        hosts.leave(code)
    return code


def _program(run: Callable[[Sequence[str] | None, IO[str]], None], argv: Sequence[str] | None) -> int:
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
