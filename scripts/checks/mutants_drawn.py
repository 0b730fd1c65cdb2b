"""Mutants for scripts/checks/mutants.py, made by mutmut's operators, and the tests to run for each file.

A room is a package of mars_jax, such as `core`.
"""

from __future__ import annotations

import ast
import collections
import difflib
import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

from scripts.common import ROOT

ROOMS = ("core", "verify", "drafters", "serve", "constraints")
SUITE, EXAMPLES, MATRIX = "tests/verify/test_rules.py", "tests/test_docstrings.py", "tests/matrix"
"""The tests in `SUITE` are named after rules, and those in `EXAMPLES` after modules."""
OF_ALL = (EXAMPLES, "tests/test_public.py", "tests/test_tables.py")
"""Tests that run for every mutant."""


def tests_of(file: str) -> list[str]:
    """Return the tests to run for a changed file.

    These are the tests that run for every mutant, the tests of the file's room, the tests in `MATRIX`, and the tests of
    the rooms that import the file.
    """
    rooms = dict.fromkeys(name.split("/")[1].removesuffix(".py") for name in [file, *importers(file)])
    paths = [path for room in rooms for path in (f"tests/{room}", f"tests/test_{room}.py")]
    paths.insert(1, MATRIX)
    return [*OF_ALL, *(path for path in paths if (ROOT / path).exists())]


def importers(file: str) -> list[str]:
    """Return the modules of the package that import a given module, anywhere in their code."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    files = []
    for path in sorted((ROOT / "mars_jax").rglob("*.py")):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        if module in names and path != ROOT / "mars_jax" / "__init__.py":
            files.append(str(path.relative_to(ROOT)))
    return files


class Places(cst.CSTVisitor):
    """A visitor that collects all changes that the operators can make, except those that no test could detect."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        # (line, operator, node, changed node)
        self.changes: list[tuple[int, str, cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Raise | cst.Import | cst.ImportFrom):
            return False
        if isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString | cst.ConcatenatedString):
            return False
        if isinstance(node, cst.If) and getattr(node.test, "value", "") == "TYPE_CHECKING":
            return False
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                place: Any = self.get_metadata(PositionProvider, node)
                name = operator.__name__.removeprefix("operator_")
                self.changes += [(place.start.line, name, node, changed) for changed in operator(node)]
        return True


class Mutant(NamedTuple):
    """One change to one file."""

    room: str
    file: str
    line: int
    operator: str
    module: cst.Module
    node: cst.CSTNode
    changed: cst.CSTNode

    @property
    def code(self) -> str:
        """The source of the file after the change."""
        return cst.ensure_type(self.module.deep_replace(self.node, self.changed), cst.Module).code

    @property
    def compiles(self) -> bool:
        try:
            compile(self.code, self.file, "exec")
        except SyntaxError:
            return False
        return True

    def as_json(self, number: int) -> dict[str, Any]:
        """Return the record of the mutant."""
        lines = self.module.code.splitlines(), self.code.splitlines()
        diff = "\n".join(difflib.unified_diff(*lines, lineterm="", n=0)).partition("@@\n")[2]
        place = {"room": self.room, "file": self.file, "line": self.line, "operator": self.operator}
        return {"number": number} | place | {"diff": diff}


def mutants(room: str, file: str) -> list[Mutant]:
    """Return all mutants of a file."""
    wrapper = MetadataWrapper(cst.parse_module((ROOT / file).read_text()), unsafe_skip_copy=True)
    places = Places()
    wrapper.visit(places)
    return [Mutant(room, file, line, name, wrapper.module, *both) for line, name, *both in places.changes]


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants: the same number from each room, cycling through the operators within a room."""
    rng, rooms = random.Random(seed), []
    for room in ROOMS:
        by_operator: dict[str, list[Mutant]] = collections.defaultdict(list)
        for path in sorted((ROOT / "mars_jax" / room).glob("*.py")):
            for mutant in mutants(room, str(path.relative_to(ROOT))):
                by_operator[mutant.operator].append(mutant)
        kinds = [rng.sample(by_operator[name], len(by_operator[name])) for name in sorted(by_operator)]
        rng.shuffle(kinds)
        rooms.append(list(_in_turn(kinds)))
    return list(itertools.islice((mutant for mutant in _in_turn(rooms) if mutant.compiles), count))


def _in_turn(lists: Sequence[Sequence[Any]]) -> Iterable[Any]:
    for turn in range(max(map(len, lists))):
        yield from (items[turn] for items in lists if turn < len(items))
