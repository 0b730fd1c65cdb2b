"""What a case may do: succeed, or raise MarsError with one sentence; within seconds, and within a few GiB."""

from __future__ import annotations

import collections
import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from mars_jax.core.errors import MarsError

SECONDS = 10
"""For one case. The slowest that is not a hang takes a tenth of that on two busy cores."""
GIB = 4
"""More than the process has when cases begin. A size in a file that is believed asks for more."""
SEED = "MARS_JAX_FUZZ_SEED"
"""A whole number for other cases than the usual ones."""


class Surface(NamedTuple):
    """One kind of input that a user hands over."""

    cases: st.SearchStrategy[Any]
    check: Callable[[Any, Path], None]
    """Reads a case, with an empty folder of its own for files. What it leaves there after a refusal is a fault."""
    count: int
    """Cases in the slow suite."""
    prepare: Callable[[Path], None] = lambda folder: None
    """Makes, once, what all cases read."""


class Hang(BaseException):
    """Time is up. No `except Exception` on the way takes it for a damaged file."""


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Raise Hang in what takes longer than SECONDS."""

    def stop(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def in_memory() -> Iterator[None]:
    """Raise MemoryError in what asks for more than GIB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + GIB * 2**30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def one_sentence(error: MarsError) -> None:
    """Fail unless an error is one, with what is wrong and the cure. Commands join the lines of what it quotes."""
    text = " ".join(str(error).split())
    assert text.endswith(".") and (":" in text or ";" in text), text
    assert "Traceback" not in text and "<bound" not in text and " object at 0x" not in text, text


def run(surface: Surface, folder: Path, count: int) -> collections.Counter[str]:
    """Try `count` cases; returns how many were accepted and how many refused.

    Raises:
      AssertionError: of the simplest case that does something else.
    """
    tally: collections.Counter[str] = collections.Counter()
    surface.prepare(folder)
    kept = set(folder.iterdir())

    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=SEED not in os.environ,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    @given(surface.cases)
    def each(case: Any) -> None:
        try:
            with in_time():
                surface.check(case, folder)
        except MarsError as error:
            one_sentence(error)
            tally["refused"] += 1
            left = sorted(path.name for path in set(folder.iterdir()) - kept)
            assert not left, f"a refusal left {left}"
        except Hang:
            raise AssertionError(f"it took more than {SECONDS} seconds") from None
        else:
            tally["accepted"] += 1

    if SEED in os.environ:
        each = hypothesis.seed(int(os.environ[SEED]))(each)
    with in_memory():
        each()
    return tally
