"""`pytest --changed [REV]`: the fast tests nearest to what has changed, for two minutes, as a pytest plugin.

    pytest -n auto --changed                  since the last commit
    pytest -n auto --changed main --minutes 5

A test file comes the earlier, the fewer imports lie between it and a changed file: first the tests that changed
themselves and those of the rooms that were touched, then those of the rooms that import them. Files from which no
import leads to a change do not run. Documents have no imports: a change of one runs the tests of documents.
"""

from __future__ import annotations

import ast
import collections
import functools
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("mars_jax", "kernels_pallas", "tests")
OF_DOCUMENTS = tuple(f"tests/test_{name}.py" for name in ("docs", "features", "pages", "site"))
TIME_IS_UP = "--changed: the minutes are up; the whole suite has the rest"
_END = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption(
        "--changed",
        nargs="?",
        const="HEAD",
        metavar="REV",
        help="run the fast tests nearest to what changed since REV",
    )
    parser.addoption(
        "--minutes", type=float, default=2.0, help="with --changed: how long tests may begin (default: 2)"
    )


def pytest_configure(config):
    config.stash[_END] = time.monotonic() + 60 * config.getoption("--minutes")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    since = config.getoption("--changed")
    if since is None:
        return
    steps = distances(changed_since(since))

    def steps_to(item):
        return steps.get(item.nodeid.partition("::")[0])

    left = [item for item in items if steps_to(item) is None or item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=left)
    left = set(left)
    items[:] = sorted((item for item in items if item not in left), key=steps_to)


def pytest_runtest_setup(item):
    if item.config.getoption("--changed") is not None and time.monotonic() > item.config.stash[_END]:
        pytest.skip(TIME_IS_UP)


def changed_since(revision: str) -> list[str]:
    """Files that differ from a revision, those that git does not know yet included."""
    commands = (["diff", "--name-only", revision], ["ls-files", "--others", "--exclude-standard"])
    told = [
        subprocess.run(["git", *c], cwd=ROOT, capture_output=True, text=True, check=True) for c in commands
    ]
    return sorted({name for one in told for name in one.stdout.split()})


def distances(changed: Iterable[str]) -> dict[str, int]:
    """The imports between each test file and the nearest changed file; a room's own tests are one import away."""
    steps = dict.fromkeys(changed, 0)
    if any(name.endswith((".md", ".jinja", ".json", ".svg")) for name in changed):
        steps |= dict.fromkeys(OF_DOCUMENTS, 1)
    queue = collections.deque(steps)
    known = importers()
    while queue:
        name = queue.popleft()
        near = set(known[name])
        if steps[name] == 0 and name.split("/")[0] in ("mars_jax", "kernels_pallas"):
            near |= set(_tests_of_room(name))
        for other in sorted(near - steps.keys()):
            steps[other] = steps[name] + 1
            queue.append(other)
    return {name: count for name, count in steps.items() if Path(name).name.startswith("test_")}


def _tests_of_room(name: str) -> list[str]:
    package, *rest = name.split("/")
    room = "kernels" if package == "kernels_pallas" else Path(rest[0]).stem
    found = [*(ROOT / "tests" / room).rglob("test_*.py"), ROOT / "tests" / f"test_{room}.py"]
    return [str(path.relative_to(ROOT)) for path in found if path.exists()]


@functools.cache
def importers() -> dict[str, list[str]]:
    """By file, the files that import it."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name == "mars_jax/__init__.py":
                continue  # its names are looked up lazily, so that importing it imports nothing
            for module in _imports(path):
                found[module].append(name)
    return found


def _imports(path: Path) -> set[str]:
    """The files of the checkout that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {file for name in names for file in _files(name)}


def _files(module: str) -> list[str]:
    if module.split(".")[0] not in PACKAGES:
        return []
    base = ROOT / Path(*module.split("."))
    return [str(f.relative_to(ROOT)) for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()]
