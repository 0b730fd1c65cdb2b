"""Print the part of CHANGELOG.md that is about a version, or refuse one that is not ready to be released.

    python -m scripts.tools.release_notes v0.1.0

The tag, `version` in pyproject.toml and `__version__` have to be one version, and the changelog has to date it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def of(version: str, changelog: str) -> str:
    """The changes of a version.

    Raises:
      ValueError: the changelog has none, or says that they are not released.

    >>> of("0.1.0", "# Changelog\\n\\n## 0.1.0 (2026-12-01)\\n\\n- A library.\\n")
    '- A library.\\n'
    """
    parts = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    found = [part for part in parts if part.split()[0] == version]
    if not found:
        raise ValueError(f"CHANGELOG.md has no part for {version}: give it one.")
    heading, _, text = found[0].partition("\n")
    if "unreleased" in heading:
        raise ValueError(
            f"CHANGELOG.md says of {version} that it is unreleased: write the date in its place."
        )
    return text.strip() + "\n"


def check(tag: str) -> str:
    """The version of a tag, such as v0.1.0.

    Raises:
      ValueError: it is not the version of this checkout.
    """
    version = tag.removeprefix("v")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    package = re.search(
        r'^__version__ = "(.*)"$', (ROOT / "mars_jax" / "__init__.py").read_text(), re.MULTILINE
    )
    if not (tag.startswith("v") and package and version == project == package[1]):
        told = package[1] if package else "none"
        raise ValueError(
            f"the tag is {tag}, pyproject.toml has {project} and the package {told}: make them one version."
        )
    return version


if __name__ == "__main__":
    try:
        print(of(check(sys.argv[1]), (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")), end="")
    except (ValueError, IndexError) as refused:
        sys.exit(f"error: {refused}")
