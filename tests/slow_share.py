"""`pytest -m slow --slow-share`: the share of the slow tests whose turn it is, as a pytest plugin.

The slow tests form a ring, ordered by a hash of their ids. `slow_runs.json` names the place where the next run begins.
A run takes a sixteenth of the ring from there, and at least `LEAST` tests, so that sixteen runs visit every test.
What the run found is its last line, `SLOW-SHARE {...}`, and `python -m tests.slow_share LOG` records that line: a share
that passed moves the ledger on to the next one, and any other share is run again.

`.ci/run` refuses a commit that does not record a run, so no share is taken twice by oversight.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

LEDGER = Path(__file__).with_name("slow_runs.json")
RUNS = 16
"""Runs in which every test has its turn. With twelve, one share in four took longer than it may."""
LEAST = 150
"""Tests of a share."""
SECONDS = 1_400
"""Processor seconds of a share, on a machine of the usual speed."""
SLOWEST = 1.7
"""How many times slower a machine may be before a share over `SECONDS` fails."""
KEPT = 3 * RUNS
"""Runs that the ledger remembers."""

_SHARE = pytest.StashKey[dict[str, Any]]()
_WORKERS = pytest.StashKey[list[float]]()


def place(test_id: str) -> str:
    """Where in the ring a test is: eight hexadecimal digits, the same in every process and on every machine."""
    return hashlib.sha256(test_id.encode()).hexdigest()[:8]


def share(ids: Sequence[str], begin: str) -> tuple[list[str], str]:
    """The tests of the run that begins at a place of the ring, and the place where the run after it begins."""
    ring = sorted(ids, key=lambda one: (place(one), one))
    first = next((i for i, one in enumerate(ring) if place(one) >= begin), 0)
    ring = ring[first:] + ring[:first]
    count = max(LEAST, -(-len(ring) // RUNS))
    return ring[:count], place(ring[count % len(ring)]) if ring else begin


def processor_seconds() -> float:
    """Of this process and of the children that it has waited for."""
    uses = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def pytest_addoption(parser):
    parser.addoption(
        "--slow-share",
        action="store_true",
        help="of the tests marked slow, run those whose turn it is by tests/slow_runs.json",
    )


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow-share"):
        return
    slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
    begin = json.loads(LEDGER.read_text())["next"]
    chosen, after = share(slow, begin)
    config.stash[_SHARE] = {"first": begin, "next": after, "tests": len(chosen), "of": len(slow)}
    runs = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in runs])
    items[:] = [item for item in items if item.nodeid in runs]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["share"] = session.config.stash.get(_SHARE, None)
        session.config.workeroutput["processor_seconds"] = processor_seconds()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node, error):
    found = getattr(node, "workeroutput", {})
    node.config.stash.setdefault(_WORKERS, []).append(found.get("processor_seconds", 0.0))
    if found.get("share"):
        node.config.stash[_SHARE] = found["share"]


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--slow-share") or hasattr(config, "workeroutput"):
        return
    told = dict(config.stash.get(_SHARE, {}))
    told |= {
        name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")
    }
    told["seconds"] = round(sum(config.stash.get(_WORKERS, [])) or processor_seconds())
    told["commit"] = _git("rev-parse", "--short=10", "HEAD")
    wrong = complaint(told)
    if wrong:
        terminalreporter.write_line(f"slow share: {wrong}", red=True)
        terminalreporter._session.exitstatus = pytest.ExitCode.TESTS_FAILED
    terminalreporter.write_line(f"SLOW-SHARE {json.dumps(told | {'complete': not wrong})}")


def complaint(told: dict[str, Any]) -> str | None:
    """Why a share does not count; None where it does."""
    ran = told["passed"] + told["failed"]
    if told["failed"] or told["error"]:
        return f"{told['failed'] + told['error']} failed"
    if ran < min(LEAST, told.get("of", LEAST)):
        return f"{ran} slow tests ran, expected at least {LEAST}"
    if told["seconds"] > SLOWEST * SECONDS:
        return f"it took {told['seconds']} processor seconds: mend or split what --durations names"
    return None


# The ledger.


def recorded(ledger: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """The ledger with one more run; a share that is complete moves it on."""
    runs = [*ledger["runs"], {"run": ledger["run"]} | told][-KEPT:]
    done = told.get("complete", False)
    return {"run": ledger["run"] + done, "next": told["next"] if done else ledger["next"], "runs": runs}


def is_recorded_by(commit: str) -> bool:
    """Whether a commit changes the ledger, against its first parent. The tip of a shallow clone seems to."""
    return bool(_git("show", "-m", "--first-parent", "--format=", "--name-only", commit, "--", LEDGER.name))


def has_changed(ledger: dict[str, Any], folders: Sequence[str]) -> bool:
    """Whether folders differ from the last run that is complete; where its commit is unknown, they do."""
    commits = [told["commit"] for told in ledger["runs"] if told.get("complete")]
    since = [_git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}") for commit in commits[-1:]]
    return (
        not since
        or not since[0]
        or bool(_git("diff", "--name-only", since[0], "HEAD", "--", *(f":/{f}" for f in folders)))
    )


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=LEDGER.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Record a run of the slow tests in tests/slow_runs.json.")
    parser.add_argument("log", nargs="?", help="what .ci/run or pytest printed, or - for standard input")
    parser.add_argument("--lost", metavar="WHY", help="there is no log of a share: its turn comes again")
    parser.add_argument("--check", action="store_true", help="fail unless the last commit records a run")
    parser.add_argument(
        "--changed", nargs="+", metavar="FOLDER", help="fail unless these differ from the last run"
    )
    asked = parser.parse_args(argv)
    ledger = json.loads(LEDGER.read_text())
    if asked.check:
        if not is_recorded_by("HEAD"):
            raise SystemExit(
                "tests/slow_runs.json is overdue: record the last run of .ci/run in the commit that is checked, "
                "with python -m tests.slow_share LOG."
            )
    elif asked.changed:
        raise SystemExit(not has_changed(ledger, asked.changed))
    elif asked.lost:
        _write(recorded(ledger, {"lost": asked.lost}))
    elif asked.log:
        text = sys.stdin.read() if asked.log == "-" else Path(asked.log).read_text()
        found = re.findall(r"^.*?SLOW-SHARE (\{.*\})\s*$", text, re.MULTILINE)
        if not found:
            raise SystemExit(
                f"{asked.log} has no line SLOW-SHARE: give the log of a run that has, or --lost WHY."
            )
        told = json.loads(found[-1])
        if told["first"] != ledger["next"]:
            raise SystemExit(
                f"the share at {told['first']} is recorded already: the next one is at {ledger['next']}."
            )
        _write(recorded(ledger, told))
    else:
        parser.error("expected a log, --lost, --check or --changed")


def _write(ledger: dict[str, Any]) -> None:
    runs = ",\n  ".join(json.dumps(run) for run in ledger["runs"])
    head = json.dumps({"run": ledger["run"], "next": ledger["next"]})[1:-1]
    part = LEDGER.with_suffix(f".{os.getpid()}")
    part.write_text(f'{{{head}, "runs": [\n  {runs}\n]}}\n')
    part.replace(LEDGER)


if __name__ == "__main__":
    main()
