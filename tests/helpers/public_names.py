"""Public names of the package, and those that the documentation promises."""

import importlib
import re
from pathlib import Path

PROMISE = Path(__file__).parents[2] / "docs" / "stability.md"


def promised():
    """Return the names in the table of docs/stability.md, as "package.name"."""
    rows = [line for line in PROMISE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    of_names = rows[1 : next(i for i, row in enumerate(rows) if row.startswith("| version"))]
    names = [name for row in of_names for name in re.findall(r"`([\w.]+)`", row)]
    return [name if name.startswith("kernels_pallas.") else f"mars_jax.{name}" for name in names]


def named(full):
    """Return the object of a full name, even if `import mars_jax.generate` has replaced a function by its module."""
    home, _, name = full.rpartition(".")
    package = importlib.import_module(home)
    place = getattr(package, "_HOME", {}).get(name)
    return getattr(importlib.import_module(f"{home}.{place}") if place else package, name)
