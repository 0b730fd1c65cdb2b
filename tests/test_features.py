"""`docs/features.md`: every row names tests that exist, that are slow where it says so, and that `.ci/run` runs."""

from __future__ import annotations

import argparse
import ast
import functools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.selection import COLLECTED

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`([\w/]+\.py)?::([\w:]+)`( \(slow\))?")

PYTEST = argparse.ArgumentParser(add_help=False)
"""The arguments of pytest in `.ci/run`. Another one is an error, since it may leave tests out."""
PYTEST.add_argument("files", nargs="*")
for flag in ("--ignore", "--deselect"):
    PYTEST.add_argument(flag, action="append", default=[])
for flag in ("-m", "-k", "-n", "--part", "--durations"):
    PYTEST.add_argument(flag)
PYTEST.add_argument("--slow-share", action="store_true")


def faults(root: Path, collected: Mapping[str, bool]) -> Iterator[str]:
    """What is wrong with the rows of a checkout. `collected`: test functions, and whether each has a fast case."""
    runs, files = list(commands(root)), {test.partition("::")[0] for test in collected}
    for row in (root / "docs" / "features.md").read_text(encoding="utf-8").splitlines():
        if not row.startswith("| ") or row.startswith("| feature "):
            continue
        file = ""
        for cell in row.removesuffix(" |").rpartition(" | ")[2].split(", "):
            named = NAMED.fullmatch(cell)
            if not named:
                yield f"{row} names no test by {cell!r}"
                continue
            file = f"tests/{named[1]}" if named[1] else file
            test, slow = f"{file}::{named[2]}", bool(named[3])
            said = source(root / file, named[2])
            if said is None or (file in files and test not in collected):
                yield f"{test} does not exist"
                continue
            found = not collected[test] if test in collected else said.slow
            if found not in (slow, None):
                yield f"{test} is {'slow' if found else 'fast'}, and its row says otherwise"
            if said.skipped:
                yield f"{test} is skipped everywhere"
            if not any(run.takes(test, slow, said.needs) for run in runs):
                yield f"{test} runs in no part of .ci/run"


class Said(NamedTuple):
    """What the source of a test says of it."""

    slow: bool | None
    """None where cases may differ, which pytest alone knows."""
    skipped: bool
    needs: set[str]
    """Packages without which it skips."""


def source(path: Path, name: str) -> Said | None:
    """By the name of a test, such as test_it or TestClass::test_it; None where there is none."""
    module = parsed(path)
    *scope, function = name.split("::")
    classes = {node.name: node for node in module if isinstance(node, ast.ClassDef)}
    outer = [classes[one] for one in scope if one in classes]
    bases = [classes[base.id] for one in outer for base in one.bases if getattr(base, "id", "") in classes]
    bodies = [one.body for one in (*outer, *bases)] if scope else [module]
    nodes = [node for body in bodies for node in body if getattr(node, "name", "") == function]
    if not nodes:
        return None
    marks = [mark for node in (*outer, nodes[0]) for mark in node.decorator_list]
    calls = []
    for statement in (*module, *nodes[0].body):
        value = getattr(statement, "value", None)
        values = getattr(value, "elts", [value])
        calls += [value for value in values if isinstance(value, ast.Call)]
        if "pytestmark" in [getattr(to, "id", "") for to in getattr(statement, "targets", ())]:
            marks += values
    texts = [ast.unparse(mark) for mark in marks]
    mixed = any("slow" in text or not text.startswith("pytest.mark.") for text in texts)
    called = [(ast.unparse(call.func), call.args) for call in calls]
    return Said(
        slow="pytest.mark.slow" in texts or (None if mixed else False),
        skipped=any(re.match(r"pytest\.mark\.skip\b", text) for text in texts)
        or any(function == "pytest.skip" for function, _ in called),
        needs={ast.literal_eval(args[0]) for function, args in called if function == "pytest.importorskip"},
    )


