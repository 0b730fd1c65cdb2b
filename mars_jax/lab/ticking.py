"""Progress of work that counts itself, for those who wait."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean

from mars_jax.cli.progress import Pace, time_left
from mars_jax.core import activity

Progress = Callable[[str, int, int, float | None], None]
"""Function that shows progress: (what, done, in all, seconds left or None)."""


class Ticker:
    """Progress of work that counts itself, `ticker("theta=0.9", 12, 200)`: a line at the end of each kind of it, on a
    terminal also every few seconds, elsewhere by `heartbeat`."""

    def __init__(self, things: str, going: activity.Activity, seconds: float = 5.0):
        self._things, self._going, self._seconds, self._last = things, going, seconds, time.monotonic()
        self._pace, self._of = Pace(0), 0

    def __call__(self, what: str, done: int, of: int, left: float | None = None) -> None:
        """Show it; `left` is the time left in seconds, by default that of the pace so far."""
        if of != self._of:
            self._pace, self._of = Pace(of, done=done), of
        self._pace.done = done
        paced = self._pace.describe() if left is None else f"{done} of {of}{time_left(left)}"
        self._going.detail = f"{paced} ({what})"
        shown = sys.stderr.isatty() and time.monotonic() - self._last >= self._seconds
        if done == of or shown:
            self._last = time.monotonic()
            print(f"{what}: {done} of {of} {self._things}{time_left(left)}", file=sys.stderr, flush=True)


class Work:
    """Work of several kinds that differ in cost: how much is done, and how long the rest takes at the mean of its kind.

    >>> work = Work({"slow": 10, "fast": 10}, print)
    >>> work.add("slow", 5, "a slow one", seconds=50.0)
    a slow one 5 20 150.0
    >>> work.add("fast", 5, "a fast one", seconds=5.0)
    a fast one 10 20 55.0
    """

    def __init__(self, planned: Mapping[str, int], progress: Progress):
        self.done = 0
        self._left, self._progress = Counter(planned), progress
        self._timed: dict[str, tuple[int, float]] = {}

    def add(self, kind: str, count: int, said: str, seconds: float = 0.0) -> None:
        """So many of a kind more are done; `seconds` is 0 where they were not timed."""
        self.done += count
        self.skip(kind, count)
        self.time(kind, count, seconds)
        self._progress(said, self.done, self.done + self._left.total(), self._time_left())

    def time(self, kind: str, count: int, seconds: float) -> None:
        """Learn what so many of a kind cost."""
        if seconds:
            known, so_far = self._timed.get(kind, (0, 0.0))
            self._timed[kind] = known + count, so_far + seconds

    def skip(self, kind: str, count: int) -> None:
        """So many of a kind turn out not to be needed."""
        self._left[kind] -= count

    def _time_left(self) -> float | None:
        """Seconds; a kind that was never timed costs what the others do on average."""
        each = {kind: seconds / count for kind, (count, seconds) in self._timed.items()}
        if not each:
            return None
        return sum(count * each.get(kind, fmean(each.values())) for kind, count in self._left.items())


@contextlib.contextmanager
def ticking(things: str) -> Iterator[Ticker]:
    """A ticker for as long as the work takes."""
    with activity.doing(things) as going:
        yield Ticker(things, going)


@dataclasses.dataclass
class Speed:
    """Speed of what this process has decoded, for those who wait. Rows on file took it no time.

    >>> speed = Speed(emitted=30, steps=10, seconds=2.0)
    >>> speed.add(emitted=10, steps=10, seconds=2.0)
    >>> speed.describe(), Speed().describe()
    ('10 tokens/s, tau 2.00', 'on file already')
    """

    emitted: int = 0
    steps: int = 0
    seconds: float = 0.0

    def add(self, *, emitted: int, steps: int, seconds: float) -> None:
        """A batch more."""
        self.emitted += emitted
        self.steps += steps
        self.seconds += seconds

    def describe(self) -> str:
        """Tokens per second, and per step."""
        if not self.seconds:
            return "on file already"
        return f"{self.emitted / max(self.seconds, 1e-9):,.0f} tokens/s, tau {self.emitted / max(self.steps, 1):.2f}"
