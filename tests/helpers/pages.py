"""The Python of the documents: block by block for the tests that run it, as files for pyright.

python -m tests.helpers.pages FOLDER      writes a file for each page, whose lines have the numbers of the page's
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if "\n```python\n" in path.read_text()
]
"""Every page with Python in it."""


def blocks(path: Path) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def as_file(path: Path) -> str:
    """The blocks of a page one after the other, each at its lines, so that a checker names the page's."""
    made, inside = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        inside = inside and line != "```"
        made.append(line if inside else "")
        inside = inside or line == "```python"
    return "\n".join(made) + "\n"


def write(folder: Path) -> None:
    """Write the pages as files of Python into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in PAGES:
        (folder / f"{path.stem.replace('-', '_')}_page.py").write_text(as_file(path), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
