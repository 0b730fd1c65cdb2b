"""Definitions of rules: their classes, the ends of ranges, conversions of values, and plugins."""

import importlib.metadata
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
from mars_jax import verify
from mars_jax.core import struct
from mars_jax.utils.plugins import GROUP
from mars_jax.utils.settings import Range
from mars_jax.verify import NEEDS, rules
from mars_jax.verify.relaxed import UNLIMITED_RUN
from tests.helpers.checkpoint_files import message


@pytest.mark.parametrize("name", rules())
def test_a_rule_describes_itself(name):
    rule = rules()[name]
    assert rule.help and set(rule.needs) <= set(NEEDS)
    assert rule.lossless != ("exact_prefix" in rule.settings)
    assert rule.lossless or rule.paper
    assert all(setting.help for setting in rule.settings.values())


@pytest.mark.parametrize("name", rules())
def test_values_to_try_are_in_range_and_in_order(name):
    for setting in rules()[name].settings.values():
        ranges = [setting.ranges] if isinstance(setting.ranges, Range) else setting.ranges.values()
        for limits in ranges:
            assert all(value in limits for value in limits.grid)
            assert list(limits.grid) in (sorted(set(limits.grid)), sorted(set(limits.grid), reverse=True))


def test_rules_are_named_after_their_class_and_base():
    for name, row in rules().items():
        if "weights" in row.needs or name == "simulated":  # its name includes its tau
            continue
        if "base" not in row.settings:
            assert verify.load(name).rule.name == name
            continue
        for base, rule_name in (("exact", name), ("rejection", f"{name} over rejection")):
            assert verify.load(name, base=base).rule.name == rule_name


def test_margins_are_those_of_the_kernels():
    assert list(rules()["mars"].settings["margin"].choices) == list(kernels_pallas.MARGINS)


def test_a_class_checks_its_settings_and_a_pytree_keeps_placeholders():
    rule = verify.mars(theta=[0.5, 0.9], exact_prefix=1)
    assert rule.theta.dtype == np.float32 and rule.exact_prefix.dtype == np.int32
    assert message(verify.mars, theta=1.5).startswith("theta is 1.5: expected a number above 0 and at most 1")
    named = jax.tree.map(lambda leaf: leaf.dtype.name, rule)
    assert (named.theta, named.max_relaxed_run, named.margin) == ("float32", "int32", "ratio")


def test_own_settings_come_before_inherited_ones():
    @struct.dataclass(kw_only=True)
    class Near(verify.Relaxed):
        nats: float = verify.setting(default=1.0, ranges=Range("at least 0", 0), help="how near")

    assert list(struct.settings_of(Near)) == ["nats", "base", "max_relaxed_run", "exact_prefix"]
    assert message(Near, nats=-1.0) == "nats is -1: expected at least 0."
    assert Near(base="rejection").base == verify.rejection()
    assert "the rules that near can relax" in message(Near, base=verify.mars())


def test_rules_of_other_packages_are_plugins(tmp_path, monkeypatch):
    """An unknown name loads the entry points of `mars_jax.plugins`."""
    (tmp_path / "half_rules.py").write_text(
        "from mars_jax import verify\n"
        "from mars_jax.core import struct\n\n"
        "@verify.register('half')\n"
        "@struct.dataclass(kw_only=True)\n"
        "class Half(verify.Relaxed):\n"
        "    'Accept the runner-up if it is half as likely.'\n"
        "    def low(self, evidence):\n"
        "        return evidence.stats.top1 - evidence.stats.top2 < 0.7\n"
    )
    about = tmp_path / "half_rules-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: half-rules\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[mars_jax.plugins]\nhalf = half_rules\n")
    code = "from mars_jax import verify\nassert 'half' not in verify.definition._RULES\n"
    code += "assert verify.load('half').rule.name == 'half' and 'fly' in verify.rules()"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_contrib_is_a_plugin():
    plugins = importlib.metadata.entry_points(group=GROUP)
    assert {"mars_jax.contrib.rules", "mars_jax.contrib.drafters"} <= {plugin.value for plugin in plugins}


@pytest.mark.parametrize(
    ("rule", "name", "value", "settings"),
    [
        ("mars", "theta", 1.0, {}),
        ("mars", "theta", math.inf, {}),
        ("mars", "theta", np.float32([0.5, 0.9]), {}),
        ("mars", "theta", jnp.asarray([2.0, math.inf]), {"margin": "gap"}),
        ("mars", "max_relaxed_run", UNLIMITED_RUN, {}),
        ("mars", "max_relaxed_run", np.asarray([0, 3]), {}),
        ("mars", "max_relaxed_run", 2.0, {}),
        ("mars", "block", True, {"base": "rejection"}),
        ("simulated", "tau", 1, {}),
    ],
)
def test_a_value_in_range_passes(rule, name, value, settings):
    rules()[rule].settle({name: value, **settings})


