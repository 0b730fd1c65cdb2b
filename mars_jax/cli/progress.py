"""Progress on stderr: a bar or a spinner on a terminal, elsewhere a line every half minute."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mars_jax.core import activity
from mars_jax.core.errors import MarsError

if TYPE_CHECKING:
    from rich.progress import Progress

    from mars_jax.serve.requests import Completion

Show = Callable[[int, str], None]
"""Function that shows progress: (prompts more, their speed in words)."""

SECONDS = 30.0
"""Seconds between two lines where stderr is no terminal."""


@contextlib.contextmanager
def heartbeat() -> Iterator[None]:
    """Say every `SECONDS` what is being done, unless stderr is a terminal, which has its bars.

    From a thread, since a compilation does not return for minutes; it lets other threads run.
    """
    if sys.stderr.isatty():
        yield
        return
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(SECONDS):
            if said := activity.describe():
                with contextlib.suppress(OSError, ValueError):  # stderr is full or closed
                    print(said, file=sys.stderr, flush=True)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def busy(doing: str) -> Iterator[None]:
    """Say what takes so long before anything is shown."""
    from mars_jax.cli.generate.terminal import console

    screen = console(sys.stderr)
    with (
        activity.doing(doing) as going,
        screen.status(_Busy(going)) if screen.is_terminal else contextlib.nullcontext(),
    ):
        yield


class _Busy:
    """Text of a spinner, which changes as the work goes on."""

    def __init__(self, going: activity.Activity):
        self._going = going

    def __rich__(self) -> str:
        return f"{self._going.name} ... {activity.details(self._going)}".rstrip()


class Pace:
    """Work of a known size: how far it is, and how long the rest will take at the pace so far.

    >>> Pace(9, done=3).describe()
    '3 of 9'
    """

    def __init__(self, of: int, *, done: int = 0):
        self.done = done  # changes as the work goes on
        self._of, self._first, self._began = of, done, time.monotonic()

    def describe(self) -> str:
        """Return the number done of how many, and from the second on the time left."""
        left = None
        if self._first < self.done:
            left = (time.monotonic() - self._began) / (self.done - self._first) * (self._of - self.done)
        return f"{self.done} of {self._of}{time_left(left)}"


def time_left(seconds: float | None) -> str:
    """Return the end of a line of progress: the time left, where it is known and there is any.

    >>> time_left(61.0), time_left(0.0), time_left(None)
    (', 1:01 left', '', '')
    """
    return f", {duration(seconds)} left" if seconds else ""


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds as a text.

    >>> duration(59), duration(3725)
    ('0:59', '1:02:05')
    """
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class Count:
    """Prompts that were decoded, with their speed and tau, for `heartbeat` to tell."""

    def __init__(
        self, of: int, going: activity.Activity, *, done: int = 0, show: Show = lambda rows, said: None
    ):
        self._pace, self._going, self._show = Pace(of, done=done), going, show
        self._tokens = self._steps = 0
        self.said = ""

    def advance(self, completions: Sequence[Completion], seconds: float) -> None:
        """Count these too; `seconds` is the time that all of them have taken so far."""
        self._tokens += sum(completion.metrics.emitted for completion in completions)
        self._steps += sum(completion.metrics.steps for completion in completions)
        self._pace.done += len(completions)
        speed = self._tokens / max(seconds, 1e-9)
        self.said = f"{speed:,.0f} tokens/s, tau {self._tokens / max(self._steps, 1):.2f}"
        self._going.detail = f"{self._pace.describe()}, {self.said}"
        self._show(len(completions), self.said)


@contextlib.contextmanager
def counted(of: int) -> Iterator[Count]:
    """Give a count of prompts whose text is shown, so that a terminal needs no bar."""
    with activity.doing("prompts") as going:
        yield Count(of, going)


@contextlib.contextmanager
def passing_bars(doing: str, *columns: Any) -> Iterator[tuple[activity.Activity, Progress]]:
    """Give an activity, and bars of it on a terminal, which go when it ends; rich's `columns` are right of a bar."""
    from rich.progress import BarColumn, Progress, TextColumn

    from mars_jax.cli.generate.terminal import console

    screen = console(sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), *columns)
    with (
        activity.doing(doing) as going,
        Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bars,
    ):
        yield going, bars


@contextlib.contextmanager
def progress_bar(of: int, done: int = 0) -> Iterator[Count]:
    """Give a count of prompts with a bar on stderr, which bad input takes away, so that its sentence stands alone."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from mars_jax.cli.generate.terminal import console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        activity.doing("prompts") as going,
        Progress(*columns, TextColumn("{task.fields[said]}"), console=console(sys.stderr)) as bar,
    ):
        task = bar.add_task("prompts", total=of, completed=done, said="")
        try:
            yield Count(
                of, going, done=done, show=lambda rows, said: bar.update(task, advance=rows, said=said)
            )
        except MarsError:
            bar.live.transient = True
            bar.live.stop()
            bar.disable = True  # rich would still end the bar with an empty line
            raise
