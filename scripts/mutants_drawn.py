"""What scripts/mutants.py draws: small changes of the core by mutmut's operators, and the tests of each file."""

from __future__ import annotations

import ast
import collections
import difflib
import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("core", "verify", "drafters", "serve", "constraints")
SUITE, EXAMPLES, MATRIX = "tests/verify/test_rules.py", "tests/test_docstrings.py", "tests/matrix"
"""The first two have tests of each rule, and of each module's examples, under its name."""
OF_ALL = (EXAMPLES, "tests/test_public.py", "tests/test_specs.py")
"""Every room's."""


def tests_of(file: str) -> list[str]:
    """Those of every room, of its own, the matrix, and those of rooms of which a module imports it."""
    rooms = dict.fromkeys(name.split("/")[1].removesuffix(".py") for name in [file, *importers(file)])
    found = [path for room in rooms for path in (f"tests/{room}", f"tests/test_{room}.py")]
    found.insert(1, MATRIX)
    return [*OF_ALL, *(path for path in found if (ROOT / path).exists())]


def importers(file: str) -> list[str]:
    """Return the modules of the package that import a module, anywhere in their code."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = []
    for path in sorted((ROOT / "mars_jax").rglob("*.py")):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        if module in names and path != ROOT / "mars_jax" / "__init__.py":
            found.append(str(path.relative_to(ROOT)))
    return found


class Places(cst.CSTVisitor):
    """Everywhere an operator can change something that a test could notice."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[
            tuple[int, str, cst.CSTNode, cst.CSTNode]
        ] = []  # (line, operator, node, what it becomes)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Raise | cst.Import | cst.ImportFrom):
            return False
        if isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString | cst.ConcatenatedString):
            return False
        if (
            isinstance(node, cst.If)
            and isinstance(node.test, cst.Name)
            and node.test.value == "TYPE_CHECKING"
        ):
            return False
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                place: Any = self.get_metadata(PositionProvider, node)
                name = operator.__name__.removeprefix("operator_")
                self.found += [(place.start.line, name, node, made) for made in operator(node)]
        return True


class Mutant(NamedTuple):
    """One change of one file."""

    room: str
    file: str
    line: int
    operator: str
    module: cst.Module
    node: cst.CSTNode
    changed: cst.CSTNode

    @property
    def code(self) -> str:
        """The source that the file would have."""
        return cst.ensure_type(self.module.deep_replace(self.node, self.changed), cst.Module).code

    @property
    def compiles(self) -> bool:
        try:
            compile(self.code, self.file, "exec")
        except SyntaxError:
            return False
        return True

    def as_json(self, number: int) -> dict[str, Any]:
        """For the record."""
        lines = self.module.code.splitlines(), self.code.splitlines()
        diff = "\n".join(difflib.unified_diff(*lines, lineterm="", n=0)).partition("@@\n")[2]
        known = {"room": self.room, "file": self.file, "line": self.line, "operator": self.operator}
        return {"number": number} | known | {"diff": diff}


def mutants(room: str, file: str) -> list[Mutant]:
    """All of a file."""
    wrapper = MetadataWrapper(cst.parse_module((ROOT / file).read_text()), unsafe_skip_copy=True)
    places = Places()
    wrapper.visit(places)
    return [Mutant(room, file, line, name, wrapper.module, *both) for line, name, *both in places.found]


def draw(count: int, seed: int) -> list[Mutant]:
    """`count` mutants, as many of each room, and within it of each operator in turn."""
    rng, rooms = random.Random(seed), []
    for room in ROOMS:
        by_operator: dict[str, list[Mutant]] = collections.defaultdict(list)
        for path in sorted((ROOT / "mars_jax" / room).glob("*.py")):
            for one in mutants(room, str(path.relative_to(ROOT))):
                by_operator[one.operator].append(one)
        kinds = [rng.sample(by_operator[name], len(by_operator[name])) for name in sorted(by_operator)]
        rng.shuffle(kinds)
        rooms.append(list(_in_turn(kinds)))
    return list(itertools.islice((one for one in _in_turn(rooms) if one.compiles), count))


def _in_turn(lists: Sequence[Sequence[Any]]) -> Iterable[Any]:
    for turn in range(max(map(len, lists))):
        yield from (each[turn] for each in lists if turn < len(each))
