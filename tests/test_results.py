"""Committed figures: each says where it comes from and is read by a page, and few prompts carry no verdict."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"
FILES = sorted(RESULTS.rglob("*.json"))
PAGES = [
    RESULTS / "README.md",
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "mars_jax" / "assets").rglob("*.md"),
]


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_every_committed_report_says_where_it_comes_from(path):
    """A folder that a command wrote has one summary, which speaks for its parts."""
    origin = importlib.import_module("results_tables.origins").origin
    summary = path.with_name("summary.json")
    found = origin(json.loads((summary if summary.exists() else path).read_text(encoding="utf-8")))
    assert found.commit and (found.date or found.committed)


def test_a_report_without_an_origin_is_refused():
    origin = importlib.import_module("results_tables.origins").origin
    for report in ({"date": "2026-11-24"}, {"environment": {"cores": 2}}, []):
        with pytest.raises(ValueError, match="neither its commit"):
            origin(report)


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(path.name for path in RESULTS.glob("fair_arms*.json")))
def test_the_study_of_lengths_is_what_its_rows_say(file):
    study = importlib.import_module("fair_arms")
    told = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    rows = study.packed_rows(RESULTS / file.replace(".json", ".jsonl.xz"))
    assert study.report(study.STUDIES[told["study"]], rows, told["costs"]["steps"]) == told["tables"]


def test_every_committed_report_is_read_by_a_page_or_named_by_one(monkeypatch):
    """And a page says of which commit it is, where one reads it."""
    origin = importlib.import_module("results_tables.origins").origin
    read = set()
    text_of = Path.read_text

    def noting(path, *args, **options):
        read.add(path)
        return text_of(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", noting)
    importlib.import_module("results_tables").everything()
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    folders = {path.parent for path in read if path.is_relative_to(RESULTS) and path.parent != RESULTS}
    unread = [
        str(path.relative_to(RESULTS))
        for path in FILES
        if path not in read and path.parent not in folders and path.name not in pages
    ]
    assert unread == []
    commits = {path: origin(json.loads(text_of(path))).commit[:7] for path in read if path.suffix == ".json"}
    assert [str(path) for path, commit in commits.items() if commit not in pages] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_that_names_a_report_names_its_commit(page):
    origin = importlib.import_module("results_tables.origins").origin
    text = page.read_text(encoding="utf-8")
    named = [path for path in FILES if path.parent == RESULTS and re.search(rf"\b{path.name}", text)]
    commits = {path.name: origin(json.loads(path.read_text(encoding="utf-8"))).commit[:7] for path in named}
    assert [name for name, commit in commits.items() if commit not in text] == []


@pytest.mark.parametrize(
    ("digest", "said"), [("of the script", ""), ("another", " Its script has changed since.")]
)
def test_a_sentence_says_when_and_of_which_code_a_figure_is(digest, said):
    origins = importlib.import_module("results_tables.origins")
    name = "scripts/results_page.py"
    now = hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:12]
    run = {
        "date": "2026-11-24T10:00+00:00",
        "commit": "0f417bdcfe",
        "dirty": False,
        "cores": 1,
        "processor": "P",
    }
    report = run | {"script": {name: now if digest == "of the script" else digest}}
    assert (
        origins.sentence(origins.origin(report))
        == f"Measured on 2026-11-24 at 0f417bdcfe, 1 core of P.{said}"
    )
    gone = {"commit": "fa252ce", "committed": "2026-11-23T00:52:49+00:00", "script": {"scripts/gone.py": "1"}}
    told = "Committed on 2026-11-23 in fa252ce. Its script is in the history alone: `git show fa252ce:scripts/gone.py`."
    assert origins.sentence(origins.origin({"recovered": gone})) == told


def test_of_records_with_origins_of_their_own_the_latest_speaks():
    origin = importlib.import_module("results_tables.origins").origin
    record = {"commit": "a", "dirty": False, "cores": 2, "processor": "P"}
    found = origin([record | {"date": "2026-11-23"}, record | {"date": "2026-11-24", "commit": "b"}])
    assert found.commit == "b"


@pytest.mark.parametrize("name", ["results.md", "smollm2.md", "rules-compared.md"])
def test_a_page_for_readers_has_no_bars(name):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert not re.search(r"\bbars?\b|\| met \|", text)