@pytest.mark.parametrize(
    ("rule", "name", "value", "settings", "expected"),
    [
        ("mars", "theta", 0.0, {}, "theta is 0: expected a number above 0 and at most 1 for the margin ratio, or inf"),
        ("mars", "theta", math.nan, {"margin": "gap"}, "theta is nan: expected a number above 0 for the margin gap"),
        ("mars", "theta", np.asarray([0.5, 1.5]), {}, "theta is 1.5"),
        ("mars", "theta", jnp.asarray([[0.5], [0.0]]), {}, "theta is 0"),
        ("mars", "theta", [0.5, "x"], {}, "theta is 'x'"),
        ("mars", "theta", True, {}, "theta is True"),
        ("mars", "max_relaxed_run", 1.5, {}, "max_relaxed_run is 1.5: expected a whole number"),
        ("mars", "max_relaxed_run", [0, -1], {}, "max_relaxed_run is -1"),
        ("mars", "margin", "wide", {}, "margin is 'wide': expected one of ratio, gap"),
        ("mars", "margin", ["ratio"], {}, "margin is ['ratio'] (did you mean ratio?): expected"),
        ("rejection", "block", [True], {}, "block is [True]: expected true or false"),
        ("mars", "theta", 0.9, {"margin": "wide"}, "margin is 'wide': expected one of ratio, gap"),
        ("mars", "tau", 2.0, {}, "the rule mars has no setting 'tau': it has theta, margin, base, max_relaxed_run"),
        ("exact", "theta", 0.9, {}, "the rule exact has no setting 'theta': it has none"),
        ("simulated", "tau", 0.5, {}, "tau is 0.5: expected a number of at least 1"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named(rule, name, value, settings, expected):
    assert message(rules()[rule].settle, {name: value, **settings}).startswith(expected)


def test_traced_values_are_not_checked():
    @jax.jit
    def build(theta):
        verify.mars(theta=theta)
        return theta

    assert build(2.0) == 2.0


def test_settled_settings_are_whole():
    assert rules()["mars"].settle({"margin": "gap", "theta": 1.5}) == {
        "theta": 1.5, "margin": "gap", "base": "exact", "max_relaxed_run": UNLIMITED_RUN, "exact_prefix": 0,
    }  # fmt: skip
    assert rules()["mars"].settle({"base": "rejection", "block": True})["block"] is True
    assert rules()["exact"].settle({}) == {}
    assert message(rules()["simulated"].settle, {}) == (
        "the rule simulated needs a tau: give a number of at least 1, the token that every step gives."
    )
    assert "no setting 'block'" in message(rules()["mars"].settle, {"block": True})


def test_definitions_are_json():
    rows = {name: rule.as_json() for name, rule in rules().items()}
    definitions = json.loads(json.dumps(rows, allow_nan=False))
    theta = next(s for s in definitions["mars"]["settings"] if s["name"] == "theta")
    assert theta["range_by"]["setting"] == "margin" and theta["range_by"]["gap"]["inf_included"]
    assert theta["range_by"]["ratio"] == {
        "expected": "a number above 0 and at most 1 for the margin ratio, or inf, which is strict",
        "low": 0, "high": 1, "low_included": False, "inf_included": True,
    }  # fmt: skip


def test_texts_and_json_become_values():
    theta = rules()["mars"].settings["theta"]
    assert theta.from_text("inf", margin="ratio") == math.inf
    assert theta.from_json(1, margin="ratio") == 1.0 and type(theta.from_json(1, margin="ratio")) is float
    assert "--theta is warm" in message(theta.from_text, "warm", shown="--theta", margin="gap")
    block = rules()["rejection"].settings["block"]
    assert block.from_text("true") is True and block.from_text("False") is False
    assert message(block.from_text, "yes") == "block is yes: expected true or false."
    run = rules()["mars"].settings["max_relaxed_run"]
    assert run.from_text("3") == 3
    assert "max_relaxed_run is 1.5" in message(run.from_text, "1.5")
    assert "max_relaxed_run is 2.0" in message(run.from_json, 2.0)


def test_a_number_beyond_float32_is_infinite():
    assert verify.typical(delta=1e308).delta == float("inf")
