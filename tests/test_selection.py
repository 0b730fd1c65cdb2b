"""The plugin of `tests/selection.py`, on a small suite in a process of its own."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import selection
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


def test_parts_are_disjoint_and_make_up_all(suite):
    parts = [passed(run(suite, "--part", f"{k}/3")[1]) for k in (1, 2, 3)]
    assert all(parts) and sum(map(len, parts)) == 31
    assert set.union(*parts) == {"test_it.py::test_fast", *(f"test_it.py::test_slow[{i}]" for i in range(30))}


def test_the_part_of_a_test_is_the_same_in_every_process():
    # Python's own hash of a text differs from process to process.
    assert [part_of(f"tests/test_it.py::test_it[{i}]", 3) for i in range(6)] == [3, 2, 3, 3, 1, 1]


def test_a_part_that_is_none_is_named(suite):
    status, output = run(suite, "--part", "4/3")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "--part is '4/3': expected K/N" in output
    for text in ("0/3", "1", "a/b"):
        with pytest.raises(pytest.UsageError, match="expected K/N"):
            selection._part(text)


def test_a_test_without_end_fails_by_its_name(tmp_path):
    (tmp_path / "test_it.py").write_text("import time\ndef test_it():\n    time.sleep(60)\n")
    code = "import sys, pytest; from tests import selection; selection.SECONDS['fast'] = 1; sys.exit(pytest.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "-p", "tests.selection"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "-p tests.selection -p no:cacheprovider -rA"},
    )  # fmt: skip
    assert done.returncode == 1 and "FAILED test_it.py::test_it - Failed: Timeout" in done.stdout


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
