"""The install cell of the notebooks: it installs a wheel or an address, never a package by its name only."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

COLAB = Path(__file__).parents[1] / "colab"
CELLS = {
    path.stem: re.findall(r"^import glob\n.*?check=True\)\n", path.read_text(), re.MULTILINE | re.DOTALL)[0]
    for path in sorted(COLAB.glob("*.py"))
}


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Return a function that runs the first cell with a SOURCE and some files, and returns the arguments of pip."""

    def run(source, *files):
        [cell] = set(CELLS.values())
        commands = []
        monkeypatch.chdir(tmp_path)
        for name in files:
            (tmp_path / name).touch()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command[3:]))
        exec(re.sub(r'^SOURCE = ""', f"SOURCE = {source!r}", cell, flags=re.MULTILINE), {})
        return commands

    return run


@pytest.mark.parametrize(
    ("source", "files", "address"),
    [
        ("", ["mars_jax-1.0-py3-none-any.whl"], "mars_jax-1.0-py3-none-any.whl["),
        ("mine.whl", ["mine.whl"], "mine.whl["),
        ("git+https://host/mars-jax", [], r"mars-jax\[train,evaluate[^]]*\] @ git\+https://host/mars-jax$"),
    ],
)
def test_it_installs_the_wheel_or_the_address(installed, source, files, address):
    [(*command, target)] = installed(source, *files)
    assert command == ["install", "-q"]
    assert target.startswith(address) or re.match(address, target)


@pytest.mark.parametrize("source", ["", "mars-jax", "mars-jax[evaluate]", "missing.whl", "folder"])
def test_without_either_it_prints_one_sentence_and_installs_nothing(installed, source, capsys):
    assert installed(source) == []
    sentence = "Upload a wheel of mars-jax, or set SOURCE to the path of a wheel or a Git address.\n"
    assert capsys.readouterr() == (sentence, "")


def test_no_message_installs_this_package_by_its_name():
    """Another project may own the name in a registry."""
    root = COLAB.parent
    for path in [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("mars_jax/**/*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install (?:-\S+ )*['\"]?mars[-_]jax(?!-)", text), path
