"""What `pytest --changed` runs, and the bound of the folder where compiled programs are kept."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests import changed, compiled
from tests.changed import distances

ROOT = Path(__file__).parent.parent


def test_a_rooms_own_tests_come_first_and_then_those_that_import_it():
    steps = distances(["mars_jax/verify/topk.py"])
    assert steps["tests/verify/test_edges.py"] == steps["tests/verify/test_mars.py"] == 1
    assert steps["tests/core/test_decode.py"] > 1  # which imports the package that imports the module
    assert "tests/constraints/test_automaton.py" not in steps and "tests/test_docs.py" not in steps


def test_a_test_that_changed_comes_before_everything():
    steps = distances(["tests/core/test_tree.py", "mars_jax/core/tree.py"])
    assert [name for name, count in steps.items() if count == 0] == ["tests/core/test_tree.py"]
    assert min(steps.values()) == 0 and steps["tests/core/test_cache.py"] == 1


def test_helpers_lead_to_the_tests_that_import_them():
    assert distances(["tests/verify/oracles.py"])["tests/verify/test_rejection.py"] == 1


def test_documents_have_tests_too():
    steps = distances(["docs/rules.md"])
    assert {name for name, count in steps.items() if count == 1} == set(changed.OF_DOCUMENTS)


def test_kernels_have_their_room():
    steps = distances(["kernels_pallas/margin_rule.py"])
    assert steps["tests/kernels/test_accept.py"] == 1 and steps["tests/kernels/test_largest.py"] == 1


def test_every_room_of_the_package_has_tests_that_are_found():
    rooms = {p.name for p in (ROOT / "mars_jax").iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    found = {room for room in rooms if changed._tests_of_room(f"mars_jax/{room}/any.py")}
    assert rooms - found <= {"specs"} | {"pretrained", "assets"} - found


def test_slow_tests_and_those_that_are_far_are_left_out_and_the_near_ones_come_first(monkeypatch):
    class Item:
        def __init__(self, nodeid, slow=False):
            self.nodeid, self.get_closest_marker = nodeid, lambda name: slow or None

    deselected = []
    hook = types.SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config = types.SimpleNamespace(getoption=lambda name: "HEAD", hook=hook)
    monkeypatch.setattr(changed, "changed_since", lambda revision: ["mars_jax/verify/topk.py"])
    near, far = Item("tests/verify/test_edges.py::test"), Item("tests/core/test_decode.py::test")
    slow, other = (
        Item("tests/verify/test_edges.py::slow", True),
        Item("tests/constraints/test_schema.py::test"),
    )
    items = [slow, far, other, near]
    changed.pytest_collection_modifyitems(config, items)
    assert items == [near, far] and deselected == [slow, other]


def test_what_changed_is_what_git_says_and_what_it_does_not_know(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True)

    git("init", "-q")
    for name in ("kept.py", "edited.py", "both.md"):
        (tmp_path / name).write_text(name)
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "edited.py").write_text("other")
    (tmp_path / "new.py").touch()
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    assert changed.changed_since("HEAD") == ["edited.py", "new.py"]
    git("add", ".")
    git("commit", "-qm", "second")
    assert changed.changed_since("HEAD") == []
    assert changed.changed_since("HEAD^") == ["edited.py", "new.py"]


@pytest.mark.slow
def test_the_command_of_the_page_runs():
    command = [sys.executable, "-m", "pytest", "--changed", "--minutes", "0", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout[-2000:]


def test_what_was_used_longest_ago_is_dropped_first(tmp_path):
    for age, name in enumerate(("newest", "newer", "older", "oldest")):
        folder = tmp_path / ("one" if age % 2 else "other")
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x" * 100)
        os.utime(folder / name, (1_000_000 - age,) * 2)
    compiled.bound(tmp_path, 400)
    assert len(list(tmp_path.rglob("*est"))) + len(list(tmp_path.rglob("*er"))) >= 4
    compiled.bound(tmp_path, 250)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"newest", "newer"}
    compiled.bound(tmp_path / "absent", 0)


def test_other_flags_have_another_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compiled.folder()
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    assert compiled.folder() != first and Path(first).parent == tmp_path / "mars_jax" / "tests"
