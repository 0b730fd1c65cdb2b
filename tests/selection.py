"""Options of the test run, as a pytest plugin: a part of the slow tests, a bound on their time, and no missing package.

    pytest -m slow --slow-part 2/3      the second third of the slow tests; the three make up all
    pytest -m slow --slow-minutes 10    those that begin within ten minutes; the rest is skipped and counted
    MARS_JAX_TESTS_MAY_LACK="torch" pytest    a skip for want of any other package fails

The plugin imports nothing but pytest, so that a test of it starts in a moment.
"""

from __future__ import annotations

import hashlib
import os
import re
import time

import pytest

MAY_LACK = "MARS_JAX_TESTS_MAY_LACK"
WANTS_A_PACKAGE = re.compile("could not import|No module named|pip install")
"""In the reason of every skip for want of a package: pytest's words, and those of our own reasons."""
TIME_IS_UP = "--slow-minutes: time is up"
_BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption(
        "--slow-part",
        type=_part,
        metavar="K/N",
        help="of the tests marked slow, run the K-th of N parts, chosen by the ids of the tests",
    )
    parser.addoption(
        "--slow-minutes",
        type=float,
        metavar="M",
        help="skip tests marked slow that would begin later than this",
    )


def _part(text):
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--slow-part is {text!r}: expected K/N with K from 1 to N, as in 1/3.")
    return int(found[1]), int(found[2])


def part_of(test_id, parts):
    """Number from 1 to `parts` of the part that a test belongs to: the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256(test_id.encode()).digest()[:8]) % parts + 1


def pytest_configure(config):
    config.stash[_BEGAN] = time.monotonic()


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("--slow-part")
    if chosen is None:
        return
    part, parts = chosen

    def runs(item):
        return item.get_closest_marker("slow") is None or part_of(item.nodeid, parts) == part

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]


def pytest_runtest_setup(item):
    minutes = item.config.getoption("--slow-minutes")
    if minutes is None or item.get_closest_marker("slow") is None:
        return
    if time.monotonic() - item.config.stash[_BEGAN] > 60 * minutes:
        pytest.skip(TIME_IS_UP)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _refuse_skip((yield))


def _refuse_skip(report):
    """The report; failed where it skipped for want of a package that `MAY_LACK` does not name.

    A missing package turns tests into skips, and a run of nothing but skips looks green.
    """
    if MAY_LACK not in os.environ or not report.skipped or hasattr(report, "wasxfail"):
        return report
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    may_lack = os.environ[MAY_LACK].split()
    if WANTS_A_PACKAGE.search(reason) and not any(package in reason for package in may_lack):
        report.outcome = "failed"
        report.longrepr = f"skipped, and {MAY_LACK} is {os.environ[MAY_LACK]!r}: {reason}"
    return report
