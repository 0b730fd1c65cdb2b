"""Rules that users define: error handling, and when two of them share a compiled program."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters, verify
from mars_jax.core import struct, trusted
from mars_jax.core.rule import LoadedRule, Rule, decide, structure
from mars_jax.core.tree import chain
from mars_jax.serve.prepare import _check_rule
from mars_jax.serve.requests import Request
from mars_jax.utils.errors import MarsError
from mars_jax.verify.own import find, is_own
from tests.helpers import slow_but


@functools.cache
def two_nodes():
    return verify.evidence(chain(jnp.asarray([[2, 0]], jnp.int32)), jnp.zeros((1, 2, 3)))


@struct.dataclass
class Raises(Rule):
    def __call__(self, evidence):
        raise ZeroDivisionError("no entropy")


@pytest.mark.parametrize("spec", ["C:/rules/gates.py:entropy_gate", "a:b/gates.py:entropy_gate"])
def test_the_name_of_a_rule_follows_the_last_colon(spec):
    assert is_own(spec) and not is_own(spec.rpartition(":")[0] + ":")
    with pytest.raises(MarsError, match=r"gates\.py"):
        find(spec)


def test_the_original_exception_of_a_rule_stays_reachable():
    expected = r"Raises fails in .*test_user_rules.py, line \d+: __call__ raised Zero"
    with pytest.raises(MarsError, match=expected) as error:
        jax.jit(decide)(Raises(), two_nodes())
    cause = error.value.__cause__
    assert isinstance(cause, ZeroDivisionError) and cause.args == ("no entropy",)


def test_errors_of_the_rules_of_this_package_pass_unchanged(monkeypatch):
    monkeypatch.setattr(Raises, "__module__", "mars_jax.verify.raises")
    with pytest.raises(ZeroDivisionError, match="no entropy"):
        decide(Raises(), two_nodes())


def broken(name, body):
    """Return a rule over edges with one overridden method."""
    methods = {"low": lambda self, evidence: jnp.ones(evidence.tree.tokens.shape, bool), name: body}
    return struct.dataclass(type("Gate", (verify.Relaxed,), {"__module__": __name__} | methods))()


@pytest.mark.parametrize(
    ("method", "value", "sentence"),
    [
        ("strict_edges", jnp.zeros((1,)), r"float32\[1\]; expected int32\[1\]"),
        ("strict_edges", jnp.zeros((2,), jnp.int32), r"int32\[2\]; expected int32\[1\]"),
        ("guarded", jnp.zeros((1, 2)), r"float32\[1, 2\]; expected bool\[1, 2\]"),
        ("guarded", None, r"None; expected bool\[1, 2\]"),
    ],
)
def test_a_wrong_result_names_the_method_and_the_expected_result(method, value, sentence):
    with pytest.raises(MarsError, match=rf"^the rule Gate fails in .*: {method} returned {sentence}\.$"):
        decide(broken(method, lambda self, evidence: value), two_nodes())


def test_a_retargeted_rule_needs_a_method_target():
    with pytest.raises(MarsError, match="defines no target: give it a method target"):
        decide(verify.Retargeted(), two_nodes())


@pytest.mark.parametrize("method", slow_but(["low", "relaxable"], "relaxable"))
def test_edges_with_dimensions_of_size_1_are_broadcast(method):
    evidence = verify.evidence(chain(jnp.asarray([[2, 0], [1, 0]], jnp.int32)), jnp.zeros((2, 2, 3)))
    full, *rows_of_one = (
        jax.jit(decide)(broken(method, lambda self, e, shape=shape: jnp.ones(shape, bool)), evidence)[0]
        for shape in ((2, 2), (1, 1), (1, 2), (2, 1))
    )
    for verdict in rows_of_one:
        jax.tree.map(np.testing.assert_array_equal, verdict, full)


def failing(name):
    """Return a function of this name that raises an error."""
    namespace: dict[str, Any] = {}
    source = f"def {name}(self, *arguments): raise ZeroDivisionError"
    exec(compile(source, __file__, "exec"), globals(), namespace)
    return namespace[name]


ATTRIBUTES = {"needs": "a tuple of strings", "name": "a string", "check_drafter": "None"}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_raises_gets_one_sentence_with_its_cause(name):
    attribute = failing(name) if name == "check_drafter" else property(failing(name))
    # The error for a request with `strict` contains the name of the lossless rule.
    fields = {"__module__": __name__, "lossless": name == "name", name: attribute}
    kind = struct.dataclass(type("Gate", (verify.Relaxed,), fields))
    requests = [Request(prompt="", prompt_tokens=(1,), strict=True)]
    expected = rf"{name} raised Zero.*; expected {name} to return {ATTRIBUTES[name]}\.$"
    with pytest.raises(MarsError, match=f"^the rule Gate fails in .*: {expected}") as error:
        _check_rule(LoadedRule(kind()), drafters.ngram(2), requests)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_strict_edges_of_a_rule_with_trusted_drafts_gets_one_sentence():
    tree = dataclasses.replace(two_nodes().tree, trusted=jnp.ones((1, 2), bool))
    evidence = dataclasses.replace(two_nodes(), tree=tree)
    expected = r"^the rule Gate fails in .*: strict_edges raised .* to return i32\[B\]\.$"
    with pytest.raises(MarsError, match=expected):
        trusted.judge_after_trusted(broken("strict_edges", failing("strict_edges")), evidence)
    with pytest.raises(MarsError, match=r"strict_edges returned float32\[1\]; expected int32\[1\]"):
        trusted.judge_after_trusted(broken("strict_edges", lambda self, evidence: jnp.zeros((1,))), evidence)


def test_an_annotation_that_cannot_be_evaluated_is_ignored(tmp_path):
    file = tmp_path / "gate.py"
    file.write_text("def gate(theta: 1 / 0 = 0.5): ...\n".replace("1 / 0", "'undefined.name(1 / 0)'"))
    assert find(f"{file}:gate").settings["theta"].default == 0.5


def classes():
    """Return two rule classes with the same fields: one accepts every runner-up, the other none."""

    def defined(accepts):
        @struct.dataclass(kw_only=True)
        class Gate(verify.Relaxed):
            theta: Any

            def low(self, evidence):
                return jnp.full(evidence.tree.tokens.shape, accepts)

        return Gate

    return defined(True), defined(False)


def test_rules_of_different_classes_share_no_program_even_with_the_same_fields():
    """A notebook may define a class twice; jaxlib considers the two equal."""
    first, second = (kind(theta=np.float32(1)) for kind in classes())
    assert structure(first) != structure(second)
    assert structure(first) == structure(type(first)(theta=np.float32(2)))
