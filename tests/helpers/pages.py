"""Python blocks of the documentation pages: as strings for the tests that run them, as files for pyright.

python -m tests.helpers.pages FOLDER      writes a file for each page, with the line numbers of the page
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if "\n```python\n" in path.read_text()
]
"""Every page that contains Python."""


def blocks(path: Path) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def as_file(path: Path) -> str:
    """Return the blocks of a page as one file. Each keeps its line numbers, so that a checker reports the page's."""
    lines, inside = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        inside = inside and line != "```"
        lines.append(line if inside else "")
        inside = inside or line == "```python"
    return "\n".join(lines) + "\n"


def write(folder: Path) -> None:
    """Write the pages as Python files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in PAGES:
        (folder / f"{path.stem.replace('-', '_')}_page.py").write_text(as_file(path), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
