"""Lookup of test functions in source files, without importing them."""

import ast
import functools
from collections.abc import Sequence
from pathlib import Path


def find_test(path: Path, name: str) -> ast.FunctionDef | None:
    """Return the function of a test such as `test_it` or `TestClass::test_it`, including inherited ones, or None."""
    body = _parsed(path)
    *scope, function = name.split("::")
    bodies = [body]
    if scope:
        classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        if scope[0] not in classes:
            return None
        bases = [classes[base.id] for base in classes[scope[0]].bases if getattr(base, "id", "") in classes]
        bodies = [cls.body for cls in (classes[scope[0]], *bases)]
    for body in bodies:
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                return node
    return None


@functools.cache
def _parsed(path: Path) -> Sequence[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
