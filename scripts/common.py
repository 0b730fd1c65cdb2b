"""Helpers shared by the scripts: interleaved timing, intervals, results in JSON, and the origin of each report.

Run a script from the root of the checkout, as `python -m scripts.FOLDER.NAME`. Importing this module needs only the
standard library and the checkout, because checks/processor_seconds.py runs before any package is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mars_jax.lab import provenance as run_provenance
from mars_jax.lab.provenance import cores, git, machine, stamp

if TYPE_CHECKING:
    import numpy as np

ROOT = Path(__file__).resolve().parents[1]

__all__ = ["cores", "git", "machine", "stamp"]
RESULTS = ROOT / "scripts" / "results"
RESAMPLES = 10_000
PLACES = ("environment", "made", "machine")
"""Keys under which a report may store its provenance."""


class Origin(NamedTuple):
    """The run that wrote a report, or the commit that added the report if the run did not record its own commit."""

    date: str | None  # when it ran
    commit: str
    committed: str | None  # date of the commit that added the report; None if the run recorded its commit
    machine: str | None
    dirty: bool


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a module's docstring as its description, with the line breaks preserved."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def in_turns(arms: Mapping[Any, Callable[[], Any]], turns: int, *, warm: int = 1) -> dict[Any, np.ndarray]:
    """Time functions alternately, and return for each the seconds per turn, f64[turns].

    Every second turn runs the functions in reverse order, so that drift affects all of them equally.

    Args:
      arms: the functions, keyed by name. Each measured time includes waiting for the function's JAX results.
      turns: number of turns whose times are returned.
      warm: number of turns that run first, to compile the programs, and are left out of the result.
    """
    import jax
    import numpy as np

    seconds: dict[Any, list[float]] = {name: [] for name in arms}
    for turn in range(warm + turns):
        for name in list(arms)[:: -1 if turn % 2 else 1]:
            began = time.perf_counter()
            jax.block_until_ready(arms[name]())
            seconds[name].append(time.perf_counter() - began)
    return {name: np.asarray(times[warm:]) for name, times in seconds.items()}


def ratio(numerators: Any, denominators: Any) -> dict[str, float]:
    """Return the median ratio of paired turns, with lower and upper one-sided 95% bootstrap bounds.

    Args:
      numerators, denominators: seconds f64[turns], or f64[starts, turns] if processes were started several times. The
        bootstrap then resamples the starts, and the turns within each start.

    >>> ratio([2.0, 2.0], [1.0, 1.0])
    {'median': 2.0, 'lower_95': 2.0, 'upper_95': 2.0}
    """
    import numpy as np

    ratios = np.atleast_2d(np.asarray(numerators, np.float64) / np.asarray(denominators, np.float64))
    rng, (starts, turns) = np.random.default_rng(0), ratios.shape
    start_ids = rng.integers(starts, size=(RESAMPLES, starts, 1))
    turn_ids = rng.integers(turns, size=(RESAMPLES, starts, turns))
    low, high = np.quantile(np.median(ratios[start_ids, turn_ids], axis=(1, 2)), [0.05, 0.95])
    return {"median": float(np.median(ratios)), "lower_95": float(low), "upper_95": float(high)}


def ratio_of_sums(tops: np.ndarray, bottoms: np.ndarray, *, digits: int = 4) -> list[float]:
    """Return [ratio, low, high] for sum(tops) / sum(bottoms), with a 95% bootstrap interval over the n prompts.

    `tops` and `bottoms` are f64[n]. All three numbers are 0 if every element of `bottoms` is 0.

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


