"""A griffe extension that prepares docstrings for mkdocstrings: it marks examples as code, and lists fields."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.tools.site_pages import site_docstring

griffe: Any = importlib.import_module("griffe")


class SiteDocstrings(griffe.Extension):
    """Extension that prepares docstrings for Markdown, which reads `>>>` as nested quotes, and adds field comments."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite an object's docstring after griffe has read it."""
        if obj.docstring is not None:
            obj.docstring.value = site_docstring(obj.docstring.value, obj.path if obj.is_class else "")
