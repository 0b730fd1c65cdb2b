"""Provenance of figures: date, command, code, machine and weights.

Local paths are not recorded. Only fingerprints of weights need packages outside the standard library.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mars_jax.utils.types import JsonObject
from mars_jax.utils.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def provenance(*packages: str, data: Iterable[str | os.PathLike[str]] = (), **weights: Any) -> JsonObject:
    """Return the origin of a report: `stamp`, the command with all its flags, `machine`, versions and weights.

    If the command runs a script of this checkout, `script` maps its name to a digest, so that a page can detect later
    changes.

    Args:
      packages: packages to list with their versions, in addition to mars-jax and jax. The version is None for a
        package that is not installed.
      data: files or folders that were read. A digest of each is recorded.
      weights: params, keyed by name. A digest of each is recorded.

    >>> sorted(provenance())[:5]
    ['affinity', 'command', 'commit', 'cores', 'date']
    """
    report = {
        **stamp(),
        "command": portable_command(sys.argv),
        **machine(),
        "mars-jax": __version__,
        **{name: version(name) for name in ("jax", *packages)},
    }
    script_path = Path(sys.argv[0]).resolve()
    if script_path.is_relative_to(ROOT / "scripts") and script_path.is_file():
        report["script"] = {script_path.relative_to(ROOT).as_posix(): short_digest(script_path.read_bytes())}
    if data_paths := [Path(path) for path in data]:
        report["data"] = {path.name: _digest_of(path) for path in data_paths}
    if weights:
        from mars_jax.serve.rows import fingerprint

        report["weights"] = {name: fingerprint(params) for name, params in weights.items()}
    return report


def stamp() -> JsonObject:
    """Return the current minute (UTC), the commit of this checkout, and whether the code differs from that commit.

    A file that several runs write to stores this in each record. The commit is None if the package is not in a
    checkout of its own.
    """
    timestamp = datetime.datetime.now(datetime.UTC)
    return {"date": timestamp.isoformat(timespec="minutes"), **_code()}


def machine() -> JsonObject:
    """Return the processor, the number and list of cores that this process may use, and the version of Python."""
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


def short_digest(data: bytes) -> str:
    """Return a short hash of the bytes of a file."""
    return hashlib.sha256(data).hexdigest()[:12]


def _digest_of(path: Path) -> str:
    """Return the digest of a file, or of the names and digests of the files in a folder."""
    if path.is_file():
        return short_digest(path.read_bytes())
    digest_lines = [
        f"{file.name} {short_digest(file.read_bytes())}" for file in sorted(path.iterdir()) if file.is_file()
    ]
    return short_digest("\n".join(digest_lines).encode())


def cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def portable_command(arguments: list[str]) -> str:
    """Return a command line without local folders. A path outside the checkout is reduced to its last part.

    >>> portable_command(["scripts/bench.py", "--task", "stories=/home/me/stories.txt", "--data", "/data/eval/"])
    'python -m scripts.bench --task stories=stories.txt --data eval'
    """
    # Match only at the beginning of a path; an argument may be NAME=PATH, or a list of paths.
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