def earlier_report(path: Path | None) -> dict[str, Any]:
    """Return the report of an earlier run, or {} if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}


def provenance(*packages: str, data: Iterable[str | os.PathLike[str]] = (), **weights: Any) -> dict[str, Any]:
    """Return the origin of a report: that of `lab.provenance.provenance`, with digests of script, data and weights.

    If the command runs a script of this checkout, `script` maps its path to a digest, so that later changes to the
    script can be detected.

    Args:
      packages: names of the packages whose versions are recorded. The version is None for packages that are not
        installed.
      data: files or folders that the run read; their digests are recorded.
      weights: params whose digests are recorded, keyed by name.
    """
    report = run_provenance.provenance() | {name: run_provenance.version(name) for name in packages}
    script_path = Path(sys.argv[0]).resolve()
    if script_path.is_relative_to(ROOT / "scripts") and script_path.is_file():
        report["script"] = {script_path.relative_to(ROOT).as_posix(): short_digest(script_path.read_bytes())}
    if data_paths := [Path(path) for path in data]:
        report["data"] = {path.name: _digest_of(path) for path in data_paths}
    if weights:
        from mars_jax.serve.rows import fingerprint

        report["weights"] = {name: fingerprint(params) for name, params in weights.items()}
    return report


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


def write(path: Path | None, report: Any, *, indent: int | None = 1) -> None:
    """Write a report atomically. Do nothing if `path` is None."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=indent) + "\n", encoding="utf-8")
    part.replace(path)


def load(name: str) -> Any:
    """Return the contents of a JSON file in scripts/results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def span(mean: float, low: float, high: float, show: str = "{:.2f}") -> str:
    """Format a mean with its interval.

    >>> span(1.0, 0.5, 1.5)
    '1.00 [0.50, 1.50]'
    """
    return f"{show.format(mean)} [{show.format(low)}, {show.format(high)}]"


def measured(name: str) -> str:
    """Return a sentence that states the date and the commit of a report, given the name of its JSON file."""
    return sentence(origin(load(name)))


def origin(report: Any) -> Origin:
    """Return the origin of a report, or the latest origin if each record of the report has its own.

    Raises:
      ValueError: the report has no origin.

    >>> origin({"recovered": {"commit": "fa252ce", "committed": "2026-11-23T00:52:49+00:00"}}).commit
    'fa252ce'
    """
    origins = list(_origins(report))
    if not origins:
        raise ValueError("a report has neither the commit and date of its run nor a record of its history.")
    return max(origins, key=lambda source: source.date or source.committed or "")


def _origins(report: Any) -> Iterator[Origin]:
    if isinstance(report, list):
        for record in report:
            yield from _origins(record)
        return
    places = [place for place in (report, *map(report.get, PLACES)) if isinstance(place, dict)]
    dated = [place for place in places if place.get("date")]
    run = next((place for place in dated if place.get("commit")), dated[0] if dated else {})
    history = report.get("recovered", {})
    if history.get("commit"):
        yield Origin(run.get("date"), history["commit"], history["committed"], None, False)
    elif run.get("commit"):
        count = run["cores"]
        machine = f"{count} core{'s' * (count != 1)} of {run['processor']}"
        yield Origin(run["date"], run["commit"], None, machine, bool(run["dirty"]))


def sentence(source: Origin) -> str:
    """Return a sentence that states the date and the commit of a report's measurement or of its addition."""
    if source.committed is None:
        changed = " with uncommitted changes" if source.dirty else ""
        return f"Measured on {str(source.date)[:10]} at {source.commit}{changed} on {source.machine}."
    if source.date is not None:
        return f"Measured on {source.date[:10]}, committed in {source.commit}."
    return f"Committed on {source.committed[:10]} in {source.commit}."


def script_of(checkout: Path, name: str) -> str:
    """Return the path of a script in a checkout. The script's folder may differ between commits."""
    return str(next((checkout / "scripts").rglob(name)))


class Worker:
    """A script that answers each line with a line of JSON. It has its own process, so that arms share no memory."""

    def __init__(
        self, arguments: Sequence[str], *, checkout: Path = ROOT, environment: Mapping[str, str] | None = None
    ):
        """Start a script that imports mars_jax from `checkout`; `arguments` are the script's path and arguments."""
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
        """Read the next line of the process's output, and parse it as JSON."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} ended: see its message above")
        return json.loads(line)

    def ask(self, line: str = "go") -> Any:
        """Send a line to the process, and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.answer()
