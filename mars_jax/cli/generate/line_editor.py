"""Input lines on a terminal, with editing, completion and a history. This module does not import jax."""

from __future__ import annotations

import contextlib
import readline
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from mars_jax.utils import paths as home

HISTORY_LINES = 1000


def history_file() -> Path | None:
    """Return the path of the history, in the user's state folder; None for a user without a home.

    >>> history_file().parts[-2:]
    ('mars_jax', 'history')
    """
    state_folder = home.kept("XDG_STATE_HOME", ".local", "state")
    return state_folder and state_folder / "mars_jax" / "history"


@contextlib.contextmanager
def editing(out: IO[str], words: Sequence[str]) -> Iterator[Callable[[str], str]]:
    """Yield a function that shows a prompt and returns the user's line; it raises `EOFError` at the end of input.

    Only the user can read the history file. If it cannot be written, the history lasts for the session.

    Args:
      out: the terminal.
      words: completions that the tab key offers at the beginning of a line.
    """
    # By default a slash is a delimiter, and completing /s would insert /set after the slash.
    readline.set_completer_delims(" \t\n")
    readline.set_completer(lambda text, state: _completion(readline.get_line_buffer(), words, state))
    readline.parse_and_bind("tab: complete")
    readline.set_history_length(HISTORY_LINES)
    # The history is global to the process: drop lines of an earlier session.
    readline.clear_history()
    history_path = history_file()
    with contextlib.suppress(OSError):
        if history_path is not None:
            history_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            history_path.touch(mode=0o600)
            readline.read_history_file(history_path)

    def ask(prompt: str) -> str:
        # Python edits lines only if its own stdout is the terminal; commands redirect stdout to stderr.
        with contextlib.redirect_stdout(out):
            line = input(prompt)
        if history_path is not None and line.strip():
            with contextlib.suppress(OSError):
                # Append only the new line, because several sessions may share the file.
                readline.append_history_file(1, history_path)
        return line

    try:
        yield ask
    finally:
        readline.set_completer(None)


def _completion(line: str, words: Sequence[str], state: int) -> str | None:
    """Return the word at index `state` among the words that begin with the line.

    >>> _completion("/s", ["/new", "/set", "/settings"], 1)
    '/settings'
    """
    if not line.startswith("/"):
        return None
    matching_words = [word for word in words if word.startswith(line)]
    return next(iter(matching_words[state:]), None)
