"""What every test run obeys, as a pytest plugin: limits of time, whole files on one worker, and no missing package.

    pytest --part 2/4      the second quarter of the tests; the four make up all
    MARS_JAX_TESTS_MAY_LACK="torch" pytest    a skip for want of any other package fails

The plugin imports nothing but pytest, so that a test of it starts in a moment.
"""

from __future__ import annotations

import collections
import hashlib
import os
import re

import pytest

MAY_LACK = "MARS_JAX_TESTS_MAY_LACK"
WANTS_A_PACKAGE = re.compile("could not import|No module named|pip install")
"""In the reason of every skip for want of a package: pytest's words, and those of our own reasons."""
SECONDS = {"fast": 180, "slow": 900}
"""After which a test fails, on the clock: some ten times what the slowest takes on a quiet machine."""

TOGETHER = {f"tests/lab/evaluate/test_{name}.py": "the finished benchmark" for name in ("benchmark", "page")}
"""Files that run on one worker, since what they share takes long to make."""
LIBTPU, LIBTPU_FOLDERS = "libtpu", ("tests/tpu/", "tests/lab/planning/")
"""Folders whose tests compile by libtpu, which keeps some hundred megabytes: on one worker, after everything else."""
COLLECTED = pytest.StashKey[dict[str, bool]]()
"""The test functions of this run, and whether each has a case that is not slow."""


def pytest_addoption(parser):
    parser.addoption(
        "--part", type=_part, metavar="K/N", help="run the K-th of N parts, chosen by the ids of the tests"
    )


def _part(text):
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--part is {text!r}: expected K/N with K from 1 to N, as in 1/3.")
    return int(found[1]), int(found[2])


def part_of(test_id, parts):
    """Number from 1 to `parts` of the part that a test belongs to: the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256(test_id.encode()).digest()[:8]) % parts + 1


@pytest.hookimpl(tryfirst=True)  # before -m and -k deselect
def pytest_collection_modifyitems(config, items):
    fast = config.stash[COLLECTED] = {}
    for item in items:
        function = item.nodeid.partition("[")[0]
        fast[function] = fast.get(function, False) or not item.get_closest_marker("slow")
    tests = collections.Counter(scope_of(item.nodeid) for item in items)
    if (
        config.getoption("-m") == "not slow"
    ):  # what has many tests comes first, so that no worker waits long for another
        items.sort(key=lambda item: (scope_of(item.nodeid) == LIBTPU, -tests[scope_of(item.nodeid)]))
    for item in items:
        if config.pluginmanager.hasplugin("timeout") and not item.get_closest_marker("timeout"):
            item.add_marker(
                pytest.mark.timeout(SECONDS["slow" if item.get_closest_marker("slow") else "fast"])
            )
    if config.getoption("--part") is None:
        return
    part, parts = config.getoption("--part")
    runs = [part_of(item.nodeid, parts) == part for item in items]
    config.hook.pytest_deselected(items=[item for item, stays in zip(items, runs, strict=True) if not stays])
    items[:] = [item for item, stays in zip(items, runs, strict=True) if stays]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """Fast tests of a file run on one worker, where they find what others of the file have traced and made."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope_of(nodeid)

    if config.getoption("-m") != "not slow":
        return None
    config.option.loadscopereorder = False  # the order is that of `pytest_collection_modifyitems`
    return Together(config, log)


def scope_of(test_id):
    """What runs on one worker together: a file, or some."""
    file = test_id.partition("::")[0]
    return LIBTPU if file.startswith(LIBTPU_FOLDERS) else TOGETHER.get(file, file)


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
