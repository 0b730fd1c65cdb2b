"""Print the section of CHANGELOG.md for a version, or fail if that version is not ready for release.

    python -m scripts.tools.release_notes v0.1.0

The tag, `version` in pyproject.toml and `__version__` must match, and the changelog must give a date for the version.
"""

from __future__ import annotations

import re
import sys
import tomllib

from mars_jax import __version__
from scripts.common import ROOT


def notes_of(version: str, changelog: str) -> str:
    """Return the changelog entries of a version.

    Raises:
      SystemExit: the changelog has no section for the version, or marks it as unreleased.
    """
    parts = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    part = next((part for part in parts if part.split()[0] == version), None)
    if part is None:
        raise SystemExit(f"error: CHANGELOG.md has no section for {version}: add one.")
    heading, _, text = part.partition("\n")
    if "unreleased" in heading:
        raise SystemExit(f"error: CHANGELOG.md marks {version} as unreleased: write the date in its place.")
    return text.strip() + "\n"


def main(tag: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if not tag == f"v{project}" == f"v{__version__}":
        sys.exit(
            f"error: the tag is {tag}, pyproject.toml has {project}, the package {__version__}: make them match."
        )
    print(notes_of(__version__, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")), end="")


if __name__ == "__main__":
    main(sys.argv[1])
