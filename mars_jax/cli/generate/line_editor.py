"""Lines that a terminal is asked for, with editing and a history that stays. Nothing here imports jax."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from mars_jax.core import home

KEEPS = 1000
"""Lines of the history."""


def history_file() -> Path | None:
    """Return the file of the history, in the user's folder for state; None for a user without a home.

    >>> history_file().parts[-2:]
    ('mars_jax', 'history')
    """
    state = home.kept("XDG_STATE_HOME", ".local", "state")
    return state and state / "mars_jax" / "history"


@contextlib.contextmanager
def editing(out: IO[str], words: Sequence[str]) -> Iterator[Callable[[str], str]]:
    """Give a function from a prompt to the line that is typed, without its end; `EOFError` at the end of the input.

    The history's file is made for the user alone. If it cannot be written, the history lasts for the session only.

    Args:
      out: the terminal.
      words: what the tabulator key completes at the beginning of a line.
    """
    try:
        import readline
    except ImportError:  # a Python without it, as on Windows, has its console's own editing
        readline = None
    path = history_file()
    kept = readline is not None and path is not None and _made(path)
    if readline is not None:
        readline.set_completer_delims(" \t\n")
        readline.set_completer(lambda text, state: _completion(readline.get_line_buffer(), words, state))
        own = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if own else "tab: complete")
        readline.set_history_length(KEEPS)
        readline.clear_history()
        if kept:
            with contextlib.suppress(OSError):
                readline.read_history_file(path)

    def ask(prompt: str) -> str:
        # Python edits lines where its own stdout is the terminal; commands put stderr there.
        with contextlib.redirect_stdout(out):
            line = input(prompt)
        if readline is not None and kept and line.strip():
            with contextlib.suppress(OSError):
                readline.append_history_file(1, path)
        return line

    try:
        yield ask
    finally:
        if readline is not None:
            readline.set_completer(None)


def _made(path: Path) -> bool:
    """Tell whether the file is there, after making it for the user alone if it was not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return False
    return True


def _completion(line: str, words: Sequence[str], state: int) -> str | None:
    """Return the word number `state` that begins as the line does.

    >>> _completion("/s", ["/new", "/set", "/settings"], 1)
    '/settings'
    """
    fits = [word for word in words if word.startswith(line)] if line.startswith("/") else []
    return fits[state] if state < len(fits) else None
