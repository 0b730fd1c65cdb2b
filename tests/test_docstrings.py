"""Docstrings: their examples run as tests, every public name has one, and each begins with a verb or a noun."""

import ast
import doctest
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import kernels_pallas
import mars_jax
from tests.helpers import slow_but

MODULES = sorted(
    module.name
    for package in (mars_jax, kernels_pallas)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    # The adapter to a harness cannot be imported without that harness.
    if module.name not in ("mars_jax.integrations.harness", "mars_jax.lm_eval")
    or importlib.util.find_spec("lm_eval")
)


LONG = (
    "kernels_pallas.tree_attention.api", "mars_jax.core.decode", "mars_jax.core.decoder", "mars_jax.core.sampling",
    "mars_jax.core.types", "mars_jax.drafters.ngram", "mars_jax.integrations.bridge", "mars_jax.lab.training.data",
    "mars_jax.lab.evaluate.benchmark.arms", "mars_jax.lab.training.objectives", "mars_jax.serve.chat",
    "mars_jax.verify.exact", "mars_jax.verify.mixture", "mars_jax.verify.nucleus", "mars_jax.verify.rejection",
)  # fmt: skip
"""Modules whose examples compile or decode; other tests cover the content of these examples."""
FAST = [name for name in MODULES if name not in LONG and not name.startswith("mars_jax.contrib.")]


OPENINGS = {"Of", "What", "Whether", "How", "Where", "As"}
"""First words of a fragment. A docstring begins with a verb or a noun."""
WORDS = re.compile(r"\b(nobody|somebody|whoever|lest)\b", re.IGNORECASE)
"""Words that no engineer would use for a part of a program."""
ROOT = Path(__file__).parents[1]


def docstrings(tree):
    """Yield the line and the text of every docstring of a module, including those of constants and fields."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


@pytest.mark.parametrize("package", ["mars_jax", "kernels_pallas"])
def test_docstrings_begin_with_a_verb_or_a_noun(package):
    wrong = []
    for file in sorted((ROOT / package).rglob("*.py")):
        for line, text in docstrings(ast.parse(file.read_text(encoding="utf-8"))):
            if re.match(r"\W*(\w*)", text)[1] in OPENINGS or WORDS.search(text):
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}")
    assert not wrong


@pytest.mark.parametrize("name", slow_but(MODULES, *FAST))
def test_examples_run(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_public_functions_and_classes_are_documented():
    bare = []
    for name in MODULES:
        module = importlib.import_module(name)
        for attribute, value in vars(module).items():
            documentable = inspect.isfunction(value) or inspect.isclass(value)
            if not documentable or attribute.startswith("_") or value.__module__ != name:
                continue
            if not inspect.getdoc(value):
                bare.append(f"{name}.{attribute}")
    assert not bare


def test_what_a_module_lists_is_there():
    for module in map(importlib.import_module, MODULES):
        if module.__name__ == "mars_jax.integrations.tunix" and importlib.util.find_spec("tunix") is None:
            continue  # its classes derive from Tunix's
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), f"{module.__name__}.{name}"
    for name in mars_jax.__all__:
        assert getattr(mars_jax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mars_jax.nothing
