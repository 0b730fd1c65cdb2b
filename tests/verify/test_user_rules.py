"""Rules that a program defines itself: which errors pass, and when two of them share a compiled program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import verify
from mars_jax.core import struct
from mars_jax.core.errors import MarsError
from mars_jax.core.rule import Rule, decide, structure
from mars_jax.core.tree import chain
from mars_jax.specs.own import find

EVIDENCE = verify.evidence(chain(jnp.asarray([[2, 0]], jnp.int32)), jnp.zeros((1, 2, 3)))


@struct.dataclass
class Raises(Rule):
    def __call__(self, evidence):
        raise ZeroDivisionError("no entropy")


def test_the_original_exception_of_a_rule_stays_reachable():
    with pytest.raises(
        MarsError, match=r"Raises fails in .*test_user_rules.py, line \d+: __call__ raised Zero"
    ) as error:
        jax.jit(decide)(Raises(), EVIDENCE)
    cause = error.value.__cause__
    assert isinstance(cause, ZeroDivisionError) and cause.args == ("no entropy",)


def test_errors_of_the_rules_of_this_package_pass_unchanged(monkeypatch):
    monkeypatch.setattr(Raises, "__module__", "mars_jax.verify.raises")
    with pytest.raises(ZeroDivisionError, match="no entropy"):
        decide(Raises(), EVIDENCE)


def test_an_annotation_that_cannot_be_evaluated_is_ignored(tmp_path):
    file = tmp_path / "gate.py"
    file.write_text("def gate(theta: 1 / 0 = 0.5): ...\n".replace("1 / 0", "'undefined.name(1 / 0)'"))
    assert find(f"{file}:gate").settings["theta"].default == 0.5


def classes():
    """Two rules with the same fields: one accepts every runner-up, the other none."""

    def defined(accepts):
        @struct.dataclass(kw_only=True)
        class Gate(verify.Relaxed):
            theta: Any

            def low(self, evidence):
                return jnp.full(evidence.tree.tokens.shape, accepts)

        return Gate

    return defined(True), defined(False)


def test_rules_of_different_classes_share_no_program_even_with_the_same_fields():
    """As where a notebook defines a class again; jaxlib takes the two for equal."""
    one, other = (kind(theta=np.float32(1)) for kind in classes())
    assert structure(one) != structure(other)
    assert structure(one) == structure(type(one)(theta=np.float32(2)))
