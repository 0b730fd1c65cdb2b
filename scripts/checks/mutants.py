"""Make 60 small changes to the package, one at a time, and check that a test fails for each.

    pip install -e ".[dev]"
    python -m scripts.checks.mutants --seed 22           # draw mutants and run those without an outcome
    python -m scripts.checks.mutants --seed 22 --again   # rerun the survivors after adding tests
    python -m scripts.checks.mutants --seed 22 --again --only 5 19 --first tests/core/test_spans.py
    python -m scripts.checks.mutants --seed 22 --explain 17 "the branch only skips work"

The operators come from mutmut (libcst). mutmut's own runner does not work with JAX: it selects the mutant each time a
function is called, and skips decorated functions, so it misses jitted functions. For each changed function, mutmut runs
the tests that were seen to call it in an initial run, but a program that is already compiled no longer calls its Python
functions. This script therefore imports jax and forks for each mutant. In the fork, the changed source is loaded
instead of the module's file. The checkout stays unchanged.

Mutants are drawn with a seed, in equal numbers from each of five packages of mars_jax. Within a package, the draw
cycles through the operators, because otherwise most mutants would only drop an argument, which any test would catch.
Docstrings, annotations, error messages and code for type checkers are not changed. For each mutant, the script runs the
fast tests of the changed file's package, those of the packages that import the file, and those in tests/matrix, until a
test fails or the budget of processor seconds is spent. A survivor counts as a gap in the tests until it is explained.
Only the first pass of a seed measures how good the tests are, because tests for its survivors are added afterwards.

Writes scripts/results/mutants_SEED.json after each mutant.
"""

from __future__ import annotations

import collections
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts import common
from scripts.checks.mutants_drawn import EXAMPLES, OF_ALL, ROOT, SUITE, Mutant, draw, tests_of

STUCK = 3.0
"""A test run counts as hung if its wall-clock seconds exceed this many times its budget of processor seconds."""


class Replaced(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """An importer that loads one module from changed source code."""

    def __init__(self, file: str, code: str):
        self._file, self._code = ROOT / file, code
        self._name = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._file, loader=self)

    def get_filename(self, fullname: str) -> str:
        return str(self._file)

    def get_data(self, path: Any) -> bytes:
        return self._code.encode()


class Order:
    """A pytest plugin that orders tests, runs them until the processor seconds are spent, and records their outcomes.

    The tests named by --first run first. Next are the quick tests that run for every package and the tests that killed
    other mutants of the file, then the tests named after the file, and then the folders in the order of `tests_of`. In
    each group, quick tests run before slow ones. If the file defines a rule, the test suite for rules runs only this
    rule's cases.
    """

    def __init__(
        self,
        seconds: Mapping[str, float],
        budget: float,
        file: str = "",
        keen: Collection[str] = (),
        first: Collection[str] = (),
    ):
        self._times, self._keen, self._first = seconds, keen, set(first)
        self._budget, self._stem = budget, Path(file).stem
        self._room = f"tests/{Path(file).parent.name}/"
        self._folders = tests_of(file) if file else []
        module = file.removesuffix(".py").replace("/", ".")
        self._own = {SUITE: Path(file).stem, EXAMPLES: f"{module}]"} if file else {}
        self.seconds: collections.Counter[str] = collections.Counter()
        self.failed, self.tests = "", 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for file, name in self._own.items():
            suite = [item for item in items if item.nodeid.startswith(file)]
            if own_tests := [item for item in suite if name in item.nodeid.partition("[")[2]]:
                items[:] = [item for item in items if item not in suite or item in own_tests]

        def rank(item: Any) -> tuple[Any, ...]:
            file, seconds = item.nodeid.partition("::")[0], self._times.get(item.nodeid, 1.0)
            if self._first & {file, item.nodeid}:
                return (0, seconds)
            if item.nodeid in self._keen or file in OF_ALL[1:]:
                return (1, seconds)
            if file == EXAMPLES or file == f"{self._room}test_{self._stem}.py":
                return (2, seconds)
            places = [i for i, folder in enumerate(self._folders) if file.startswith(folder)]
            return (3, *places, seconds)

        items.sort(key=rank)
        self.tests = len(items)

    def pytest_runtest_setup(self, item: Any) -> None:
        if sum(os.times()[:4]) > self._budget:
            item.session.shouldstop = "the budget is spent"

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += round(report.duration, 3)
        if report.failed:
            self.failed = self.failed or report.nodeid

    def outcome(self) -> dict[str, Any]:
        return {"by": self.failed, "ran": len(self.seconds), "of": self.tests, "each": dict(self.seconds)}