@functools.cache
def parsed(path: Path) -> Sequence[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []


class Command(NamedTuple):
    """A call of pytest in a part of `.ci/run`."""

    asked: argparse.Namespace
    lacks: set[str]
    """Packages that the part may lack."""

    def takes(self, test: str, slow: bool, needs: set[str]) -> bool:
        """Whether it runs a test, some day: a part of the tests has its turn. What `-k` chooses is not counted."""
        asked = self.asked
        return (
            (not asked.files or within(test, asked.files))
            and not within(test, asked.ignore + asked.deselect)
            and asked.m in (None, "slow" if slow else "not slow")
            and asked.k is None
            and not needs & self.lacks
        )


def within(test: str, paths: Iterable[str]) -> bool:
    """Whether a test is one of some folders, files and tests."""
    return any(test == path or test.startswith((f"{path}/", f"{path}::")) for path in paths)


def commands(root: Path) -> Iterator[Command]:
    script = (root / ".ci" / "run").read_text(encoding="utf-8").replace("\\\n", "")
    readme = (root / "README.md").read_text(encoding="utf-8").partition("<!-- test command -->")[2]
    for part in re.findall(r"^\w+\(\) \{(.*?)^\}", script, re.MULTILINE | re.DOTALL):
        lacks = re.search(r"^ *may_lack(.*)", part, re.MULTILINE)
        if "README.md" in part:  # it runs the command that stands there
            part += readme.split("```")[1]
        for call in re.findall(r" -m pytest (.*)", part):
            yield Command(PYTEST.parse_args(shlex.split(call)), set(lacks[1].split() if lacks else ()))


@pytest.fixture
def collected(pytestconfig):
    """The tests of this run, where it was asked for whole files."""
    some = any("::" in argument for argument in pytestconfig.args) or pytestconfig.getoption("lf", False)
    return {} if some else pytestconfig.stash[COLLECTED]


def test_every_row_is_held_by_tests_that_run(collected):
    assert (ROOT / "docs" / "features.md").read_text(encoding="utf-8").count("\n| ") > 100
    found = list(faults(ROOT, collected))
    assert not found, "\n".join(found)


# The checks themselves.

SUITE = """
import pytest

def test_fast():
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.skip(reason="it fails")
def test_skipped():
    pass

def test_skips():
    pytest.skip("it fails")

class Cases:
    def test_a_case(self):
        pass

@pytest.mark.slow
class TestSlow(Cases):
    pass
"""
RUN = r"""
tests() {
  command=$(sed README.md)
  may_lack lm_eval
}

slow() {
  python -m pytest -m slow \
    --ignore tests/test_large.py
}

harness() {
  may_lack
  python -m pytest tests/test_harness.py
}
"""
README = (
    '<!-- test command -->\n```sh\npython -m pytest -n auto -m "not slow" --ignore tests/test_late.py\n```\n'
)
NEEDY = 'import pytest\npytest.importorskip("lm_eval")\ndef test_it(): pass\n'


@pytest.fixture
def faults_of(tmp_path):
    """The faults of one row, in a small checkout."""
    suites = {
        "test_it": SUITE,
        "test_large": SUITE,
        "test_late": SUITE,
        "test_harness": NEEDY,
        "test_needy": NEEDY,
    }
    files = {f"tests/{name}.py": text for name, text in suites.items()}
    for name, text in (files | {"README.md": README, ".ci/run": RUN}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "docs").mkdir()

    def call(tests, **collected):
        row = f"| feature | tests |\n|---|---|\n| It works: a, `b` | {tests} |\n"
        (tmp_path / "docs" / "features.md").write_text(row)
        return list(faults(tmp_path, {f"tests/test_it.py::{name}": fast for name, fast in collected.items()}))

    return call


@pytest.mark.parametrize(
    ("tests", "fault"),
    [
        ("`test_it.py::test_fast`, `::test_slow` (slow)", None),
        ("`test_it.py::TestSlow::test_a_case` (slow)", None),
        ("`test_harness.py::test_it`", None),
        ("`test_it.py::test_fast`, `::test_gone`", "tests/test_it.py::test_gone does not exist"),
        ("`test_gone.py::test_fast`", "tests/test_gone.py::test_fast does not exist"),
        ("`test_it.py::TestSlow::test_fast` (slow)", "::TestSlow::test_fast does not exist"),
        ("`test_it.py::test_fast` (slow)", "test_fast is fast, and its row says otherwise"),
        ("`test_it.py::test_slow`", "test_slow is slow, and its row says otherwise"),
        ("`test_it.py::TestSlow::test_a_case`", "test_a_case is slow, and its row says otherwise"),
        ("`test_it.py::test_skipped`", "test_skipped is skipped everywhere"),
        ("`test_it.py::test_skips`", "test_skips is skipped everywhere"),
        ("`test_it.py`", "names no test by '`test_it.py`'"),
        ("", "names no test by ''"),
        ("`test_late.py::test_fast`", "tests/test_late.py::test_fast runs in no part"),
        ("`test_large.py::test_slow` (slow)", "tests/test_large.py::test_slow runs in no part"),
        ("`test_needy.py::test_it`", "tests/test_needy.py::test_it runs in no part"),
    ],
)
def test_a_row_that_nothing_holds_is_named(faults_of, tests, fault):
    found = faults_of(tests)
    assert len(found) == (fault is not None) and (fault is None or fault in found[0])


def test_what_pytest_has_collected_decides(faults_of):
    row = "`test_it.py::test_fast`, `::test_slow` (slow)"
    assert faults_of(row, test_fast=True, test_slow=False) == []
    assert [fault.split()[1:] for fault in faults_of(row, test_fast=False)] == [
        ["is", "slow,", "and", "its", "row", "says", "otherwise"],
        ["does", "not", "exist"],
    ]
