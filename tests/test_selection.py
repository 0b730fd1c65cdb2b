"""The plugin of `tests/selection.py`, on a small suite in a process of its own."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import MAY_LACK, WANTS_A_PACKAGE, part_of

ROOT = Path(__file__).parent.parent

SUITE = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("i", range(30))
def test_slow(i):
    pass

def test_fast():
    pass
"""
SKIPS = """
import pytest

def test_of_a_package():
    pytest.importorskip("no_such_package")

def test_of_data():
    pytest.skip("SOME_FOLDER is not set")

@pytest.mark.xfail
def test_of_a_known_fault():
    assert False
"""


def run(folder, *options, **environment):
    """(exit status, output) of pytest with the plugin in a folder; `MAY_LACK` is unset unless it is given."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.selection", "-p", "no:cacheprovider", "-rA"]
    environment = {
        **{name: value for name, value in os.environ.items() if name != MAY_LACK},
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **environment,
    }
    done = subprocess.run(
        [*command, "-o", "markers=slow", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def passed(output):
    return set(re.findall(r"^PASSED (\S+)", output, re.MULTILINE))


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "test_it.py").write_text(SUITE)
    return tmp_path


def test_the_parts_of_the_slow_tests_are_disjoint_and_make_up_all(suite):
    parts = [passed(run(suite, "-m", "slow", "--slow-part", f"{k}/3")[1]) for k in (1, 2, 3)]
    assert all(parts) and sum(map(len, parts)) == 30
    assert set.union(*parts) == {f"test_it.py::test_slow[{i}]" for i in range(30)}
    assert parts[1] == passed(run(suite, "-m", "slow", "--slow-part", "2/3")[1])


def test_fast_tests_are_in_every_part(suite):
    assert "test_it.py::test_fast" in passed(run(suite, "--slow-part", "1/3")[1])


def test_the_part_of_a_test_is_the_same_in_every_process():
    # Python's own hash of a text differs from process to process.
    assert [part_of(f"tests/test_it.py::test_it[{i}]", 3) for i in range(6)] == [3, 2, 3, 3, 1, 1]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b"])
def test_a_part_that_is_none_is_named(suite, text):
    status, output = run(suite, "--slow-part", text)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert f"--slow-part is '{text}': expected K/N" in output


def test_when_time_is_up_slow_tests_are_skipped_and_fast_ones_run(suite):
    status, output = run(suite, "--slow-minutes", "0", **{MAY_LACK: ""})
    assert status == 0 and passed(output) == {"test_it.py::test_fast"}
    assert "30 skipped" in output and "--slow-minutes: time is up" in output
    assert "31 passed" in run(suite, "--slow-minutes", "9")[1]


def test_a_skip_for_want_of_a_package_fails_unless_it_is_named(tmp_path):
    (tmp_path / "test_it.py").write_text(SKIPS)
    status, output = run(tmp_path)
    assert status == 0 and "2 skipped, 1 xfailed" in output
    status, output = run(tmp_path, **{MAY_LACK: "torch"})
    assert status == 1 and "1 failed, 1 skipped, 1 xfailed" in output
    assert f"{MAY_LACK} is 'torch'" in output and "could not import 'no_such_package'" in output
    assert run(tmp_path, **{MAY_LACK: "torch no_such_package"})[0] == 0


def test_every_reason_of_a_missing_package_is_known_as_one():
    """`importorskip` with a reason of its own says nothing but that reason."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
                for given in node.keywords:
                    assert given.arg != "reason" or WANTS_A_PACKAGE.search(ast.unparse(given.value)), path


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "xdist"])
def test_a_module_that_skips_as_a_whole_fails_as_well(tmp_path, workers):
    (tmp_path / "test_it.py").write_text(
        "import pytest\npytest.importorskip('no_such_package')\ndef test(): pass\n"
    )
    (tmp_path / "test_other.py").write_text("def test(): pass\n")
    status, output = run(tmp_path, *workers, **{MAY_LACK: ""})
    assert status != 0 and "could not import 'no_such_package'" in output
    assert run(tmp_path, *workers, **{MAY_LACK: "no_such_package"})[0] == 0
