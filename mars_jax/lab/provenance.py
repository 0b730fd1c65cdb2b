"""Provenance of measured figures: date, command, code and machine. Local paths are not recorded."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

from mars_jax.utils.types import JsonObject
from mars_jax.utils.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def provenance() -> JsonObject:
    """Return how a report was produced: `stamp`, the command with its flags, `machine`, and the versions of packages.

    >>> sorted(provenance())[:5]
    ['affinity', 'command', 'commit', 'cores', 'date']
    """
    return {
        **stamp(),
        "command": portable_command(sys.argv),
        **machine(),
        "mars-jax": __version__,
        "jax": version("jax"),
    }


def stamp() -> JsonObject:
    """Return the current minute (UTC), the commit of this checkout, and whether the code differs from that commit.

    A file that several runs append to stores these fields in each record. The commit is None if the package is not
    installed from its own git checkout.
    """
    timestamp = datetime.datetime.now(datetime.UTC)
    return {"date": timestamp.isoformat(timespec="minutes"), **_code()}


def machine() -> JsonObject:
    """Return the processor, how many and which cores this process may use, and the version of Python."""
    processor = platform.processor() or platform.machine()
    # On Linux, `platform` reports only the architecture.
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (match := re.search(r"^model name\s*:(.*)", cpuinfo.read_text(), re.MULTILINE)):
        processor = match[1].strip()
    return {
        "processor": processor,
        "cores": len(cores()),
        "affinity": cores(),
        "python": platform.python_version(),
    }


def cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def portable_command(arguments: list[str]) -> str:
    """Return a command line without the names of local folders.

    A path outside the checkout is reduced to its last part.

    >>> portable_command(["scripts/bench.py", "--task", "stories=/home/me/stories.txt", "--data", "/data/eval/"])
    'python -m scripts.bench --task stories=stories.txt --data eval'
    """
    # Match only where a path can begin: at the start of an argument, or after "=", ":" or "," (as in NAME=PATH or a
    # list of paths).
    texts = [re.sub(rf"(?<![^=:,]){re.escape(str(ROOT))}/", "", text) for text in arguments]
    words = [re.sub(r"(?<![^=:,])(?:~|\.\.?)?/(?:[^/=:,]+/)*([^/=:,]+)/?", r"\1", text) for text in texts]
    if words[0].startswith("scripts/"):
        module = words[0].removesuffix(".py").replace("/", ".")
        return shlex.join(["python", "-m", module, *words[1:]])
    return shlex.join(["python"] * words[0].endswith(".py") + words)


def git(*arguments: str) -> str:
    """Return the output of a git command in this checkout."""
    command_line = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command_line, capture_output=True, text=True, check=True).stdout.strip()


def version(name: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _code() -> JsonObject:
    try:
        if Path(git("rev-parse", "--show-toplevel")) != ROOT:  # installed inside another repository
            return {"commit": None, "dirty": None}
        commit = git("rev-parse", "--short=10", "HEAD")
        # Consider only code: a modified report or page does not make the checkout dirty.
        return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--", "*.py"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
