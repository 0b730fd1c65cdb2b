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

# Background runs ignore SIGINT, and child processes inherit that. Restore the default before starting the command.
LAUNCHER = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


def strip_escapes(text):
    """Return the text without escape sequences, which draw colours and spinners."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


class Shell:
    """A command in its own terminal."""

    def __init__(self, *command, columns=80, **env):
        # Keep both ends open here, so that neither closes before the command has opened the terminal.
        self._controller, self._terminal = pty.openpty()
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        # A process that opens a terminal in a session without one makes it its controlling terminal, and gets Ctrl-C.
        name = os.ttyname(self._terminal)
        redirect = f'exec "$@" < {name} > {name} 2>&1'
        environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LC_ALL")}
        self._process = subprocess.Popen(
            ["sh", "-c", redirect, "sh", sys.executable, "-c", LAUNCHER, sys.executable, *command],
            start_new_session=True,
            env=environment | env,
        )

    def send(self, text):
        os.write(self._controller, text.encode())

    def until(self, pattern, seconds=120):
        """Return the output up to and including the pattern."""
        output, end = b"", time.monotonic() + seconds
        while not re.search(pattern, text := output.decode(errors="replace")):
            if select.select([self._controller], [], [], 0.5)[0]:
                output += os.read(self._controller, 65536)
            elif self._process.poll() is not None or time.monotonic() > end:
                self.wait()
                pytest.fail(f"{pattern!r} never came: {text}")
        return text

    def wait(self):
        """Return the exit code; discard the remaining output."""
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        self._process.kill()
        os.close(self._controller)
        os.close(self._terminal)
        return self._process.wait()
