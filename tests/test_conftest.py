"""The guards of `tests/conftest.py`: skips because of missing packages, and time limits."""

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


MODULE = "import pytest\npytest.importorskip('no_such_package')\ndef test(): pass\n"
LACKS_NOTHING, LACKS_TORCH, LACKS_IT = ({MAY_LACK: package} for package in ("", "torch", "no_such_package"))


@pytest.mark.parametrize(
    ("suite", "options", "environment", "status", "reported"),
    [
        pytest.param(SUITE, [], {}, 0, "2 skipped, 1 xfailed", marks=pytest.mark.slow),
        pytest.param(SUITE, [], LACKS_IT, 0, "2 skipped, 1 xfailed", marks=pytest.mark.slow),
        (SUITE, [], LACKS_TORCH, 1, "1 failed, 1 skipped, 1 xfailed"),
        pytest.param(MODULE, [], LACKS_NOTHING, 2, "could not import", marks=pytest.mark.slow),
        pytest.param(MODULE, ["-n", "2"], LACKS_NOTHING, 1, "could not import", marks=pytest.mark.slow),
    ],
)
def test_a_skip_because_of_an_unlisted_package_fails(tmp_path, suite, options, environment, status, reported):
    """Run pytest in a folder, with our conftest as a plugin."""
    (tmp_path / "test_it.py").write_text(suite)
    inherited = {name: value for name, value in os.environ.items() if name != MAY_LACK}
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-rA"]
    process = subprocess.run(
        [*command, "-o", "markers=slow", *options],
        cwd=tmp_path,
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    assert process.returncode == status and reported in process.stdout + process.stderr


def test_every_reason_for_a_missing_package_is_recognized():
    """`importorskip` with a `reason` reports only that reason."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
                for keyword in node.keywords:
                    assert keyword.arg != "reason" or MISSING_PACKAGE.search(ast.unparse(keyword.value)), path


@pytest.mark.parametrize("seconds", [180, pytest.param(900, marks=pytest.mark.slow)])
def test_every_test_has_a_time_limit(request, seconds):
    assert request.node.get_closest_marker("timeout").args == (seconds,)
