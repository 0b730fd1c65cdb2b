"""Run generated programs: one process each, with bounds on its time, its memory and its files.

A guard against accidents, not against malice (`sandbox_child` has the list), and so off unless asked for: wherever
the target is not trusted, run the whole command in a container. Oracle: tests/evaluate/test_sandbox.py.
"""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import tempfile

from mars_jax.core.errors import MarsError
from mars_jax.evaluate.scoring import sandbox_child

SECONDS = 10
MEMORY = 1 << 30  # bytes of address space
FILE = 1 << 20  # bytes of a file


def check_platform() -> None:
    """Raise MarsError where the limits do not exist."""
    if importlib.util.find_spec("resource") is None:
        raise MarsError(
            "generated code runs under Unix resource limits, and here are none: use Linux or macOS."
        )


def passes(program: str, *, seconds: int = SECONDS, memory: int = MEMORY, file_bytes: int = FILE) -> bool:
    """Whether a Python program comes to its end without an exception.

    Args:
      program: source text, run in an empty folder, without this process's environment; what it prints is dropped.
      seconds: of processor time, and of wall time.
      memory: bytes of address space.
      file_bytes: of the largest file it may write, all of them inside of its folder.

    >>> passes("assert 1 + 1 == 2"), passes("assert 1 + 1 == 3")
    (True, False)
    """
    # A program that calls os._exit in the middle cannot know which code says that it passed.
    passed = random.SystemRandom().randrange(3, 120)
    limits = [str(n) for n in (passed, seconds, memory, file_bytes)]
    with tempfile.TemporaryDirectory(prefix="mars-jax-program-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-B", sandbox_child.__file__, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            # Nothing of ours, and the same verdict every time.
            env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "TMPDIR": folder},
            start_new_session=True,  # an interrupt of the terminal's is for us to handle
        )
        try:
            process.communicate(program.encode("utf-8", errors="replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
    return process.returncode == passed
