"""The layers of docs/design.md, and a light import."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mars_jax.core.drafter import Drafter

ROOT = Path(__file__).parent.parent

# The library, bottom to top: a module imports only from lines above its own, or from its own package.
LAYERS = [
    "utils",
    "core",
    "constraints",
    "models",
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
"""Rings that a ring may import. The library reaches the others by name, through `load_function` and `cli.commands`."""


def imported(path):
    """Yield the module of every import statement in a file, nested ones included."""
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
    """Return the paths of all modules by dotted name; `__init__` counts as its package."""
    paths = {}
    for top in ("mars_jax", "kernels_pallas"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            paths[name.removesuffix(".__init__")] = path
    return paths


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


def names_in(path):
    """Return the full dotted names that a file imports anywhere, also for type checkers."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_modules_import_each_other():
    paths = modules()
    imports = {}
    for name, path in paths.items():
        targets = {module if module in paths else module.rpartition(".")[0] for module in names_in(path)}
        imports[name] = targets & set(paths) - {name, "mars_jax"}
    while leaves := {name for name, targets in imports.items() if not targets}:
        imports = {name: targets - leaves for name, targets in imports.items() if name not in leaves}
    assert set(imports) <= {"mars_jax"}, "these modules are part of a cycle, or import from one"


def test_no_test_module_imports_another():
    """Code that several test modules use belongs to `tests/helpers`."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert [name for name in names_in(path) if re.match(r"tests\.(\w+\.)*test_", name)] == [], path


def test_every_module_has_a_layer_or_a_ring():
    parts = {part(f"{name}.") for name in modules() if name.startswith("mars_jax.")}
    assert parts == set(RANK) | (set(RINGS) - {"library"})


@pytest.mark.parametrize(("folder", "extra"), [("mars_jax/core", {"mars_jax"}), ("kernels_pallas", set())])
def test_core_and_kernels_import_little(folder, extra):
    allowed = {"jax", "numpy", "kernels_pallas", *extra, *sys.stdlib_module_names}
    for path in sorted((ROOT / folder).rglob("*.py")):
        assert {module.split(".")[0] for module in imported(path)} <= allowed, path


def test_import_is_light():
    code = """
import sys
import mars_jax
mars_jax.DraftTree, mars_jax.speculative_decoder
print(sorted({"transformers", "orbax", "optax", "flax", "torch", "matplotlib"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.strip() == "[]"


def test_functions_of_the_core_are_short():
    for path in (ROOT / "mars_jax" / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                statements = sum(isinstance(child, ast.stmt) for child in ast.walk(node))
                assert statements <= (25 if node.name == "_step" else 60), f"{path.name}: {node.name}"
    assert sum(not name.startswith("_") for name in dir(Drafter)) <= 16
