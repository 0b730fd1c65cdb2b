"""What scripts/mutants.py draws: small changes of the core by mutmut's operators, and the tests of each file."""

from __future__ import annotations

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
CORE, KERNELS, VERIFY = "tests/core/test_{}.py", "tests/kernels/test_{}.py", "tests/verify/test_{}.py"
SUITE, EXAMPLES = VERIFY.format("rules"), "tests/test_docstrings.py"
"""They have a test of each rule, and of each module's examples, under its name."""
DIVIDED = (
    "tests/placement/test_shardings.py::test_sampling_from_a_divided_vocabulary_sends_a_few_numbers_per_node"
)

RULES = {  # the tests of a rule beside the suite that runs every rule
    "exact": ("exact",), "rejection": ("named", "rejection", "prefix_law"), "siblings": ("siblings",),
    "mars": ("mars",),
    "lossy": ("mars",), "relaxed": ("mars", "edges"), "released": ("distributions", "retargeted"),
    "simulated": ("simulated",), "context": ("context",), "diversed": ("diversed",), "learned": ("learned",),
    "equivalent": ("phrases",), "phrase": ("phrases",), "override": ("mars", "edges"), "named": ("named",),
    "lenience": ("distributions",), "mixture": ("distributions",), "cactus": ("distributions",),
    "speccascade": ("distributions",), "retargeted": ("retargeted", "distributions"), "drafted": ("context",),
}  # fmt: skip
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "rules": {
        f"mars_jax/verify/{path.stem}.py": (
            *(VERIFY.format(name) for name in RULES.get(path.stem, ("edges",))),
            *((CORE.format("spans"),) if path.stem in ("relaxed", "override", "lossy") else ()),
            "tests/test_specs.py",
            SUITE,
        )
        for path in sorted((ROOT / "mars_jax/verify").glob("*.py"))
        if path.stem != "__init__"
    },
    "tree": {"mars_jax/core/tree.py": (CORE.format("tree"), VERIFY.format("exact"), CORE.format("decode"))},
    "cache": {
        "mars_jax/core/cache.py": (CORE.format("cache"), "tests/models/test_int8_cache.py", CORE.format("decode"))
    },
    "sampling": {
        "mars_jax/core/sampling.py": (CORE.format("sampling"), DIVIDED, CORE.format("positions"),
                                      VERIFY.format("rejection")),
        "mars_jax/core/pick.py": (CORE.format("pick"), "tests/drafters/test_grow.py"),
    },
    "decode": {
        "mars_jax/core/decode.py": tuple(
            map(CORE.format, ("decode", "portable", "guide", "spans", "edits", "prefill", "stream", "positions"))
        ),
        "mars_jax/core/emit.py": tuple(map(CORE.format, ("edits", "positions", "decode", "guide", "spans"))),
    },
    "insert and refill": {
        "mars_jax/core/insert.py": (CORE.format("insert"), "tests/serve/test_queue.py"),
        "mars_jax/core/refill.py": (CORE.format("insert"), "tests/serve/test_queue.py"),
    },
    "rule of the kernels": {
        f"kernels_pallas/{name}.py": tuple(map(KERNELS.format, tests))
        for name, tests in {
            "reference": ("accept", "attention", "margin", "verify_mars"),
            "xla": ("margin", "attention", "largest", "accept"),
            "rule": ("accept", "verify_mars"),
            "stats": ("margin", "merge", "accept"),
        }.items()
    },
}  # fmt: skip
"""By group, the tests of each file."""


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

    group: str
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
        known = {"group": self.group, "file": self.file, "line": self.line, "operator": self.operator}
        return {"number": number} | known | {"diff": diff}


def mutants(group: str, file: str) -> list[Mutant]:
    """All of a file."""
    wrapper = MetadataWrapper(cst.parse_module((ROOT / file).read_text()), unsafe_skip_copy=True)
    places = Places()
    wrapper.visit(places)
    return [Mutant(group, file, line, name, wrapper.module, *both) for line, name, *both in places.found]


def draw(count: int, seed: int) -> list[Mutant]:
    """`count` mutants, as many of each group, and within it of each operator in turn."""
    rng, groups = random.Random(seed), []
    for group, files in GROUPS.items():
        by_operator: dict[str, list[Mutant]] = collections.defaultdict(list)
        for file in files:
            for one in mutants(group, file):
                by_operator[one.operator].append(one)
        kinds = [rng.sample(by_operator[name], len(by_operator[name])) for name in sorted(by_operator)]
        rng.shuffle(kinds)
        groups.append(list(_in_turn(kinds)))
    return list(itertools.islice((one for one in _in_turn(groups) if one.compiles), count))


def _in_turn(lists: Sequence[Sequence[Any]]) -> Iterable[Any]:
    for turn in range(max(map(len, lists))):
        yield from (each[turn] for each in lists if turn < len(each))
