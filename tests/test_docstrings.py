"""The examples of docstrings are tests, and every public name has a docstring."""

import doctest
import importlib.util
import inspect
import pkgutil

import pytest

import kernels_pallas
import mars_jax
from tests.helpers import slow_but

MODULES = sorted(
    module.name
    for package in (mars_jax, kernels_pallas)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    # The adapter to a harness is nothing without that harness.
    if module.name not in ("mars_jax.integrations.harness", "mars_jax.lm_eval")
    or importlib.util.find_spec("lm_eval")
)


LONG = (
    "mars_jax.integrations.bridge",
    "mars_jax.core.decode",
    "mars_jax.core.extend",
    "mars_jax.lab.evaluate.benchmark.arms",
    "mars_jax.serve.chat",
    "mars_jax.contrib.rules.budget",
)
"""Modules whose examples decode; tests of their own hold what they show."""


@pytest.mark.parametrize("name", slow_but(MODULES, *(name for name in MODULES if name not in LONG)))
def test_examples_run(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_public_functions_and_classes_are_documented():
    bare = []
    for name in MODULES:
        module = importlib.import_module(name)
        for attribute, value in vars(module).items():
            ours = inspect.isfunction(value) or inspect.isclass(value)
            if (
                ours
                and not attribute.startswith("_")
                and value.__module__ == name
                and not inspect.getdoc(value)
            ):
                bare.append(f"{name}.{attribute}")
    assert not bare


def test_what_a_module_lists_is_there():
    for module in map(importlib.import_module, MODULES):
        if module.__name__ == "mars_jax.integrations.tunix" and importlib.util.find_spec("tunix") is None:
            continue  # its classes are made of Tunix's
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), f"{module.__name__}.{name}"
    for name in mars_jax.__all__:
        assert getattr(mars_jax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mars_jax.nothing
