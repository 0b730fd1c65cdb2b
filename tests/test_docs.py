"""Documents: their figures match the JSON, and the tests, files, pictures and flags that they name exist."""

import doctest
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mars_jax.cli.commands import COMMANDS
from mars_jax.drafters.registry import definitions
from mars_jax.utils.settings import BATCH, REQUEST
from mars_jax.verify import rules
from scripts import results_page
from tests.helpers import slow_but
from tests.helpers.pages import blocks

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
REPORTS = sorted((ROOT / "scripts" / "results").rglob("*.md"))


def prose(path: Path) -> str:
    """Return a document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(path: Path) -> list[str]:
    """Return the local files and anchors that a document links to or shows."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(path))
    return [link for link in targets if not re.match(r"[a-z]+:", link)]


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of the README, without its header."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text[text.index(f"## {heading}\n") :].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"scripts.{script}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_results_are_those_of_the_json():
    process = run("results_page", "--check")
    assert (process.returncode, process.stderr) == (0, "")


def test_drift_of_the_results_is_noticed(tmp_path):
    for page in results_page.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    name = "docs/smollm2.md"
    text = (ROOT / name).read_text(encoding="utf-8")
    drifted = text.replace("| none | 99 |", "| none | 98 |", 1)
    assert drifted != text
    (tmp_path / name).write_text(drifted, encoding="utf-8")
    process = run("results_page", "--check", "--root", str(tmp_path))
    assert process.returncode == 1
    assert f"--- {name}" in process.stderr and "Run python -m scripts.results_page." in process.stderr
    assert (tmp_path / name).read_text(encoding="utf-8") == drifted, "--check must not write"
    assert run("results_page", "--root", str(tmp_path)).returncode == 0
    assert (tmp_path / name).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("name", ["common", "results_page", "smollm2.torch_side"])
def test_examples_of_the_scripts_run(name):
    outcome = doctest.testmod(importlib.import_module(f"scripts.{name}"))
    assert outcome.attempted and not outcome.failed


PICTURES = [
    ("when_it_pays.fair_picture", (), "fair.svg"),
    ("rules_compared.rules_pictures", ("--task", "stories"), "rules_stories.svg"),
    ("rules_compared.rules_pictures", ("--task", "arithmetic"), "rules_arithmetic.svg"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "options", "name"), PICTURES)
def test_the_pictures_show_their_json(tmp_path, script, options, name):
    pytest.importorskip("matplotlib")
    process = run(script, "--folder", str(tmp_path), *options)
    assert process.returncode == 0, process.stderr
    drawn, committed = ((folder / name).read_text(encoding="utf-8") for folder in (tmp_path, ROOT / "docs"))
    drawn_text, committed_text = (re.findall(r"<text[^>]*>([^<]*)</text>", svg) for svg in (drawn, committed))
    assert len(drawn_text) > 5 and drawn_text == committed_text
    if "rules" in name:
        # Compare positions to a hundredth of a point, since other versions of matplotlib write other digits.
        positions = re.compile(r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)"')
        actual, expected = (np.asarray(positions.findall(svg), float) for svg in (drawn, committed))
        np.testing.assert_allclose(actual, expected, atol=0.01)


@pytest.mark.parametrize("path", [*DOCUMENTS, *REPORTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    dead = []
    for link in links(path):
        name, _, anchor = link.partition("#")
        destination = (path.parent / name).resolve() if name else path
        if not destination.exists() or (anchor and anchor not in anchors(destination)):
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_that_documents_name_are_in_the_tree_or_have_a_commit(path):
    """A script that no longer exists has its commit next to it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    gone = [
        name
        for number, line in enumerate(lines)
        for name in re.findall(r"scripts/[\w/]+\.py", line)
        if path.name != "CHANGELOG.md" and not (ROOT / name).exists()
        if not re.search(r"\b[0-9a-f]{7}\b", " ".join(lines[number : number + 3]))
    ]
    assert gone == []


def test_flags_that_documents_name_exist():
    # Flags of other tools, since blocks of code are searched too.
    foreign = {"--quiet", "--model", "--model_args", "--tasks", "--check", "--no-deps", "--no-compile"}
    foreign |= {"--rm", "--network", "--problem_file"}
    settings = {name for row in rules().values() for name, s in row.settings.items() if s.flag}
    settings |= {*REQUEST, *BATCH}
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "mars_jax").rglob("*.py"))
    for page in ("README.md", "docs/commands.md", "docs/generate.md", "docs/benchmark.md"):
        path = ROOT / page
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", path.read_text(encoding="utf-8"))) - foreign
        for flag in sorted(named):
            # The source has the flag alone, the flag before the name of its value, or the flag without `no-`.
            is_setting = flag[2:].replace("-", "_") in settings
            forms = (f'"{flag}"', f'"{flag} ', f'"--{flag.removeprefix("--no-")}"')
            assert is_setting or any(form in source for form in forms), f"{path.name}: {flag}"


def test_every_command_has_its_section():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    of_sections = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    of_pages = re.findall(r"^\| \[`\w+`\]\((\w+)\.md\)", page, re.MULTILINE)
    assert sorted(of_sections + of_pages) == sorted(COMMANDS)


def test_the_tables_of_the_readme_agree_with_those_of_the_package():
    for name, _, lossless, settings in table("Rules"):
        row = rules()[name.strip("`")]
        assert (lossless == "yes") == row.lossless, row.name
        assert set(re.findall(r"`(\w+)`", settings)) == set(row.settings), row.name
    named = {f"`{row.spec}`": row for row in definitions().values()}
    for name, _, shapes in table("Drafters"):
        row = named[name]
        assert ("static tree" in shapes, "dynamic tree" in shapes) == (row.trees, row.dynamic), row.name


def test_the_readme_has_figures_of_a_page_that_is_written_from_json():
    paths = (ROOT / "README.md", ROOT / "docs" / "when-it-pays.md")
    readme, page = (" ".join(path.read_text(encoding="utf-8").split()) for path in paths)
    figures = re.findall(r"\d+\.\d+ \[[^]]+\] times", readme)
    assert len(figures) == 2 and all(figure in page for figure in figures)


@pytest.mark.parametrize("target", slow_but(["tiny/target", "tiny/draft"], "tiny/draft"))
def test_the_python_of_the_readme_runs(target, capsys):
    """The draft as its own target has fewer layers to compile."""
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "README.md"):
        exec(compile(block.replace("tiny/target", target), "README.md", "exec"), names)
    story, tau = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert story.count("Once upon a time") == 1 and len(story) > 40
    assert float(tau.split(" tokens per target forward")[0]) > 1
