"""Progress of work that counts itself, for those who wait."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator

from mars_jax.cli.progress import Pace
from mars_jax.core import activity


class Ticker:
    """Progress of work that counts itself, `ticker("theta=0.9", 12, 200)`: a line at the end of each kind of it, on a
    terminal also every few seconds, elsewhere by `heartbeat`."""

    def __init__(self, things: str, going: activity.Activity, seconds: float = 5.0):
        self._things, self._going, self._seconds, self._last = things, going, seconds, time.monotonic()
        self._pace, self._of = Pace(0), 0

    def __call__(self, what: str, done: int, of: int) -> None:
        if of != self._of:
            self._pace, self._of = Pace(of, done=done), of
        self._pace.done = done
        self._going.detail = f"{self._pace.describe()} ({what})"
        shown = sys.stderr.isatty() and time.monotonic() - self._last >= self._seconds
        if done == of or shown:
            self._last = time.monotonic()
            print(f"{what}: {done} of {of} {self._things}", file=sys.stderr, flush=True)


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
