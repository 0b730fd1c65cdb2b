"""Dataclasses of `struct` compared with Flax's; the two can derive from each other."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import pytest

from mars_jax.core import struct


def make_rule(made_by):
    @made_by.dataclass
    class Rule:
        theta: jax.Array
        margin: str = made_by.field(pytree_node=False, default="ratio")
        nested: tuple = ()

    return Rule


def test_it_is_what_flax_makes():
    rules = [make_rule(by)(jnp.float32(0.9), "gap", (1, None, {"a": 2})) for by in (struct, flax.struct)]
    for view in (jax.tree.leaves, lambda tree: [str(path) for path, _ in jax.tree.leaves_with_path(tree)]):
        assert view(rules[0]) == view(rules[1])
    for rule in rules:
        assert jax.tree.map(lambda x: x, rule) == rule == rule.replace(margin="ratio").replace(margin="gap")
        assert jax.tree.structure(rule) != jax.tree.structure(rule.replace(margin="ratio"))
        assert jax.tree.structure(rule) == jax.tree.structure(rule.replace(theta=3))
        with pytest.raises(dataclasses.FrozenInstanceError):
            rule.theta = 1
        assert float(jax.jit(lambda r: r.theta * 2)(rule)) == pytest.approx(1.8)


@pytest.mark.parametrize(("base", "derived"), [(struct, flax.struct), (flax.struct, struct)])
def test_one_derives_from_the_other(base, derived):
    @derived.dataclass
    class Derived(make_rule(base)):
        entropy: float = 1.5

    instance = Derived(theta=0.9)
    assert jax.tree.leaves(instance) == [0.9, 1.5]
    assert jax.tree.structure(instance) != jax.tree.structure(instance.replace(margin="gap"))
