"""The pages of the documentation site that are made from something else, and what happens to links of the others.

`mkdocs build --strict` calls this through `site_hooks.py`. Nothing here imports jax or mkdocs: flags come from the
parsers, names from the packages' own tables, and docstrings are read from the source.

Oracle: tests/test_site.py.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import posixpath
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # mkdocs calls this before the package is on its path
    from mars_jax.cli.program import Parser

ROOT = Path(__file__).resolve().parents[1]
FROM_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "mars_jax/assets/tiny/README.md": "tiny.md",
}
"""Documents outside of docs/ that are pages of the site, by their path in the repository."""
_FENCE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


class Site(NamedTuple):
    """A page as it is shown, and the pictures outside of docs/ that it shows."""

    text: str
    pictures: dict[str, str]  # by the path on the site, the path in the repository


def repository() -> str:
    """The address of the repository, without a slash at its end; "" where it is not known.

    It stands in one place, `Repository` among `[project.urls]` of pyproject.toml. Without that, a build on GitHub asks
    GitHub.
    """
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    return told.get("Repository", f"{server}/{name}" if server and name else "").rstrip("/")


def on_site(text: str, source: str, address: str) -> Site:
    """A document of the repository as a page of the site.

    Links to other pages stay, links to files that are no pages lead into the repository, or are plain text where its
    address is not known, and pictures come along.

    Args:
      text: of the document.
      source: its path in the repository.
      address: as of `repository`.

    Raises:
      ValueError: a link to nothing.

    >>> on_site("[rules](docs/rules.md#rules) and [all](LICENSE)", "README.md", "https://x.org/y").text
    '[rules](rules.md#rules) and [all](https://x.org/y/blob/main/LICENSE)'
    >>> on_site("[all](LICENSE)", "README.md", "").text
    'all'
    """
    pictures: dict[str, str] = {}

    def place(link: str) -> str | None:
        name, hash_, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link) or not name:
            return link
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        if not (ROOT / path).exists():
            raise ValueError(f"{source} links to {link}, and there is no {path}.")
        if path in FROM_ROOT:
            return FROM_ROOT[path] + hash_ + anchor
        if path.startswith("docs/"):
            return path.removeprefix("docs/") + hash_ + anchor
        if path.endswith((".png", ".svg")):
            shown = "pictures/" + path.replace("/", "-")
            pictures[shown] = path
            return shown
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{address}/{kind}/main/{path}{hash_}{anchor}" if address else None

    def part(found: str) -> str:
        moved = re.sub(
            r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)",
            lambda m: m[2] if (to := place(m[3])) is None else f"{m[1]}[{m[2]}]({to})",
            found,
        )
        return re.sub(r"<!--.*?-->\n?", "", moved, flags=re.DOTALL)

    pieces = _FENCE.split(text)
    return Site("".join(p if i % 2 else part(p) for i, p in enumerate(pieces)), pictures)


# Flags.


def parsers() -> dict[str, Parser]:
    """The parser of every command that has one of its own: all but lm_eval, whose flags are the harness's."""
    from mars_jax.cli.commands import parser_of

    return {name: made for name in _commands() if (made := parser_of(name)) is not None}


def _commands() -> dict[str, str]:
    return importlib.import_module("mars_jax.cli.commands").COMMANDS


def flags_page() -> str:
    """The flags of every command, as its parser has them."""
    lines = [
        "# Flags",
        "",
        "This page is made from the parsers when the site is built. [Commands](commands.md) explains what the commands "
        "are for. `lm_eval` has the flags of lm-evaluation-harness.",
        "",
    ]
    for name, made in parsers().items():
        lines += [f"## {name}", "", _escaped(" ".join((made.description or "").split())), ""]
        lines += [*_tables(name, {"": made}), *_tables(f"{name} ", made.kinds())]
        if made.epilog:
            lines += ["```text", made.epilog.strip("\n"), "```", ""]
    return "\n".join(lines)


