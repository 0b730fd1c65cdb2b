"""The contract of a fuzz case: succeed, or raise MarsError with one sentence, within time and memory limits."""

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

from mars_jax.utils.errors import MarsError

SECONDS = 10
"""Time limit of a case. The slowest case that does not hang takes a tenth of it on two busy cores."""
GIB = 4
"""Memory that cases may allocate on top of the usage at the start. A reader that trusts a size in a damaged file
allocates more."""
SEED = "MARS_JAX_FUZZ_SEED"
"""Environment variable: an integer seed that selects other cases than the default ones."""


class Surface(NamedTuple):
    """One kind of user input."""

    cases: st.SearchStrategy[Any]
    check: Callable[[Any, Path], None]
    """Read a case, with a folder for its files. A rejected case must leave no new files there."""
    count: int
    """Number of cases in the slow suite."""
    prepare: Callable[[Path], None] = lambda folder: None
    """Write, once, the files that all cases read."""


def empty(folder: Path) -> None:
    """Prepare a folder for the files of a case."""
    (folder / "in").mkdir()


class Hang(BaseException):
    """Timeout of a case. A BaseException, so that no `except Exception` mistakes it for a damaged file."""


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Raise Hang if the body takes longer than SECONDS."""

    def stop(number: int, frame: Any) -> None:
        raise Hang

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextlib.contextmanager
def in_memory() -> Iterator[None]:
    """Raise MemoryError if the body allocates more than GIB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + GIB * 2**30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def one_sentence(error: MarsError) -> None:
    """Check that an error is one sentence with the problem and the fix. Commands join the lines of quoted text."""
    text = " ".join(str(error).split())
    assert text.endswith(".") and (":" in text or ";" in text), text
    assert "Traceback" not in text and "<bound" not in text and " object at 0x" not in text, text


def run(surface: Surface, folder: Path, count: int) -> collections.Counter[str]:
    """Try `count` cases; return the numbers of accepted and rejected ones.

    Raises:
      AssertionError: with the simplest case that neither succeeds nor raises one sentence.
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
