"""What the scripts share: times taken in turns, intervals, where and of what a figure was measured, JSON of results.

Only the standard library is imported at the top, since processor_seconds.py runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # nothing may be installed yet

from mars_jax.lab.provenance import cores, digest, git, machine, provenance, stamp  # noqa: E402

__all__ = ["cores", "digest", "git", "machine", "provenance", "stamp"]
RESULTS = ROOT / "scripts" / "results"
RESAMPLES = 10_000


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose description is a module's docstring, line by line."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def in_turns(ways: Mapping[Any, Callable[[], Any]], turns: int, *, warm: int = 1) -> dict[Any, np.ndarray]:
    """Seconds f64[turns] of each way. Every second turn goes backwards, so that a machine that drifts drifts for all.

    Args:
      ways: by name; what one returns is waited for, if it is JAX's.
      turns: that are counted.
      warm: turns before them, which compile and are not counted.
    """
    import jax
    import numpy as np

    seconds: dict[Any, list[float]] = {name: [] for name in ways}
    for turn in range(warm + turns):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            began = time.perf_counter()
            jax.block_until_ready(ways[name]())
            seconds[name].append(time.perf_counter() - began)
    return {name: np.asarray(taken[warm:]) for name, taken in seconds.items()}


def ratio(over: Any, under: Any) -> dict[str, float]:
    """Median of ratios of turns, with both one-sided 95% bounds by the bootstrap.

    Args:
      over, under: seconds f64[turns], or f64[starts, turns] where processes were started several times; then both
        starts and turns within them are drawn.

    >>> ratio([2.0, 2.0], [1.0, 1.0])
    {'median': 2.0, 'lower_95': 2.0, 'upper_95': 2.0}
    """
    import numpy as np

    each = np.atleast_2d(np.asarray(over, np.float64) / np.asarray(under, np.float64))
    rng, (starts, turns) = np.random.default_rng(0), each.shape
    drawn = (
        rng.integers(starts, size=(RESAMPLES, starts, 1)),
        rng.integers(turns, size=(RESAMPLES, starts, turns)),
    )
    low, high = np.quantile(np.median(each[drawn], axis=(1, 2)), [0.05, 0.95])
    return {"median": float(np.median(each)), "lower_95": float(low), "upper_95": float(high)}


def ratio_of_sums(tops: np.ndarray, bottoms: np.ndarray, *, digits: int = 4) -> list[float]:
    """[ratio, low, high] of two sums over prompts f64[n], 95% by the bootstrap over prompts; zeros of none.

    >>> import numpy as np
    >>> ratio_of_sums(np.array([3.0, 3.0]), np.array([2.0, 2.0]))
    [1.5, 1.5, 1.5]
    """
    import numpy as np

    if not np.any(bottoms):
        return [0.0, 0.0, 0.0]
    draw = np.random.default_rng(0).integers(0, len(tops), (2000, len(tops)))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = tops[draw].sum(axis=1) / bottoms[draw].sum(axis=1)
    low, high = np.nanquantile(ratios, (0.025, 0.975))
    return [round(float(x), digits) for x in (tops.sum() / max(bottoms.sum(), 1e-9), low, high)]


def kept(path: Path | None) -> dict[str, Any]:
    """The report of an earlier run, to be gone on with; empty where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}


def write(path: Path | None, report: Any, *, indent: int | None = 1) -> None:
    """Write a report, whole or not at all; without a path nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=indent) + "\n", encoding="utf-8")
    part.replace(path)


def first_text(
    command: Sequence[str], environment: Mapping[str, str] | None = None, before: str = ""
) -> tuple[float, str]:
    """(seconds from the start of a process to the first letter that it prints after `before`, all that it prints)."""
    told = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(environment or {})
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=told) as process:
        assert process.stdout is not None
        head = process.stdout.read(len(before) + 1)
        seconds = time.perf_counter() - began
        rest = process.stdout.read()
    if process.returncode or not head.decode().startswith(before):
        raise SystemExit(f"{shlex.join(command[:3])} failed with exit code {process.returncode}.")
    return seconds, (head + rest).decode()


class Worker:
    """A script in a process of its own that answers a line of JSON to each line: arms that share no memory."""

    def __init__(
        self, arguments: Sequence[str], *, checkout: Path = ROOT, environment: Mapping[str, str] | None = None
    ):
        """
        Args:
          arguments: the script, and what it is told.
          checkout: whose mars_jax it imports.
          environment: more of it.
        """
        self._name = shlex.join(arguments)
        self._process = subprocess.Popen(
            [sys.executable, *arguments], cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(checkout)} | dict(environment or {}),
        )  # fmt: skip

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def answer(self) -> Any:
        """What it says next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} ended: see its message above")
        return json.loads(line)

    def ask(self, line: str = "go") -> Any:
        """What it answers to a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.answer()