def _tables(command: str, made: Mapping[str, Parser]) -> list[str]:
    """The groups of flags; one that several parsers share stands once."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, parser in made.items():
        for title, group in parser.groups().items():
            told = [_escaped(" ".join(group.description.split())), ""] if group.description else []
            rows = [_flag(action) for action in _told_apart(group) if action.help != argparse.SUPPRESS]
            table = (title, "", *told, "| flag | meaning |", "|---|---|", *rows, "")
            found.setdefault(table, []).append(name)
    lines = []
    for (title, *table), names in found.items():
        lines += [f"### {command}{', '.join(names)}: {title}", *table]
    return lines


def _told_apart(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    """The arguments of a group, each subcommand as one of its own."""
    made = []
    for action in group._group_actions:
        made += action._choices_actions if isinstance(action, argparse._SubParsersAction) else [action]
    return made


def _flag(action: argparse.Action) -> str:
    shown = action.metavar if isinstance(action.metavar, str) else None
    if action.choices is not None and shown is None:
        shown = "{" + ",".join(map(str, action.choices)) + "}"
    value = "" if action.nargs == 0 else shown or action.dest.upper()
    names = ", ".join(action.option_strings) or value
    told = f"{names} {value}".strip() if action.option_strings else names
    text = (action.help or "") % {"default": action.default, "prog": ""}
    return f"| `{told.replace('|', chr(92) + '|')}` | {_escaped(' '.join(text.split()))} |"


def _escaped(text: str) -> str:
    return re.sub(r"([*_<>|`\[\]])", r"\\\1", text)


# The Python API.


class Name(NamedTuple):
    """A public name: how a user calls it, and where it is defined."""

    shown: str
    home: str


def api_names() -> dict[str, list[Name]]:
    """The public names by their page: `mars_jax` itself, `verify` and `drafters`, of each what it exports."""
    import mars_jax

    pages = {
        "mars_jax": [Name(f"mars_jax.{n}", f"mars_jax.{home}.{n}") for n, home in mars_jax._HOME.items()]
    }
    for package in ("verify", "drafters"):
        pages[package] = exported(f"mars_jax.{package}")
    return {page: sorted(names) for page, names in pages.items()}


def exported(package: str) -> list[Name]:
    """The names in `__all__` of a package, and where its `__init__.py` imports each from. It is not imported."""
    source = (ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")
    homes: dict[str, str] = {}
    listed: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            listed = ast.literal_eval(node.value)
    return [Name(f"{package}.{name}", homes.get(name, f"{package}.{name}")) for name in listed]


def api_pages() -> dict[str, str]:
    """Pages whose entries mkdocstrings fills from the docstrings, by their path on the site."""
    import mars_jax

    told = {
        "mars_jax": "`import mars_jax` loads nothing heavy: each of these names loads on first use.",
        "verify": "The rules, and what a rule of your own is made of; [Rules](../rules.md) explains them.",
        "drafters": "The drafters; [Drafters](../drafters.md) explains them.",
    }
    pages = {}
    for page, names in api_names().items():
        title = page if page == "mars_jax" else f"mars_jax.{page}"
        lines = [f"# {title}", "", told[page], ""]
        for name in names:
            lines += [f"::: {name.home}", "    options:", f"      heading: {name.shown}", ""]
        pages[f"api/{page}.md"] = "\n".join(lines)
    known = [name for names in api_names().values() for name in names]
    lines = [
        "# Modules",
        "",
        "The modules that `mars_jax` offers by name, beside `verify` and `drafters`.",
        "",
    ]
    for name, home in mars_jax._MODULES.items():
        if name in told:
            continue
        # What has an entry on another page has none here.
        others = [n.home.rpartition(".")[2] for n in known if n.home.rpartition(".")[0] == f"mars_jax.{home}"]
        filters = ", ".join(f'"!^{other}$"' for other in ("_.*", *sorted(others)))
        lines += [f"::: mars_jax.{home}", "    options:", f"      heading: mars_jax.{name}"]
        lines += [f"      filters: [{filters}]", ""]
    pages["api/modules.md"] = "\n".join(lines)
    return pages


def fenced(docstring: str) -> str:
    """A docstring whose examples are blocks of code, as the site shows them.

    >>> fenced("One.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['One.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    lines, inside = [], False
    for line in docstring.splitlines():
        begins = line.lstrip().startswith(">>> ")
        indent = line[: len(line) - len(line.lstrip())]
        if begins and not inside:
            lines.append(f"{indent}```pycon")
            margin, inside = indent, True
        elif inside and not line.strip():
            lines.append(f"{margin}```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, f"{margin}```"] if inside else lines)
