"""Run generated programs: one process each, behind walls, with bounds on what it takes.

Behind walls (`walls`: bubblewrap, or `unshare` where that is not installed) the kernel keeps, also against malice:

- nothing outside of one private folder is written, and nothing is read but the system's and Python's own files: no
  home, no /proc, no environment, no keyring, no process of others;
- there is no network;
- nothing outlives the verdict, also where this process is killed;
- time, processes and threads, the memory of each, the size of a file and of all files are bounded.

Without walls (`unconfined`) Python's audit hook (`sandbox_child`) stands alone, with the bounds but that on all files.
They hold what a model writes by accident, and attacks by plain Python; they are no prison, and a program that means
harm finds a way out.

The verdict is a token of 128 bits, new for each program, on a pipe; no exit code and no output makes a pass. The
tests run where the program runs, so in both modes a program that means to can cheat them: by an `==` that is always
true, or by finding the token in the memory of its interpreter. Oracle: tests/lab/evaluate/test_sandbox.py.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import importlib.util
import json
import os
import secrets
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from mars_jax.core.errors import MarsError
from mars_jax.lab.evaluate.scoring import sandbox_child, walls

SECONDS = 10
MEMORY = 1 << 30  # bytes of address space, of each process
FILE = 1 << 20  # bytes of a file
PROCESSES = 16  # beside the first, threads among them
HOOK = "audit hook"
"""The answer of `confinement` where there are no walls."""
PROBE = "import os, tempfile\nassert not os.path.exists({marker!r})\ntempfile.TemporaryFile().write(b'x')"
"""A program that tests walls: it writes a file that it may, and looks for one that it must not see."""


def confinement(*, unconfined: bool = False) -> str:
    """The confinement of generated programs on this machine: "bubblewrap", "unshare" or "audit hook".

    Args:
      unconfined: whether the audit hook alone will do where there is nothing else.

    Raises:
      MarsError: nothing better than the hook works here, or there are no limits at all.
    """
    if importlib.util.find_spec("resource") is None:
        raise MarsError(
            "generated code runs under Unix resource limits, and here are none: use Linux or macOS."
        )
    found = _walls()
    if isinstance(found, walls.Walls):
        return found.name
    if unconfined:
        return HOOK
    raise MarsError(
        f"generated programs run only behind the walls of bubblewrap or unshare, and {found}, or add "
        "--allow-unconfined-code, which runs them with your rights under Python's audit hook alone."
    )


@functools.cache
def _walls() -> walls.Walls | str:
    """The best walls that are installed, tried once; else why there are none, and what to do."""
    best = next((candidate for candidate in walls.ALL if candidate.command("") is not None), None)
    if best is not None:
        with tempfile.NamedTemporaryFile() as marker:
            if _run(PROBE.format(marker=marker.name), best, seconds=SECONDS):
                return best
        if best.name == "bubblewrap":
            return (
                "this machine forbids the namespaces that bubblewrap needs: allow them (sysctl -w "
                "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0, in a container "
                "--privileged)"
            )
    return (
        "neither works on this machine: install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap, apk "
        "add bubblewrap)"
    )


def passes(
    program: str,
    *,
    unconfined: bool = False,
    seconds: int = SECONDS,
    memory: int = MEMORY,
    file_bytes: int = FILE,
) -> bool:
    """Run a Python program; True where it comes to its end without an exception.

    Args:
      program: source text, run as a file in an empty folder, without this process's environment; what it prints is
        dropped. An exit with success ends a main guard, and what follows the guard runs; any other exit fails.
      unconfined: whether the audit hook alone will do where there are no walls.
      seconds: of processor time, and of wall time.
      memory: bytes of address space, of each process.
      file_bytes: of the largest file it may write.

    Raises:
      MarsError: see `confinement`.

    >>> passes("assert 1 + 1 == 2", unconfined=True), passes("assert 1 + 1 == 3", unconfined=True)
    (True, False)
    """
    confinement(unconfined=unconfined)
    found = _walls()
    chosen = found if isinstance(found, walls.Walls) else None
    return _run(program, chosen, seconds=seconds, memory=memory, file_bytes=file_bytes)


def _run(
    program: str,
    chosen: walls.Walls | None,
    *,
    seconds: int,
    memory: int = MEMORY,
    file_bytes: int = FILE,
) -> bool:
    """`passes`, behind walls or, where these are None, without; False where the walls do not stand."""
    token = secrets.token_bytes(16)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="mars-jax-program-", ignore_cleanup_errors=True)
        )
        folder = os.path.realpath(folder)
        command = [] if chosen is None else chosen.command(folder)
        if command is None:
            return False
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        job = _job(token, writing, folder, (seconds, memory, file_bytes, PROCESSES), chosen)
        try:
            process = _start(command, job, program, folder, writing, chosen)
        except OSError:
            return False
        finally:
            os.close(writing)
        try:
            poll = select.poll()
            poll.register(reading, select.POLLIN)
            # The token, or the end of the pipe where the last process that could write it has ended.
            verdict = os.read(reading, 2 * len(token)) if poll.poll(1000 * seconds) else b""
        finally:
            _end(process)
    return hmac.compare_digest(verdict, token)


def _job(
    token: bytes, pipe: int, folder: str, limits: tuple[int, ...], chosen: walls.Walls | None
) -> dict[str, Any]:
    """The job as the child gets it: nothing of it is in its arguments, its environment or a file that has a name."""
    return {
        "token": token.hex(),
        "pipe": pipe,
        "folder": folder if chosen is None else walls.FOLDER,
        "readable": [*walls.visible(), *walls.DEVICES],
        "limits": limits,
        "walls": chosen is not None,
        "user": None if chosen is None or os.geteuid() != 0 else walls.NOBODY,
    }


def _start(
    command: list[str],
    job: Mapping[str, Any],
    program: str,
    folder: str,
    pipe: int,
    chosen: walls.Walls | None,
) -> subprocess.Popen[bytes]:
    """The child, in a session of its own: it can be ended as a whole, and an interrupt of the terminal's is ours."""
    child = sandbox_child.__file__ if chosen is None else walls.CHILD
    temporary = folder if chosen is None else walls.FOLDER
    with tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(job).encode() + b"\n" + program.encode("utf-8", errors="replace"))
        stdin.seek(0)
        return subprocess.Popen(
            [*command, *walls.interpreter(), child],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            pass_fds=[pipe],
            # Nothing of ours, and the same verdict every time.
            env={
                "HOME": temporary,
                "TMPDIR": temporary,
                "LOGNAME": "nobody",
                "USER": "nobody",
                "PYTHONHASHSEED": "0",
                "OPENBLAS_NUM_THREADS": "1",
            },
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole group, and only then let the system give its number to another one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
