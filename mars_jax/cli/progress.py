"""Progress on stderr: a bar or a spinner on a terminal, otherwise a line every half minute."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from mars_jax.utils import activity
from mars_jax.utils.errors import say

Show = Callable[[int, int | None, str], None]
"""Function that reports progress: (number done, total if known, additional text)."""

SECONDS = 30.0
"""Seconds between two progress lines if stderr is not a terminal."""
WINDOW = 600.0
"""Length of the recent period from which the remaining time is estimated, in seconds. One batch may take minutes."""


@contextlib.contextmanager
def heartbeat() -> Iterator[None]:
    """Print the current activities every `SECONDS` seconds if stderr is not a terminal.

    A separate thread prints them, because compilations can block the main thread for minutes.
    """
    if sys.stderr.isatty():
        yield
        return
    end_event = threading.Event()

    def beat() -> None:
        while not end_event.wait(SECONDS):
            if text := activity.describe():
                with contextlib.suppress(OSError, ValueError):  # stderr is a full or closed pipe
                    print(text, file=sys.stderr, flush=True)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end_event.set()
        thread.join()


class _Activities:
    """Text of a spinner, updated each time that rich renders it."""

    def __rich__(self) -> str:
        return activity.describe()


@contextlib.contextmanager
def busy(name: str) -> Iterator[None]:
    """Show a spinner on a terminal during work whose progress cannot be measured."""
    # Every command imports this module, so import rich only when there is something to show.
    from mars_jax.cli.generate.terminal import console

    stderr_console = console(sys.stderr)
    with activity.doing(name), contextlib.ExitStack() as stack:
        if stderr_console.is_terminal:
            stack.enter_context(stderr_console.status(_Activities()))
        yield


@contextlib.contextmanager
def progress(name: str, *, bar: bool = True, deadline: float | None = None) -> Iterator[Show]:
    """Yield a function that reports progress to the heartbeat and to a progress bar, which disappears at the end.

    Args:
      name: plural name of the items that are counted.
      bar: False if stdout shows the results as they arrive, so that a terminal needs no bar.
      deadline: time of `time.monotonic` at which the work ends early.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from mars_jax.cli.generate.terminal import console

    stderr_console = console(sys.stderr)
    # A disabled bar draws nothing, but it still estimates the remaining time, which the heartbeat prints.
    progress_bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
        console=stderr_console,
        transient=True,
        disable=not (bar and (stderr_console.is_terminal or stderr_console.is_jupyter)),
        speed_estimate_period=WINDOW,
    )
    with activity.doing(name) as running_activity, progress_bars:
        progress_bars.add_task(name, total=None, text="")
        [task] = progress_bars.tasks

        def show(num_done: int, total: int | None, text: str = "") -> None:
            # Update the count first, because the remaining time is estimated from it.
            progress_bars.update(task.id, completed=num_done, total=total)
            detail_parts = []
            if total is not None:
                detail_parts.append(f"{num_done:,} of {total:,}")
            if seconds := task.time_remaining:
                if deadline is not None:
                    seconds = min(seconds, max(deadline - time.monotonic(), 0))
                detail_parts.append(f"{timedelta(seconds=round(seconds))} left")
            running_activity.detail = ", ".join(filter(None, (*detail_parts, text)))
            progress_bars.update(task.id, text=running_activity.detail)

        yield show


def announce(runs: str, seconds: float) -> None:
    """Print the estimated duration of `runs` to stderr.

    >>> announce("15 runs of 12 prompts", 250.4)  # on stderr
    """
    duration = timedelta(seconds=max(1, round(seconds)))
    say(f"{runs}: about {duration} of plain decoding, without reading the prompts, if no text ends early.")


def speed(emitted: int, steps: int, seconds: float) -> str:
    """Format tokens per second and tau. If all rows were read from a file, there are no times to report.

    >>> speed(40, 20, 2.0), speed(40, 20, 0.0)
    ('20 tokens/s, tau 2.00', 'read from the file')
    """
    if not seconds:
        return "read from the file"
    return f"{emitted / seconds:,.0f} tokens/s, tau {emitted / max(steps, 1):.2f}"
