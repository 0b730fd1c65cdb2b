"""SIGTERM of a machine that is taken away: a command ends at once and in order, and says how to go on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from mars_jax.core.errors import say

TERMINATED = 128 + signal.SIGTERM
"""Exit code, as shells have it."""


@contextlib.contextmanager
def ending_in_order(end: Callable[[], str]) -> Iterator[None]:
    """End the process with `TERMINATED` where SIGTERM comes, once `end` has been called and its sentence said.

    That is done by a thread. The main one may be compiling for minutes, and a machine has half a minute; threads of
    XLA's would crash an ordinary exit. A program that calls a command and heeds SIGTERM itself goes on to do so.

    Args:
      end: puts what is kept in order, while the main thread runs on; returns one sentence.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        while signals := os.read(reading, 1):
            if signals[0] == signal.SIGTERM:
                _end(end)

    # Python writes the number of a signal there when it comes; its handlers wait for the main thread.
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    thread = threading.Thread(target=watch, name="sigterm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        os.close(writing)
        thread.join()  # it ends the process, if SIGTERM has come
        os.close(reading)


def _end(end: Callable[[], str]) -> None:
    try:
        with contextlib.suppress(OSError, ValueError):  # stderr is full or closed
            say(end())
    except Exception as error:
        say(f"error: {' '.join(str(error).split())}")
    finally:
        os._exit(TERMINATED)
