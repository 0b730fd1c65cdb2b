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
    """Prepare docstrings for Markdown, which reads `>>>` as nested quotes, and add the comments of fields."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """After an object of the source is read."""
        if obj.docstring is not None:
            obj.docstring.value = told(obj.docstring.value, obj.path if obj.is_class else "")
