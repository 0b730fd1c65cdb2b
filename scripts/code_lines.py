"""Lines of code by ring and room: no docstrings, no comments, no blank lines.

python scripts/code_lines.py
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RINGS = ("contrib", "lab", "integrations")
IGNORED = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def docstrings(tree: ast.AST) -> set[int]:
    """The lines of strings that stand as statements: docstrings, of constants too."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def code_lines(source: str) -> set[int]:
    """The numbers of the lines that hold code.

    >>> sorted(code_lines('"of a module"\\n\\nx = (  # a comment\\n    1\\n)\\n'))
    [3, 4, 5]
    """
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in IGNORED:
            held |= set(range(token.start[0], token.end[0] + 1))
    return held - docstrings(ast.parse(source))


def by_room() -> Counter[str]:
    """Lines of code of every room, by "ring/room"."""
    found: Counter[str] = Counter()
    for top in ("mars_jax", "kernels_pallas"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts[1:]
            outside = top == "mars_jax" and parts[0] in RINGS
            ring = parts[0] if outside else "kernels" if top == "kernels_pallas" else "library"
            room = parts[1 if outside else 0] if len(parts) > (2 if outside else 1) else "."
            found[f"{ring}/{room}"] += len(code_lines(path.read_text(encoding="utf-8")))
    return found


def main() -> None:
    found = by_room()
    for ring in ("library", "kernels", *RINGS):
        rooms = {name: count for name, count in found.items() if name.startswith(f"{ring}/")}
        print(f"{ring}: {sum(rooms.values()):,}")
        for name, count in sorted(rooms.items(), key=lambda item: -item[1]):
            print(f"  {name.partition('/')[2]:<14}{count:>7,}")
    heart = sum(found[f"library/{room}"] for room in ("core", "verify", "specs"))
    print(f"core, verify and specs: {heart:,}")


if __name__ == "__main__":
    main()