def run(
    tests: Sequence[str],
    seconds: Mapping[str, float],
    mutant: Mutant | None,
    budget: float,
    keen: Collection[str] = (),
    first: Collection[str] = (),
) -> dict[str, Any]:
    """Run tests in a fork of this process until one fails or the budget is spent."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report_file = Path(folder) / "report.json"
        child = os.fork()
        if not child:
            os.setsid()
            order = Order(seconds, budget, mutant.file if mutant else "", keen, first)
            _in_child(tests, mutant, report_file, order)
        while time.monotonic() - began < budget * STUCK and not os.waitpid(child, os.WNOHANG)[0]:
            time.sleep(0.05)
        took = round(time.monotonic() - began, 1)
        if took >= budget * STUCK:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"outcome": "timeout", "by": "", "seconds": took, "each": {}}
        if report_file.with_name("unknown").exists():
            raise SystemExit(f"one of {', '.join(tests)} is not a test: correct --first.")
        # A mutant that crashes the test process counts as killed.
        outcome = (
            json.loads(report_file.read_text()) if report_file.exists() else {"by": "the process", "each": {}}
        )
    return {"outcome": "killed" if outcome["by"] else "survived", "seconds": took} | outcome


def _in_child(tests: Sequence[str], mutant: Mutant | None, report_file: Path, order: Order) -> None:
    import pytest

    try:
        out = os.open(report_file.with_name("log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if mutant is not None:
            sys.meta_path.insert(0, Replaced(mutant.file, mutant.code))
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--no-header", "--tb=no"]
        # pytest warns that it cannot rewrite the assertions of modules that are already imported.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main([*tests, *options], plugins=[order])
        if code == pytest.ExitCode.INTERNAL_ERROR and not order.failed:
            order.failed = "pytest"
        if code == pytest.ExitCode.USAGE_ERROR:
            report_file.with_name("unknown").touch()
        report_file.write_text(json.dumps(order.outcome()))
    finally:
        os._exit(0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--count", type=int, default=60, help="number of mutants (default: 60)")
    parser.add_argument("--seed", type=int, required=True, help="seed of the draw")
    parser.add_argument("--again", action="store_true", help="run the survivors once more")
    parser.add_argument(
        "--explain",
        nargs=2,
        metavar=("NUMBER", "REASON"),
        help="record why a survivor does not change behaviour",
    )
    parser.add_argument(
        "--budget", type=float, default=300.0, help="processor seconds of tests per mutant (default: 300)"
    )
    parser.add_argument(
        "--only", type=int, nargs="+", metavar="NUMBER", help="with --again: only these mutants"
    )
    parser.add_argument(
        "--first", nargs="+", default=[], metavar="TEST", help="with --again: tests to run before the others"
    )
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    results = common.RESULTS / f"mutants_{args.seed}.json"
    report = common.earlier_report(results)
    if args.explain:
        _explain(report, int(args.explain[0]), args.explain[1])
        common.write(results, report)
        return
    drawn = draw(report.get("count", args.count), args.seed)
    records = [mutant.as_json(number) for number, mutant in enumerate(drawn, start=1)]
    if report and [mutant["diff"] for mutant in records] != [mutant["diff"] for mutant in report["mutants"]]:
        raise SystemExit(f"the code has changed since {results} was started: move it away to draw again.")
    if not report:
        report = {"count": args.count, "seed": args.seed} | common.provenance()
        report |= {"commit": common.git("rev-parse", "HEAD"), "seconds": {}, "mutants": records}
    _warm()
    for mutant, record in zip(drawn, report["mutants"], strict=True):
        repeated = (
            args.again
            and record.get("outcome") == "survived"
            and "equivalent" not in record
            and record["number"] in (args.only or [record["number"]])
        )
        if "outcome" not in record or repeated:
            keen = {str(earlier.get("by")) for earlier in report["mutants"] if earlier["file"] == mutant.file}
            tests = list(dict.fromkeys([*args.first, *tests_of(mutant.file)]))
            outcome = run(tests, report["seconds"], mutant, args.budget, keen, args.first)
            report["seconds"] |= outcome.pop("each")
            record |= outcome
            if repeated and record["outcome"] != "survived":
                record["survived_at_first"] = True  # killed by a test that was added later
            common.write(results, report)
            place = (record["number"], mutant.file, mutant.line, mutant.operator)
            print(*place, record["outcome"], record["seconds"], record["by"], flush=True)
    _control(report)
    common.write(results, report)
    print(collections.Counter(record["outcome"] for record in report["mutants"]))


def _control(report: dict[str, Any]) -> None:
    """Rerun, on unchanged code, each test that killed a mutant. If the test fails, discard its kills."""
    report.setdefault("controlled", [])
    killers = {
        record["by"] for record in report["mutants"] if record["outcome"] == "killed" and "::" in record["by"]
    }
    pending = sorted(killers - set(report["controlled"]))
    while pending:
        outcome = run(pending, {}, None, 3600)
        passed = [name for name in outcome["each"] if name != outcome["by"]]
        report["controlled"] += passed
        pending = [name for name in pending if name not in outcome["each"]]
        if outcome["by"]:
            print(f"{outcome['by']} fails without a mutant: fix it.", file=sys.stderr)
            for record in report["mutants"]:
                if record["by"] == outcome["by"]:
                    del record["outcome"]
        if not passed:
            break


def _warm() -> None:
    """Import the third-party modules that the tests use.

    This starts no JAX backend, because the backend's threads would not survive a fork.
    """
    import tests.conftest  # noqa: F401  # it sets the variables that jax reads on import

    modules = "flax.struct jax.experimental.pallas scipy.stats hypothesis optax pytest transformers"
    for name in modules.split():
        importlib.import_module(name)
    # scripts.common imported mars_jax.lab.provenance. Unload the package, so that each fork imports it again.
    for name in [name for name in sys.modules if name.split(".")[0] in ("mars_jax", "kernels_pallas")]:
        del sys.modules[name]


def _explain(report: dict[str, Any], number: int, reason: str) -> None:
    [record] = [record for record in report["mutants"] if record["number"] == number]
    if record.get("outcome") != "survived":
        raise SystemExit(f"mutant {number} did not survive.")
    record["equivalent"] = reason


if __name__ == "__main__":
    main()
