"""The layers of docs/design.md, and an import that stays light."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

from mars_jax.core.drafter import Drafter

ROOT = Path(__file__).parent.parent

# The library, bottom to top: a module imports only from lines above its own, or from its own package.
LAYERS = [
    "core assets",
    "specs",
    "constraints",
    "models",
    "placement",
    "verify hub",
    "drafters",
    "serve",
    "cli",
    "__main__",
    "generate",
]
RANK = {name: rank for rank, line in enumerate(LAYERS) for name in line.split()}
RINGS = {
    "library": {"library"},
    "contrib": {"library", "contrib"},
    "integrations": {"library", "integrations"},
    "lab": {"library", "contrib", "lab"},
}
"""Rings that a ring may import. The library reaches the others by name, through `specs.factory` and `cli.commands`."""


def imported(path):
    """(module, names) of every import statement in a file, nested ones included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}" if node.module == "mars_jax" else node.module


def part(module):
    return module.split(".")[1]


def ring(module):
    name = part(f"{module}.")
    return name if name in RINGS else "library"


def modules():
    """Paths of all modules but the packages' lists of names, by dotted name."""
    found = {}
    for top in ("mars_jax", "kernels_pallas"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def test_modules_of_the_library_import_only_from_the_layers_below():
    wrong = []
    for name, path in modules().items():
        if name == "mars_jax" or ring(name) != "library" or name.startswith("kernels_pallas"):
            continue
        for module in imported(path):
            if not module.startswith("mars_jax.") or part(module) in (part(name), "__version__"):
                continue
            if ring(module) == "library" and RANK[part(module)] >= RANK[part(name)]:
                wrong.append(f"{name} imports {module}")
    assert not wrong


def test_no_ring_imports_one_outside_of_it():
    wrong = [
        f"{name} imports {module}"
        for name, path in modules().items()
        if name.startswith("mars_jax.")
        for module in imported(path)
        if module.startswith("mars_jax.") and ring(module) not in RINGS[ring(name)]
    ]
    assert not wrong


def test_every_module_has_a_layer_or_a_ring():
    parts = {part(f"{name}.") for name in modules() if name.startswith("mars_jax.")}
    assert parts == set(RANK) | (set(RINGS) - {"library"})


def test_no_modules_import_each_other():
    """In no circle, imports for type checkers and those inside of functions included."""
    known = modules()
    steps = {}
    for name, path in known.items():
        tree = ast.parse(path.read_text())
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {one if one in known else node.module for one in full}
        steps[name] = found & set(known) - {name, "mars_jax"}
    while leaves := {name for name, found in steps.items() if not found}:
        steps = {name: found - leaves for name, found in steps.items() if name not in leaves}
    assert set(steps) <= {"mars_jax"}, "these import each other, or what does"


def test_core_is_what_people_embed():
    for path in sorted((ROOT / "mars_jax" / "core").rglob("*.py")):
        for module in imported(path):
            top = module.split(".")[0]
            allowed = ("jax", "numpy", "kernels_pallas", "mars_jax", "__future__")
            assert top in allowed or top in sys.stdlib_module_names, f"{path.name} imports {module}"


def test_no_file_name_stands_twice():
    names = Counter(path.stem for path in modules().values() if path.stem not in ("__init__", "__main__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_kernels_import_jax_and_nothing_else_from_outside():
    for path in (ROOT / "kernels_pallas").rglob("*.py"):
        for module in imported(path):
            top = module.split(".")[0]
            assert (
                top in ("jax", "kernels_pallas", "numpy", "__future__") or top in sys.stdlib_module_names
            ), path


def test_import_is_light():
    code = """
import sys
import mars_jax
mars_jax.DraftTree, mars_jax.speculative_decoder
print(sorted({"transformers", "orbax", "optax", "flax", "torch", "matplotlib"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.strip() == "[]"


def code_lines(source):
    """The numbers of the lines with code: no comments, no docstrings and no blank lines."""
    layout = {
        getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
    }
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return lines


def functions(path):
    """(name, lines) of every function in a file, docstrings and comments not counted."""
    source = path.read_text()
    held = code_lines(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield node, len(held & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))


def test_the_heart_is_read_in_an_hour():
    sizes = {
        f"{path.name}: {node.name}": lines
        for path in (ROOT / "mars_jax" / "core").rglob("*.py")
        for node, lines in functions(path)
    }
    assert [name for name, lines in sizes.items() if lines > 60] == []
    decoder = ROOT / "mars_jax" / "core" / "decoder.py"
    [(step, lines)] = [(node, n) for node, n in functions(decoder) if node.name == "_step"]
    branches = [
        n for n in ast.walk(step) if isinstance(n, ast.If | ast.IfExp | ast.For | ast.While | ast.Try)
    ]
    assert lines <= 30 and len(branches) <= 4
    assert len(Drafter._fields) <= 10


def test_what_a_rule_or_a_drafter_has_is_asked_in_one_place():
    """Of rules that derive from nothing of ours: `core.rule`."""
    asked = re.compile(r"(?:getattr|hasattr)\((?:\w+\.)*(?:rule|verify|drafter|base)\b")
    found = [
        f"{name}: {line.strip()}"
        for name, path in modules().items()
        if name != "mars_jax.core.rule"
        for line in path.read_text().splitlines()
        if asked.search(line)
    ]
    assert found == []


def test_no_test_module_imports_another():
    """Code that several test modules use belongs to `tests/helpers`."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            found = [module for module in modules if re.match(r"tests\.(\w+\.)*test_", module)]
            wrong += [f"{path.relative_to(ROOT)} imports {module}" for module in found]
    assert wrong == []
