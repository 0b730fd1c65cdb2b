"""A command in its own terminal, for tests: read its output and type input."""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

# In background runs SIGINT is ignored, and child processes would inherit that. Restore the default first.
HEEDS = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


def plain(text):
    """Return the text without escape sequences, which draw colours and spinners."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


class Shell:
    """A command in its own terminal."""

    def __init__(self, *command, columns=80, **env):
        # Keep both ends open here, so that neither closes before the command has opened the terminal.
        self._own, self._theirs = pty.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        # A process that opens a terminal in a session without one makes it its controlling terminal, and gets Ctrl-C.
        name = os.ttyname(self._theirs)
        begin = f'exec "$@" < {name} > {name} 2>&1'
        kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LC_ALL")}
        self._process = subprocess.Popen(
            ["sh", "-c", begin, "sh", sys.executable, "-c", HEEDS, sys.executable, *command],
            start_new_session=True,
            env=kept | env,
        )

    def send(self, text):
        os.write(self._own, text.encode())

    def until(self, pattern, seconds=120):
        """Return the output up to and including the pattern."""
        shown, end = b"", time.monotonic() + seconds
        while not re.search(pattern, text := shown.decode(errors="replace")):
            if select.select([self._own], [], [], 0.5)[0]:
                shown += os.read(self._own, 65536)
            elif self._process.poll() is not None or time.monotonic() > end:
                self.ends()
                pytest.fail(f"{pattern!r} never came: {text}")
        return text

    def ends(self):
        """Return the exit code; discard the remaining output."""
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        self._process.kill()
        os.close(self._own)
        os.close(self._theirs)
        return self._process.wait()
