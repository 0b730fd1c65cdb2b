"""Docstrings as mkdocstrings reads them: an extension of griffe that marks their examples and lists fields."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.tools.site_pages import told

griffe: Any = importlib.import_module("griffe")


class Told(griffe.Extension):
    """Examples begin with `>>>`, which Markdown would take for quotes in quotes; comments say what fields mean."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """After an object of the source is read."""
        if obj.docstring is not None:
            obj.docstring.value = told(obj.docstring.value, obj.path if obj.is_class else "")
