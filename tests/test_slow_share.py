"""The ring of the slow tests: every run takes the next share of it, and sixteen runs take all."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import slow_share
from tests.slow_share import LEAST, RUNS, complaint, place, recorded, share

ROOT = Path(__file__).parent.parent
TOLD = {
    "first": "00000000",
    "next": "80000000",
    "tests": 150,
    "of": 1800,
    "passed": 150,
    "failed": 0,
    "error": 0,
}
TOLD |= {"skipped": 0, "seconds": 900, "commit": "0123456789"}


@pytest.mark.parametrize("count", [1, LEAST, 1799, 1800, 1801, 4000])
def test_sixteen_runs_visit_every_test_and_each_takes_enough(count):
    ids = [f"tests/test_it.py::test_it[{i}]" for i in range(count)]
    begin, seen = "7fffffff", set()
    for _ in range(RUNS):
        chosen, begin = share(ids, begin)
        assert len(set(chosen)) == len(chosen) == min(count, max(LEAST, -(-count // RUNS)))
        seen |= set(chosen)
    assert seen == set(ids)


def test_shares_follow_one_another():
    ids = [f"tests/test_it.py::test_it[{i}]" for i in range(2000)]
    first, begin = share(ids, "00000000")
    second, _ = share(ids, begin)
    assert not set(first) & set(second)
    assert max(map(place, first)) < begin == min(map(place, second))
    # A test that is new and behind has its turn in the next lap, one that is ahead in this one.
    more, _ = share([*ids, *(f"tests/test_new.py::test[{i}]" for i in range(100))], begin)
    assert min(map(place, more)) >= begin and any("test_new" in one for one in more)


def test_places_are_the_same_in_every_process():
    assert place("tests/test_it.py::test_it[0]") == "fc8f80e3"


def test_only_a_complete_share_moves_the_ledger_on():
    ledger = {"run": 4, "next": "00000000", "runs": []}
    after = recorded(ledger, TOLD | {"complete": True})
    assert (after["run"], after["next"], after["runs"][0]["run"]) == (5, "80000000", 4)
    for told in (TOLD | {"complete": False}, {"lost": "the machine went away"}):
        after = recorded(ledger, told)
        assert (after["run"], after["next"], len(after["runs"])) == (4, "00000000", 1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None),
        ({"failed": 1}, "1 failed"),
        ({"error": 2}, "2 failed"),
        ({"passed": 149}, "149 slow tests ran, expected at least 150"),
        ({"passed": 9, "of": 9}, None),
        ({"seconds": 99_999}, "99999 processor seconds"),
    ],
)
def test_what_does_not_count_is_said(change, sentence):
    found = complaint(TOLD | change)
    assert found is None if sentence is None else sentence in found


def run(folder, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def checkout(tmp_path):
    """A repository with the plugin, a ledger and slow tests of which one fails where FAILS is set."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "slow_share.py").write_text((ROOT / "tests" / "slow_share.py").read_text())
    (tests / "slow_runs.json").write_text('{"run": 0, "next": "00000000", "runs": []}')
    (tests / "test_it.py").write_text(
        "import os, pytest\n@pytest.mark.slow\n@pytest.mark.parametrize('i', range(400))\n"
        "def test_it(i): assert 'FAILS' not in os.environ or i % 100\n"
    )
    commit(tmp_path, "init", "-q")
    return tmp_path


def commit(folder, *arguments):
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in ([arguments] if arguments else []) + [
        ("add", "."),
        ("commit", "-qm", "x", "--allow-empty"),
    ]:
        subprocess.run([*git, *command], cwd=folder, check=True)


SHARE = (
    "-m",
    "pytest",
    "-p",
    "tests.slow_share",
    "-p",
    "no:cacheprovider",
    "-o",
    "markers=slow",
    "--slow-share",
)


@pytest.mark.parametrize("workers", [(), pytest.param(("-p", "xdist", "-n", "2"), marks=pytest.mark.slow)])
def test_a_run_is_recorded_and_the_next_one_takes_the_next_share(checkout, workers):
    status, output = run(checkout, *SHARE, *workers)
    assert status == 0 and "150 passed" in output and '"complete": true' in output
    (checkout / "log").write_text(output)
    assert run(checkout, "-m", "tests.slow_share", "log") == (0, "")
    ledger = json.loads((checkout / "tests" / "slow_runs.json").read_text())
    assert ledger["run"] == 1 and ledger["next"] > "00000000" and ledger["runs"][0]["passed"] == 150
    status, output = run(checkout, "-m", "tests.slow_share", "log")
    assert status == 1 and "is recorded already" in output
    assert f'"first": "{ledger["next"]}"' in run(checkout, *SHARE)[1]


def test_a_share_that_fails_comes_again(checkout):
    status, output = run(checkout, *SHARE, FAILS="1")
    assert status == 1 and "slow share:" in output and '"complete": false' in output
    (checkout / "log").write_text(output)
    run(checkout, "-m", "tests.slow_share", "log")
    run(checkout, "-m", "tests.slow_share", "--lost", "no log")
    ledger = json.loads((checkout / "tests" / "slow_runs.json").read_text())
    assert (ledger["run"], ledger["next"], len(ledger["runs"])) == (0, "00000000", 2)


def test_too_few_tests_are_a_failure(checkout):
    status, output = run(checkout, *SHARE, "--deselect", "tests/test_it.py::test_it[3]", "--maxfail", "1")
    assert status == 0
    (checkout / "tests" / "test_it.py").write_text(
        "import pytest\n@pytest.mark.slow\n@pytest.mark.parametrize('i', range(400))\n"
        "def test_it(i): pytest.skip('no')\n"
    )
    status, output = run(checkout, *SHARE)
    assert status == 1 and "0 slow tests ran, expected at least 150" in output


def test_a_commit_that_records_no_run_is_refused(checkout):
    assert run(checkout, "-m", "tests.slow_share", "--check") == (0, "")
    commit(checkout)
    status, output = run(checkout, "-m", "tests.slow_share", "--check")
    assert status == 1 and "tests/slow_runs.json is overdue" in output
    run(checkout, "-m", "tests.slow_share", "--lost", "the first one")
    commit(checkout)
    assert run(checkout, "-m", "tests.slow_share", "--check") == (0, "")


def test_what_has_changed_since_the_last_run_is_told_from_what_has_not(checkout):
    changed = ("-m", "tests.slow_share", "--changed", "core", "models")
    assert run(checkout, *changed)[0] == 0  # there was no run
    (checkout / "log").write_text(run(checkout, *SHARE)[1])
    run(checkout, "-m", "tests.slow_share", "log")
    assert run(checkout, *changed)[0] == 1
    (checkout / "models").mkdir()
    (checkout / "models" / "it.py").touch()
    commit(checkout)
    assert run(checkout, *changed)[0] == 0


def test_a_log_without_a_share_is_named(checkout):
    (checkout / "log").write_text("3 passed\n")
    status, output = run(checkout, "-m", "tests.slow_share", "log")
    assert status == 1 and "log has no line SLOW-SHARE" in output


def test_the_ledger_names_the_next_share():
    ledger = json.loads(slow_share.LEDGER.read_text())
    assert len(ledger["next"]) == 8 and ledger["run"] >= 0
    complete = [told for told in ledger["runs"] if told.get("complete")]
    assert not complete or (complete[-1]["next"], complete[-1]["run"] + 1) == (ledger["next"], ledger["run"])
    assert all(a["next"] == b["first"] for a, b in itertools.pairwise(complete))
