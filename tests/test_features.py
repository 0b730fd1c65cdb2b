"""`docs/features.md`: every row names tests that exist and run."""

import ast
import re
from pathlib import Path

from tests.helpers.sources import find_test

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (?!feature \||-)(.+) \| (.*) \|$", re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py)?::([\w:]+)`")


def faults(page: str, root: Path):
    """Yield one sentence for each test in the table of a page that does not support its row."""
    for feature, tests in ROW.findall(page):
        file = ""
        for cell in tests.split(", "):
            named = TEST.fullmatch(cell)
            if not named:
                yield f"{feature}: {cell!r} is not the name of a test"
                continue
            file = named[1] or file
            test = find_test(root / "tests" / file, named[2])
            if test is None:
                yield f"{feature}: tests/{file}::{named[2]} does not exist"
            elif any(re.match(r"pytest\.mark\.skip\b", ast.unparse(mark)) for mark in test.decorator_list):
                yield f"{feature}: tests/{file}::{named[2]} is always skipped"


def test_every_row_names_tests_that_run():
    page = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    assert 90 < len(ROW.findall(page)) <= 130
    assert list(faults(page, ROOT)) == []
