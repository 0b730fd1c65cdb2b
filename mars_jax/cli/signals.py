"""Signal handling: Ctrl-C and SIGTERM end a command at once, with one line on stderr.

Python runs signal handlers in the main thread between two bytecodes, so no handler runs while XLA compiles. An
exception that a handler raises inside an XLA callback is lost or crashes the process. Therefore the handlers do
nothing, and two other threads read the signals from a pipe. Only the entry points of the process call `handle`: a
program that calls a command's `main` keeps its own handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from mars_jax.utils.errors import printable

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_MARK = 0  # no signal has this number
_SHOW_CURSOR = "\x1b[?25h"  # progress bars hide the cursor


class _State:
    """State that the threads share with the main thread."""

    def __init__(self) -> None:
        self.writing: int | None = None  # write end of the pipe; None before `handle`
        self.terminal: list[Any] | None = None  # terminal attributes of stdin
        self.interrupt_event: threading.Event | None = None  # event that the next Ctrl-C sets
        self.raises = False  # whether Ctrl-C raises KeyboardInterrupt in the main thread
        self.actions: list[Callable[[], str]] = []  # actions of the enclosing `ending` blocks
        self.turn = threading.Lock()  # held while reading the pipe
        self.marked = threading.Event()
        self.ending = threading.Lock()  # acquired once, by the thread that calls the action
        self.printing = threading.Lock()  # acquired once, by the thread that prints the line


_state = _State()


def handle() -> None:
    """Handle Ctrl-C and SIGTERM until the process ends; ignored signals stay ignored.

    Call it from the main thread before any slow work, such as imports.
    """
    # Do not replace the handler of a signal that is ignored (as under nohup) or that other code already handles.
    signal_numbers = [number for number, default in _DEFAULTS.items() if signal.getsignal(number) == default]
    read_end, _state.writing = os.pipe()
    # Python writes to the pipe inside the C handler of a signal, which must never block.
    os.set_blocking(_state.writing, False)
    signal.set_wakeup_fd(_state.writing, warn_on_full_buffer=False)
    for number in signal_numbers:
        signal.signal(number, _on_signal)
    # Save the terminal's settings, which `readline` changes while it reads a line. If stdin is not a terminal, there
    # are no settings to save.
    with contextlib.suppress(termios.error):
        _state.terminal = termios.tcgetattr(0)
    for _ in range(2):  # the second thread reads signals that arrive while the first one ends the process
        threading.Thread(target=_watch, args=(read_end,), name="signals", daemon=True).start()
    os.register_at_fork(after_in_child=lambda: _release(signal_numbers))


def _release(numbers: list[signal.Signals]) -> None:
    """Restore Python's handlers in a forked child: its signals must not end the parent through the shared pipe."""
    signal.set_wakeup_fd(-1)
    _state.writing = None
    for number in numbers:
        signal.signal(number, _DEFAULTS[number])


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal in the main thread. Python writes a signal to the pipe only if the signal has a handler."""
    if number == signal.SIGINT and _state.raises:
        raise KeyboardInterrupt


@contextlib.contextmanager
def ending(action: Callable[[], str]) -> Iterator[None]:
    """Call `action` if a signal that ends the process arrives inside the block.

    Args:
      action: function that saves unfinished work and returns the end of the line that begins with "interrupted" or
        "terminated". It runs in another thread while the main thread continues.
    """
    _state.actions.append(action)
    try:
        yield
    finally:
        _state.actions.remove(action)


@contextlib.contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets instead of ending the process; a second Ctrl-C ends it."""
    _state.interrupt_event = threading.Event()
    try:
        yield _state.interrupt_event
    finally:
        if _state.writing is not None:  # wait until all signals that arrived during the block have been read
            _state.marked.clear()
            os.write(_state.writing, bytes([_MARK]))
            _state.marked.wait()  # `_watch` has set `interrupt_event` to None: the next Ctrl-C ends the process
        else:
            _state.interrupt_event = None


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C inside the block, which waits for a line of input."""
    # `stoppable` keeps `_watch` from ending the process at the first Ctrl-C.
    with stoppable():
        try:
            _state.raises = True
            yield
        finally:
            _state.raises = False


def _watch(reading: int) -> None:
    while True:
        # Hold the lock while reading a signal and handling it. Otherwise both threads could read a Ctrl-C before either
        # sets the event, and the second Ctrl-C would have no effect.
        with _state.turn:
            # Python writes the number of each signal as one byte.
            number = os.read(reading, 1)[0]
            interrupt_event = _state.interrupt_event
            if number == _MARK:
                # All signals that arrived during the block of `stoppable` have been read.
                _state.interrupt_event = None
                _state.marked.set()
            elif number == signal.SIGINT and interrupt_event is not None and not interrupt_event.is_set():
                interrupt_event.set()
                continue
        if number in _WORDS:
            _end(signal.Signals(number))


def _end(number: signal.Signals) -> None:
    try:
        last_line = _WORDS[number]
        actions = list(_state.actions)  # a copy, because the main thread may remove an action
        # The first of the two threads runs the action, which may take a long time. A second signal ends the process at
        # once.
        if _state.ending.acquire(blocking=False) and actions:
            try:
                last_line += actions[-1]()
            except Exception as error:
                last_line += f": {' '.join(str(error).split())}"
        if _state.printing.acquire(blocking=False):
            _print(last_line)
    finally:
        # A normal exit would wait for the main thread, which may be compiling. Shells use the same exit code.
        os._exit(128 + number)


def _print(text: str) -> None:
    """Restore the terminal and write the last line to file descriptor 2: the main thread may hold stderr's lock."""
    with contextlib.suppress(OSError, termios.error):
        # The operating system would stop a background process that changes the terminal's settings.
        if _state.terminal is not None and os.tcgetpgrp(0) == os.getpgrp():
            termios.tcsetattr(0, termios.TCSADRAIN, _state.terminal)
    with contextlib.suppress(OSError):
        line_prefix = f"{_SHOW_CURSOR}\n" if os.isatty(2) else ""
        os.write(2, f"{line_prefix}{printable(text)}\n".encode(errors="replace"))
