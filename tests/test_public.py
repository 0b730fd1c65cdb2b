"""The public names with their arguments, commands with their flags, rules and drafters, as listed in public.json.

    PYTHONPATH=. python tests/test_public.py      write the list again

Removing a name, an argument or a flag needs a new major version (docs/stability.md); an added one needs its line.
"""

import ast
import importlib
import inspect
import json
import sys
from pathlib import Path

import pytest

from mars_jax.drafters.registry import definitions
from mars_jax.verify import rules
from tests.helpers.pages import PAGES, as_file
from tests.helpers.public_names import named, promised

LIST = Path(__file__).parent / "public.json"
MOST = 65
"""Largest number of promised names, so that a reader can scan them in a minute."""


def arguments(value):
    """Return the names of the arguments of a function or a class; None if a value has no signature."""
    if inspect.ismodule(value) or not callable(value):
        return None
    try:
        return list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return None


def public():
    """Return the list for this checkout."""
    from mars_jax.cli.commands import COMMANDS, parser_of

    listing = {"names": {name: arguments(named(name)) for name in sorted(promised())}}
    listing["commands"] = {}
    for name in COMMANDS:
        if (parser := parser_of(name)) is not None:
            actions = [action for p in (parser, *parser.kinds().values()) for action in p._actions]
            flags = {flag for action in actions for flag in action.option_strings if flag.startswith("--")}
            listing["commands"][name] = sorted(flags)
    library_rules = {name: rule for name, rule in rules().items() if ".contrib." not in rule.make.__module__}
    listing["rules"] = {name: sorted(row.settings) for name, row in library_rules.items()}
    listing["drafters"] = {
        n: [row.spec] for n, row in definitions().items() if ".contrib." not in row.cls.__module__
    }
    return listing


def test_the_public_names_are_listed():
    """If this fails, run `PYTHONPATH=. python tests/test_public.py` and describe the change in CHANGELOG.md."""
    listed = json.loads(LIST.read_text())
    for part, names in public().items():
        assert names == listed[part], part


def test_the_promise_is_short_and_kept_by_names_that_are_exported():
    names = promised()
    assert len(set(names)) == len(names) <= MOST
    for full in names:
        home, _, name = full.rpartition(".")
        assert name in importlib.import_module(home).__all__, full


RINGS = {"mars_jax.contrib", "mars_jax.integrations", "mars_jax.lab"}


def is_public(full):
    """Return whether a document may use a dotted name: a promised one, an attribute of one, or a name in a ring."""
    parts = full.split(".")
    prefixes = {".".join(parts[:n]) for n in range(2, len(parts) + 1)}
    private = any(part.startswith("_") for part in parts)
    return full == "mars_jax" or (not private and not prefixes.isdisjoint({*promised(), *RINGS}))


def used(source):
    """Return the dotted names of the package that a file imports or reaches by attributes."""
    tree, homes, names = ast.parse(source), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            homes |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            homes |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts, node = [node.attr, *parts], node.value
        if parts and isinstance(node, ast.Name) and node.id in homes:
            names.add(".".join([homes[node.id], *parts]))
    return {name for name in names if name.split(".")[0] in ("mars_jax", "kernels_pallas")}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_documents_use_public_names_only(path):
    names = used(as_file(path))
    assert names or "mars_jax" in as_file(path)  # or it runs a command
    assert [name for name in sorted(names) if not is_public(name)] == []


if __name__ == "__main__":
    LIST.write_text(json.dumps(public(), indent=1) + "\n")
    print(f"wrote {LIST}", file=sys.stderr)
