"""Committed reports: each records its origin, and a page reads or names it."""

import importlib
import json
import re
from pathlib import Path

import pytest

from scripts import results_page
from scripts.common import origin

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"
FILES = sorted(RESULTS.rglob("*.json"))
PAGES = [
    RESULTS / "README.md",
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "mars_jax" / "assets").rglob("*.md"),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_every_committed_report_says_where_it_comes_from(path):
    source = origin(json.loads(path.read_text(encoding="utf-8")))
    assert source.commit and (source.date or source.committed)


def test_a_report_without_an_origin_is_refused():
    for report in ({"date": "2026-11-24"}, {"environment": {"cores": 2}}, []):
        with pytest.raises(ValueError, match="neither the commit"):
            origin(report)


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(path.name for path in RESULTS.glob("fair_arms*.json")))
def test_the_study_of_lengths_is_what_its_rows_say(file):
    from scripts.when_it_pays import fair_arms as study

    report = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    rows = study.packed_rows(RESULTS / file.replace(".json", ".jsonl.xz"))
    assert study.report(study.STUDIES[report["study"]], rows, report["costs"]["steps"]) == report["tables"]


def test_every_committed_report_is_read_by_a_page_or_named_by_one(monkeypatch):
    """A page also names the commit of every report that it reads."""
    read = set()
    text_of = Path.read_text

    def noting(path, *args, **options):
        read.add(path)
        return text_of(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", noting)
    for folder in {Path(template).parent for template in results_page.PAGES.values()}:
        importlib.import_module(f"scripts.{folder}.tables").figures()
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [path.name for path in FILES if path not in read and path.name not in pages] == []
    commits = {path: origin(json.loads(text_of(path))).commit[:7] for path in read if path.suffix == ".json"}
    assert [str(path) for path, commit in commits.items() if commit not in pages] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_that_names_a_report_names_its_commit(page):
    text = page.read_text(encoding="utf-8")
    named = [path for path in FILES if path.parent == RESULTS and re.search(rf"\b{path.name}", text)]
    commits = {path.name: origin(json.loads(path.read_text(encoding="utf-8"))).commit[:7] for path in named}
    assert [name for name, commit in commits.items() if commit not in text] == []
