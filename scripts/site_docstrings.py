"""The docstrings as mkdocstrings reads them: an extension of griffe that makes blocks of their examples."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from site_pages import fenced

griffe: Any = importlib.import_module("griffe")


class Fenced(griffe.Extension):
    """Examples begin with `>>>`, which Markdown would take for quotes in quotes."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """After an object of the source is read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
