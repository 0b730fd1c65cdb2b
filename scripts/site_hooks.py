"""What mkdocs calls while it builds the site: pages that `site_pages.py` makes join those of docs/."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import site_pages

_ADDRESS = site_pages.repository()


def on_config(config: Any) -> Any:
    """The address of the repository, and a place among the guides for pages that `nav` does not name."""
    sys.path.insert(0, str(site_pages.ROOT))  # here, since mkdocs takes back what a hook adds while it loads
    if _ADDRESS:
        config.repo_url = _ADDRESS
        config.edit_uri = None
    named = set(_paths(config.nav))
    guides = next(part["Guides"] for part in config.nav if "Guides" in part)
    guides += [path.name for path in sorted(Path(config.docs_dir).glob("*.md")) if path.name not in named]
    return config


def _paths(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [path for part in (nav.values() if isinstance(nav, dict) else nav) for path in _paths(part)]


def on_files(files: Any, config: Any) -> Any:
    """Pages from the root of the repository, of the flags and of the API; and pictures."""
    File = importlib.import_module("mkdocs.structure.files").File

    made = {"flags.md": site_pages.flags_page(), **site_pages.api_pages()}
    pictures: dict[str, str] = {}
    for source, page in site_pages.FROM_ROOT.items():
        shown = _shown(source)
        made[page] = shown.text
        pictures |= shown.pictures
    for path in Path(config.docs_dir).glob("*.md"):
        pictures |= _shown(f"docs/{path.name}").pictures
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for path, source in pictures.items():
        files.append(File.generated(config, path, abs_src_path=str(site_pages.ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links of the pages in docs/ that lead out of it."""
    if page.file.generated_by is not None:
        return markdown
    return site_pages.on_site(markdown, f"docs/{page.file.src_uri}", _ADDRESS).text


def _shown(source: str) -> site_pages.Site:
    text = (site_pages.ROOT / source).read_text(encoding="utf-8")
    return site_pages.on_site(text, source, _ADDRESS)
