"""Pages of the documentation site: the pages in docs/, and generated pages.

    python -m scripts.tools.site_pages    # writes build/pages, from which `zensical build --strict` makes build/site

This module imports neither jax nor the site generator. It reads flags from the parsers, names from tables in the
packages and from docs/stability.md, and fields and docstrings from the source. Any generator that reads Markdown can
use the folder.

Tests: tests/test_site.py.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import os
import posixpath
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mars_jax.cli.program import Parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "build" / "pages"
FROM_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "mars_jax/assets/tiny/README.md": "tiny.md",
}
"""Pages of the site whose documents are outside docs/, keyed by the path of the document in the repository."""
_FENCE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)$)", re.MULTILINE | re.DOTALL)


def repository() -> str:
    """Return the URL of the repository without a trailing slash, or "" if it is unknown.

    The URL is `Repository` in `[project.urls]` of pyproject.toml, or else is derived from the variables of a GitHub
    build.
    """
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    return urls.get("Repository", f"{server}/{name}" if server and name else "").rstrip("/")


def on_site(text: str, source: str, address: str) -> str:
    """Convert a document of the repository into a page of the site.

    Links to other pages are changed to their paths on the site. Links to other files point into the repository, or
    become plain text if its URL is unknown.

    Args:
      text: text of the document.
      source: path of the document in the repository.
      address: URL of the repository, from `repository`.

    Raises:
      ValueError: the target of a link does not exist.

    >>> on_site("[rules](docs/rules.md#rules) and [all](LICENSE)", "README.md", "https://x.org/y")
    '[rules](rules.md#rules) and [all](https://x.org/y/blob/main/LICENSE)'
    >>> on_site("[all](LICENSE)", "README.md", "")
    'all'
    """

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
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{address}/{kind}/main/{path}{hash_}{anchor}" if address else None

    def part(prose: str) -> str:
        moved = re.sub(
            r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)",
            lambda m: m[2] if (to := place(m[3])) is None else f"{m[1]}[{m[2]}]({to})",
            prose,
        )
        return re.sub(r"<!--.*?-->\n?", "", moved, flags=re.DOTALL)

    pieces = _FENCE.split(text)
    return "".join(p if i % 2 else part(p) for i, p in enumerate(pieces))


# Flags.


def parsers() -> dict[str, Parser]:
    """Return the parser of every command except lm_eval, whose flags belong to lm-evaluation-harness."""
    from mars_jax.cli.commands import parser_of

    return {name: parser for name in _commands() if (parser := parser_of(name)) is not None}


def _commands() -> dict[str, str]:
    return importlib.import_module("mars_jax.cli.commands").COMMANDS


def flags_page() -> str:
    """Return the page that lists the flags of every command, as its parser defines them."""
    lines = [
        "# Flags",
        "",
        "This page is made from the parsers when the site is built. [Commands](commands.md) explains what the commands "
        "are for. `lm_eval` has the flags of lm-evaluation-harness.",
        "",
    ]
    for name, parser in parsers().items():
        lines += [f"## {name}", "", _escaped(" ".join((parser.description or "").split())), ""]
        lines += [*_tables(name, {"": parser}), *_tables(f"{name} ", parser.kinds())]
        if parser.epilog:
            lines += ["```text", parser.epilog.strip("\n"), "```", ""]
    return "\n".join(lines)


def _tables(command: str, parsers: Mapping[str, Parser]) -> list[str]:
    """Return a table for each group of flags. A group that several parsers share appears once."""
    names_by_table: dict[tuple[str, ...], list[str]] = {}
    for name, parser in parsers.items():
        for title, group in parser.groups().items():
            description = [_escaped(" ".join(group.description.split())), ""] if group.description else []
            rows = [_flag(action) for action in _actions(group) if action.help != argparse.SUPPRESS]
            table = (title, "", *description, "| flag | meaning |", "|---|---|", *rows, "")
            names_by_table.setdefault(table, []).append(name)
    lines = []
    for (title, *table), names in names_by_table.items():
        lines += [f"### {command}{', '.join(names)}: {title}", *table]
    return lines


def _actions(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    """Return the arguments of a group. Each subcommand counts as a separate argument."""
    actions = []
    for action in group._group_actions:
        actions += action._choices_actions if isinstance(action, argparse._SubParsersAction) else [action]
    return actions


def _flag(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else None
    if action.choices is not None and metavar is None:
        metavar = "{" + ",".join(map(str, action.choices)) + "}"
    value = "" if action.nargs == 0 else metavar or action.dest.upper()
    names = ", ".join(action.option_strings) or value
    usage = f"{names} {value}".strip() if action.option_strings else names
    text = (action.help or "") % {"default": action.default, "prog": ""}
    return f"| `{usage.replace('|', chr(92) + '|')}` | {_escaped(' '.join(text.split()))} |"


def _prose(text: str) -> str:
    """Return a comment as Markdown. Text between backquotes is treated as code."""
    return "`".join(_escaped(part) if i % 2 == 0 else part for i, part in enumerate(text.split("`")))


def _escaped(text: str) -> str:
    return re.sub(r"([*_<>|`\[\]])", r"\\\1", text)


# The Python API.


class Name(NamedTuple):
    """A name in the API reference: how users write it, and where it is defined."""

    shown: str
    home: str


REFERENCE = {
    "text to text": ("text", "[The tutorial](../tutorial.md) begins with these."),
    "the step in a program": ("step", "[The step in your own program](../embedding.md) explains these."),
    "your own model or drafter": (
        "protocols",
        "[Drafters](../drafters.md#writing-a-drafter) explains these.",
    ),
    "rules": ("rules", "[Rules](../rules.md) explains these."),
    "your own rule": ("own-rules", "[Writing a rule](../rules.md#writing-a-rule) explains these."),
    "drafters": ("drafters", "[Drafters](../drafters.md) explains these."),
    "kernels": ("kernels", "[Kernels](../kernels.md) explains these."),
    "errors, compilation, modules": ("modules", "Modules that are promised come first."),
    "rules and drafters of one paper each": (
        "contrib",
        "All of `mars_jax.contrib` may change in any version.",
    ),
}
"""Pages of the API reference: (file, first line) by purpose. docs/stability.md lists all purposes except the last."""


def promised() -> dict[str, list[str]]:
    """Return the public names in docs/stability.md, keyed by purpose."""
    text = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    rows = text[text.index("| use | names |") :].split("\n\n")[0].splitlines()[2:]
    cells = (row.strip("| ").split(" | ") for row in rows)
    return {purpose: re.findall(r"`([\w.]+)`", names) for purpose, names in cells}


def api_names() -> dict[str, list[Name]]:
    """Return the names in the API reference, keyed by purpose: the public names, then other exported names."""
    import mars_jax
    from mars_jax import contrib

    names = {
        purpose: [f if f.startswith("kernels_pallas.") else f"mars_jax.{f}" for f in row]
        for purpose, row in promised().items()
    }
    around = names["errors, compilation, modules"]  # modules have a different kind of entry
    around[:] = [name for name in around if name.rpartition(".")[2] not in mars_jax._MODULES]
    listed = {name for row in names.values() for name in row}
    for name in exported("mars_jax.verify"):
        if name not in listed:
            factory = f"mars_jax.verify.{name.rpartition('.')[2].lower()}"
            names["rules" if factory in listed and name != factory else "your own rule"].append(name)
    for purpose, package in (("drafters", "mars_jax.drafters"), ("kernels", "kernels_pallas")):
        names[purpose] += [name for name in exported(package) if name not in listed]
    top_level = [f"mars_jax.{name}" for name in mars_jax._HOME]
    names["your own model or drafter"] += [name for name in top_level if name not in listed]
    pages = {
        purpose: [Name(name, home_of(name)) for name in names[purpose]] for purpose in list(REFERENCE)[:-1]
    }
    of_papers = [Name(f"mars_jax.contrib.{n}", home.replace(":", ".")) for n, home in contrib._HOME.items()]
    for path in sorted((ROOT / "mars_jax/contrib/rules").glob("*.py")):
        rule = re.compile(r'^@register\("(\w+)".*\n(?:@.*\n)*class (\w+)', re.MULTILINE)
        for name, cls in rule.findall(path.read_text(encoding="utf-8")):
            of_papers.append(Name(f"mars_jax.contrib.{name}", f"mars_jax.contrib.rules.{path.stem}.{cls}"))
    return pages | {list(REFERENCE)[-1]: of_papers}


def exported(package: str) -> list[str]:
    """Return the names in the `__all__` of a package, without importing the package."""
    for node in _parsed(package).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [f"{package}.{name}" for name in ast.literal_eval(node.value)]
    raise ValueError(f"{package} has no __all__.")


def home_of(name: str) -> str:
    """Return where a name is defined, as MODULE.NAME, by following the imports in packages.

    >>> home_of("mars_jax.load"), home_of("mars_jax.verify.exact")
    ('mars_jax.hub.load.load', 'mars_jax.verify.exact.exact')
    """
    import mars_jax

    package, _, attribute = name.rpartition(".")
    if package == "mars_jax" and attribute in mars_jax._HOME:
        return home_of(f"mars_jax.{mars_jax._HOME[attribute]}.{attribute}")
    for node in _parsed(package).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == attribute:
                    return home_of(f"{node.module}.{alias.name}")
    return name


def _file(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _parsed(module: str) -> ast.Module:
    path = _file(module)  # absent for nested classes and for other packages' modules
    return ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")


def api_pages() -> dict[str, str]:
    """Return the pages that mkdocstrings fills with docstrings, keyed by their path on the site."""
    import mars_jax

    names = api_names()
    pages = {}
    for purpose, (page, introduction) in REFERENCE.items():
        lines = [f"# {purpose[0].upper()}{purpose[1:]}", "", introduction, ""]
        for name in names[purpose]:
            lines += [f"::: {name.home}", "    options:", f"      heading: {name.shown}", ""]
        pages[f"api/{page}.md"] = "\n".join(lines)
    documented = [name.home.rpartition(".") for row in names.values() for name in row]
    lines = []
    for name in sorted(mars_jax._MODULES.keys() - {"verify", "drafters"}, key=_is_later):
        home = f"mars_jax.{mars_jax._MODULES[name]}"
        # Leave out names that have an entry on another page.
        hidden = ["_.*", *sorted(attribute for module, _, attribute in documented if module == home)]
        filters = ", ".join(f'"!^{pattern}$"' for pattern in hidden)
        lines += [f"::: {home}", "    options:", f"      heading: mars_jax.{name}"]
        lines += [f"      filters: [{filters}]", ""]
    pages["api/modules.md"] += "\n".join(lines)
    return pages


def _is_later(module: str) -> tuple[bool, str]:
    return module not in promised()["errors, compilation, modules"], module  # public names come first


class Field(NamedTuple):
    """A field of a class: its name, its annotation, and the comment or docstring next to it."""

    name: str
    annotation: str
    meaning: str


def fields(home: str) -> list[Field]:
    """Return the fields of a class and of its bases in this repository, with those of the bases first.

    The meaning of a field is given by a comment after it or on the lines before it, by a docstring after it, or by the
    help text of its setting.

    >>> fields("mars_jax.verify.mars.Mars")[-1].name, fields("mars_jax.core.types.Verdict")[1]
    ('margin', Field(name='num_accepted', annotation='Array', meaning='i32[B]; edges walked'))
    """
    module, _, class_name = home.rpartition(".")
    by_name: dict[str, Field] = {}
    body = _parsed(module).body
    definition = next((n for n in body if isinstance(n, ast.ClassDef) and n.name == class_name), None)
    if definition is None:
        assignments = [n for n in body if isinstance(n, ast.Assign)]
        aliases = [n.value for n in assignments if ast.unparse(n.targets[0]) == class_name]
        return fields(f"{module}.{ast.unparse(aliases[0])}") if aliases else []
    for base in definition.bases:
        base_home = home_of(f"{module}.{base.id}") if isinstance(base, ast.Name) else ""
        if base_home.split(".")[0] == "mars_jax":
            by_name |= {field.name: field for field in fields(base_home)}
    lines = _file(module).read_text(encoding="utf-8").splitlines()
    for node, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        if isinstance(target, ast.Name) and not target.id.startswith("_"):
            annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            inherited = by_name.get(target.id, Field("", "", "")).meaning
            meaning = _meaning(node, following, lines) or inherited
            by_name[target.id] = Field(target.id, annotation, meaning)
        elif isinstance(node, ast.FunctionDef):
            by_name.pop(node.name, None)  # a property replaces the field of a base class
    return list(by_name.values())


def _meaning(node: ast.stmt, following: ast.stmt | None, lines: list[str]) -> str:
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return " ".join(str(following.value.value).split())
    last = lines[(node.end_lineno or 0) - 1]
    if "#" in last[node.end_col_offset or 0 :]:
        return last[node.end_col_offset or 0 :].partition("#")[2].strip()
    first = node.lineno - 1
    while lines[first - 1].lstrip().startswith("#"):
        first -= 1
    comment = " ".join(line.strip().lstrip("# ") for line in lines[first : node.lineno - 1])
    declared = getattr(node, "value", None)
    if comment or not isinstance(declared, ast.Call):
        return comment
    return next((str(ast.literal_eval(word.value)) for word in declared.keywords if word.arg == "help"), "")


def site_docstring(docstring: str, home: str) -> str:
    """Return a docstring as shown on the site, with examples as code blocks and a list of the fields of a class."""
    rows = [
        f"  {field.name} ({field.annotation or 'Any'}): {_prose(field.meaning)}" for field in fields(home)
    ]
    return "\n".join([fenced(docstring), *(["", "Attributes:", *rows] if rows else [])])


def fenced(docstring: str) -> str:
    """Return a docstring with its examples as code blocks, as shown on the site.

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


def notebook_page(name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook with its stored outputs as Markdown, and its pictures keyed by file name."""
    nbformat, nbconvert = (importlib.import_module(module) for module in ("nbformat", "nbconvert"))
    notebook = nbformat.read(ROOT / "colab" / f"{name}.ipynb", as_version=4)
    notebook.metadata["language_info"] = {"name": "python"}
    text, resources = nbconvert.MarkdownExporter().from_notebook_node(notebook, {"unique_key": name})
    return text, resources["outputs"]


def write(folder: Path) -> None:
    """Empty a folder, and write every page and picture into it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    address = repository()
    pages = {"flags.md": flags_page(), **api_pages()}
    of_docs = {f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md")}
    for source, page in (of_docs | FROM_ROOT).items():
        pages[page] = on_site((ROOT / source).read_text(encoding="utf-8"), source, address)
    (folder / "api").mkdir()
    (folder / "notebooks").mkdir()
    for path in (ROOT / "colab").glob("*.ipynb"):
        pages[f"notebooks/{path.stem}.md"], pictures = notebook_page(path.stem)
        for picture, data in pictures.items():
            (folder / "notebooks" / picture).write_bytes(data)
    for page, text in pages.items():
        (folder / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(PAGES)
