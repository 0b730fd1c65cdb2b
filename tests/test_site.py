"""Parts of the site that are generated from the code; `.ci/run docs` builds all of it and follows every link."""

import argparse
import dataclasses
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import kernels_pallas
from mars_jax import __version__
from mars_jax.cli.commands import COMMANDS
from scripts.tools import release_notes as notes
from scripts.tools import site_pages as pages
from tests.helpers.public_names import named

ROOT = Path(__file__).resolve().parents[1]


def test_every_flag_of_every_command_is_on_the_page():
    page = pages.flags_page()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == [name for name in COMMANDS if name != "lm_eval"]
    for name, parser in pages.parsers().items():
        documented = set(re.findall(r"^\| `([^`]*)`", sections[name], re.MULTILINE))
        words = {word.strip(",") for cell in documented for word in cell.split()}
        parsers = (parser, *parser.kinds().values())
        actions = [a for subparser in parsers for a in subparser._actions if a.help is not argparse.SUPPRESS]
        assert {flag for a in actions for flag in a.option_strings} | parser.kinds().keys() <= words, name
        assert "%(" not in sections[name]
        assert "examples:" in sections[name] and re.search(rf"mars[-_]jax[. ]{name} ", sections[name]), name
        # Long commands group their help, so that few flags remain plain "options".
        for subparser in parsers:
            loose = [a for a in subparser._optionals._group_actions if a.option_strings]
            assert len(loose) <= 5, subparser.prog


def test_every_public_name_has_an_entry():
    import mars_jax
    from mars_jax import contrib, drafters, verify

    names, entries = pages.api_names(), pages.api_pages()
    shown_names = [name.shown for row in names.values() for name in row]
    assert len(shown_names) == len(set(shown_names))
    every = {f"mars_jax.{name}" for name in mars_jax._HOME}
    for package in (verify, drafters, contrib, kernels_pallas):
        every |= {f"{package.__name__}.{name}" for name in package.__all__}
    assert set(shown_names) == every
    for module in mars_jax._MODULES.keys() - {"verify", "drafters"}:
        assert f"heading: mars_jax.{module}\n" in entries["api/modules.md"]
    for purpose, (page, _) in pages.REFERENCE.items():
        for name in names[purpose]:
            assert f"::: {name.home}\n" in entries[f"api/{page}.md"]
            package, _, attribute = name.shown.rpartition(".")
            assert resolve(name.home) is (
                getattr(contrib, attribute) if package == "mars_jax.contrib" else named(name.shown)
            )


def resolve(home):
    module, _, attribute = home.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_field_of_a_public_class_has_its_meaning_and_every_array_its_shape():
    counted = 0
    for name in (name for row in pages.api_names().values() for name in row):
        value, fields = resolve(name.home), pages.fields(name.home)
        if not inspect.isclass(value):
            continue
        names = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        assert {*names, *getattr(value, "_fields", ())} <= {field.name for field in fields}, name.shown
        for field in fields:
            prose = re.sub(r"\w*\[[^\]]*\]( or None| or \[B\]| each)?", "", field.meaning)
            assert prose.strip(" ;:"), f"{name.shown}.{field.name}"
            assert "Array" not in field.annotation or re.search(r"\[.*?\]|\(.*\)", field.meaning), field
        assert all(f"  {f.name} (" in pages.site_docstring("", name.home) for f in fields)
        counted += len(fields)
    assert counted > 150


# Metadata of a release.


def test_the_version_is_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    changes = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert project["version"] == __version__
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [__version__]
    assert changes[0] in (__version__, "Unreleased") and __version__ in changes
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def test_the_notes_of_a_release_are_its_part_of_the_changelog():
    text = "# Changelog\n\n## 0.2.0 (unreleased)\n\n- New.\n\n## 0.1.0 (2026-11-01)\n\n- Old.\n"
    assert notes.notes_of("0.1.0", text) == "- Old.\n"
    with pytest.raises(SystemExit, match=r"has no section for 0\.3\.0"):
        notes.notes_of("0.3.0", text)
    with pytest.raises(SystemExit, match=r"marks 0\.2\.0 as unreleased"):
        notes.notes_of("0.2.0", text)
