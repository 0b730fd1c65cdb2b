"""The layers of docs/design.md, and an import that stays light."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Bottom to top: a module imports only from lines above its own, or from its own package.
LAYERS = [
    "core assets",
    "specs pictures",
    "constraints",
    "models",
    "placement",
    "verify pretrained",
    "training hub bridge",
    "drafters",
    "serve",
    "evaluate planning tunix",
    "cli",
    "__main__ generate distill benchmark calibrate compounding lm_eval plan convert check",
]
RANK = {name: rank for rank, line in enumerate(LAYERS) for name in line.split()}


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


def test_modules_import_only_from_the_layers_below():
    wrong = []
    for path in sorted((ROOT / "mars_jax").rglob("*.py")):
        own = path.relative_to(ROOT / "mars_jax").with_suffix("").parts[0]
        if own == "__init__":
            continue
        for module in imported(path):
            if not module.startswith("mars_jax.") or part(module) == own or part(module) == "__version__":
                continue
            if RANK[part(module)] >= RANK[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_every_module_has_a_layer():
    parts = {
        p.relative_to(ROOT / "mars_jax").with_suffix("").parts[0] for p in (ROOT / "mars_jax").rglob("*.py")
    }
    assert parts - {"__init__"} == set(RANK)


def test_core_is_what_people_embed():
    for path in sorted((ROOT / "mars_jax" / "core").rglob("*.py")):
        for module in imported(path):
            top = module.split(".")[0]
            allowed = ("jax", "numpy", "kernels_pallas", "mars_jax", "__future__")
            assert top in allowed or top in sys.stdlib_module_names, f"{path.name} imports {module}"


def test_no_file_name_stands_three_times():
    names = Counter(
        p.name
        for top in ("mars_jax", "kernels_pallas")
        for p in (ROOT / top).rglob("*.py")
        if p.stem != "__init__"
    )
    assert [name for name, count in names.items() if count > 2] == []


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
