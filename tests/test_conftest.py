"""The guards of `tests/conftest.py`: skips because of missing packages, and time limits."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MAY_LACK, MISSING_PACKAGE

ROOT = Path(__file__).parent.parent
SUITE = """
import pytest

def test_package():
    pytest.importorskip("no_such_package")

def test_data():
    pytest.skip("SOME_FOLDER is not set")

@pytest.mark.xfail
def test_known_fault():
    assert False
"""


def run(folder, *options, **environment):
    """Return the exit status and the output of pytest in a folder, with our conftest as a plugin."""
    inherited = {name: value for name, value in os.environ.items() if name != MAY_LACK}
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-rA"]
    process = subprocess.run(
        [*command, "-o", "markers=slow", *options],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    return process.returncode, process.stdout + process.stderr


@pytest.mark.parametrize(
    ("environment", "status", "counts"),
    [
        pytest.param({}, 0, "2 skipped, 1 xfailed", marks=pytest.mark.slow),
        pytest.param({MAY_LACK: "no_such_package"}, 0, "2 skipped, 1 xfailed", marks=pytest.mark.slow),
        ({MAY_LACK: "torch"}, 1, "1 failed, 1 skipped, 1 xfailed"),
    ],
)
def test_a_skip_because_of_an_unlisted_package_fails(tmp_path, environment, status, counts):
    (tmp_path / "test_it.py").write_text(SUITE)
    returned, output = run(tmp_path, **environment)
    assert returned == status and counts in output


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_module_that_skips_because_of_an_unlisted_package_fails(tmp_path, workers):
    module = "import pytest\npytest.importorskip('no_such_package')\ndef test(): pass\n"
    (tmp_path / "test_it.py").write_text(module)
    (tmp_path / "test_other.py").write_text("def test(): pass\n")
    status, output = run(tmp_path, "-n", workers, **{MAY_LACK: ""})
    assert status != 0 and "could not import 'no_such_package'" in output
    assert run(tmp_path, "-n", workers, **{MAY_LACK: "no_such_package"})[0] == 0


def test_every_reason_for_a_missing_package_is_recognized():
    """`importorskip` with a `reason` reports only that reason."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
                for keyword in node.keywords:
                    assert keyword.arg != "reason" or MISSING_PACKAGE.search(ast.unparse(keyword.value)), path


def test_every_test_has_a_time_limit(request):
    assert request.node.get_closest_marker("timeout").args == (180,)


@pytest.mark.slow
def test_every_slow_test_has_a_longer_time_limit(request):
    assert request.node.get_closest_marker("timeout").args == (900,)
