"""The tables: every row compared with its factory, ranges at their ends, and the strings that name rows."""

from __future__ import annotations

import inspect
import json
import math
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
from mars_jax import assets, hub, specs, verify
from mars_jax.hub.families import FAMILIES
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.specs import models
from tests.helpers.checkpoint_files import message
from tests.helpers.sources import find_test

ROOT = Path(__file__).resolve().parents[1]


def test_the_tables_do_not_load_jax():
    code = "import sys, mars_jax.specs; assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", specs.RULES)
def test_a_row_names_a_factory_and_only_what_it_takes(name):
    row = specs.rule(name)
    module, _, function = row.factory.partition(":")
    takes = inspect.signature(getattr(import_module(module), function)).parameters
    for setting in row.settings.values():
        assert setting.name in takes, setting.name
        default = takes[setting.name].default
        if default is not inspect.Parameter.empty and default is not None:
            assert default == setting.default, setting.name
    assert row.help and set(row.needs) <= set(specs.NEEDS)
    assert row.lossless != ("exact_prefix" in row.settings)
    assert row.lossless or row.paper


def test_theta_is_the_first_argument_of_every_rule_that_has_one():
    with_theta = [row for row in specs.RULES.values() if "theta" in row.settings]
    assert {"mars", "adaptive", "learned"} <= {row.name for row in with_theta}
    for row in with_theta:
        first = next(iter(inspect.signature(specs.factory(row.factory)).parameters.values()))
        assert (first.name, first.kind) == ("theta", inspect.Parameter.POSITIONAL_OR_KEYWORD), row.name


def test_a_rule_is_called_as_its_row_and_names_what_it_is_over():
    for name, row in specs.RULES.items():
        if "weights" in row.needs or name == "simulated":  # its name includes its tau
            continue
        rule = verify.load(name).rule
        if not row.lossless:
            with pytest.raises(TypeError, match="positional"):
                type(rule)(0.5)  # numbers must be passed by name
        if not row.bases:
            assert rule.name == name
            continue
        for base, shown in (("exact", name), ("rejection", f"{name} over rejection")):
            assert verify.load(name, base=base).rule.name == shown


def test_every_drafter_of_the_table_has_a_loader():
    assert all(callable(specs.factory(row.loader)) for row in specs.DRAFTERS.values())


def test_margins_are_those_of_the_kernels():
    assert list(specs.MARGINS) == list(kernels_pallas.MARGINS)


@pytest.mark.parametrize(
    ("rule", "name", "value", "chosen"),
    [
        ("mars", "theta", 1.0, {}),
        ("mars", "theta", math.inf, {}),
        ("mars", "theta", np.float32([0.5, 0.9]), {}),
        ("mars", "theta", jnp.asarray([2.0, math.inf]), {"margin": "gap"}),
        ("mars", "max_relaxed_run", np.asarray([0, specs.UNLIMITED_RUN]), {}),
        ("mars", "max_relaxed_run", 2.0, {}),
        ("mars", "block", True, {"base": "rejection"}),
        ("simulated", "tau", 1, {}),
    ],
)
def test_a_value_in_range_passes(rule, name, value, chosen):
    specs.check_setting(rule, name, value, **chosen)


@pytest.mark.parametrize(
    ("rule", "name", "value", "chosen", "expected"),
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
        ("mars", "tau", 2.0, {}, "the rule mars has no setting 'tau': it has base, margin, theta, max_relaxed_run"),
        ("exact", "theta", 0.9, {}, "the rule exact has no setting 'theta': it has none"),
        ("simulated", "tau", 0.5, {}, "tau is 0.5: expected a number of at least 1"),
        ("marz", "theta", 0.9, {}, "there is no rule 'marz' (did you mean mars?): choose one of exact"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named(rule, name, value, chosen, expected):
    assert message(specs.check_setting, rule, name, value, **chosen).startswith(expected)


def test_traced_values_are_not_checked():
    @jax.jit
    def build(theta):
        specs.check_setting("mars", "theta", [theta, theta])
        return theta

    assert build(2.0) == 2.0


def test_settled_settings_are_whole():
    chosen = {"margin": "gap", "theta": 1.5}
    defaults = {"base": "exact", "max_relaxed_run": specs.UNLIMITED_RUN, "exact_prefix": 0}
    assert specs.rule("mars").settle(chosen) == chosen | defaults
    assert specs.rule("mars").settle({"base": "rejection", "block": True})["block"] is True
    assert specs.rule("exact").settle({}) == {}
    text = message(specs.rule("simulated").settle, {})
    assert text.startswith("the rule simulated needs a tau: give a number of at least 1, ")
    assert "no setting 'block'" in message(specs.rule("mars").settle, {"block": True})


def test_tables_are_json():
    rows = [row.as_json() for row in (*specs.RULES.values(), *specs.DRAFTERS.values())]
    again = json.loads(json.dumps(rows, allow_nan=False))
    theta = next(s for s in again[2]["settings"] if s["name"] == "theta")
    ranges = theta["range_by"]
    assert ranges["setting"] == "margin" and ranges["gap"]["inf_included"]
    assert (ranges["ratio"]["low"], ranges["ratio"]["high"], ranges["ratio"]["low_included"]) == (0, 1, False)


def test_texts_and_json_become_values():
    theta = specs.rule("mars").settings["theta"]
    assert theta.from_text("inf", margin="ratio") == math.inf
    assert theta.from_json(1, margin="ratio") == 1.0 and type(theta.from_json(1, margin="ratio")) is float
    assert "--theta is warm" in message(theta.from_text, "warm", shown="--theta", margin="gap")
    block = specs.rule("rejection").settings["block"]
    assert block.from_text("true") is True and block.from_text("False") is False
    assert message(block.from_text, "yes") == "block is yes: expected true or false."
    run = specs.rule("mars").settings["max_relaxed_run"]
    assert run.from_text("3") == 3
    assert "max_relaxed_run is 1.5" in message(run.from_text, "1.5")
    assert "max_relaxed_run is 2.0" in message(run.from_json, 2.0)


@pytest.mark.parametrize(("kind", "path"), [("none", ""), ("model", "a/b"), ("eagle", "C:/heads")])
def test_drafts_are_named_by_kind_and_path(kind, path):
    draft = specs.parse_draft(f"{kind}:{path}".removesuffix(":"))
    assert draft == (kind, path) and draft.row.name == kind


@pytest.mark.parametrize("spec", ["", "ngram:", "ngram:3", "model", "model:", "eagel:x", "Model:x"])
def test_other_drafts_are_refused(spec):
    suggestion = {"eagel:x": " (did you mean eagle?)", "Model:x": " (did you mean model?)"}.get(spec, "")
    expected = f"--draft is {spec}{suggestion}: expected {specs.draft_words()}."
    assert message(specs.parse_draft, spec, shown="--draft") == expected


def test_drafts_may_be_narrowed():
    assert specs.draft_words().startswith("none, ngram, model:PATH, eagle:PATH, medusa:PATH, ")
    assert "expected ngram or model:PATH." in message(specs.parse_draft, "none", among=("ngram", "model"))
    assert specs.drafters_that("trees") == "model:PATH, eagle:PATH, medusa:PATH, dflash:PATH or self"


# Models by name.


@pytest.mark.parametrize("name", models.MODELS)
def test_a_model_is_what_its_row_says(name):
    """If the model is local or `plan` has its sizes, its config agrees with its row."""
    row = models.MODELS[name]
    assert row.family in FAMILIES and row.licence
    assert row.sha256 is None or (row.file and re.fullmatch("[0-9a-f]{64}", row.sha256))
    assert bool(row.repository) == (name not in assets.NAMES)
    here = not row.repository or (row.package and hub.is_here(name))
    config = hub.read_config(name) if here else CONFIGS.get(name)
    assert config is None or (config.family, config.vocab_size) == (row.family, row.vocabulary)


def test_every_draft_is_known_and_has_its_test_and_its_figure():
    found = models.pairs()
    for pair in found:
        draft = specs.parse_draft(pair.draft)
        row = models.MODELS[pair.target]
        small = models.MODELS.get(draft.path)
        assert (small is not None) == (draft.kind == "model")
        assert small is None or small.family.split("_")[0] == row.family.split("_")[0]
        assert small is not None or draft.row.head
        assert pair.loads in models.LOADS
        file, _, test = pair.test.partition("::")
        assert find_test(ROOT / "tests" / file, test), pair
    heads = {pair.draft.partition(":")[2] for pair in found} - set(models.MODELS)
    assert heads == set(models.HEADS)
    assert {(pair.target, pair.draft) for pair in found} >= set(models.FIGURES)
    for figure in models.FIGURES.values():
        tau, page = re.fullmatch(r"tau ([\d.]+), (.*)", figure).groups()
        assert f" {tau} " in (ROOT / page).read_text(encoding="utf-8").replace(";", " ")


def test_the_page_of_heads_is_the_table():
    page = (ROOT / "docs" / "heads.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (.+?) \| (yes|alike) \|$", page, re.MULTILINE)
    expected = [
        (models.MODELS[pair.target].repository, pair.draft.partition(":")[2], pair.layout, pair.loads)
        for pair in models.pairs()
        if pair.draft.partition(":")[2] not in models.MODELS and pair.loads != "runs"
    ]
    assert sorted(rows) == sorted(expected)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("qwen3-8b", "qwen3-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("/data/Qwen3-8B/", "qwen3-8b"),
        ("/data/Qwen3-8B-Q4_K_M.gguf", "qwen3-8b"),
        ("~/hub/models--Qwen--Qwen3-8B/snapshots/0123abc", "qwen3-8b"),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b"),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "qwen2.5-coder-1.5b"),
        ("tiny/target", "tiny/target"),
        ("Qwen/Qwen3-8B-Base", None),
        ("/data/qwen3-80b.gguf", None),
        ("/mine/target", None),
        ("", None),
    ],
)
def test_a_target_is_known_by_name_repository_and_path(name, target):
    assert models.drafts_for(name) == (models.MODELS[target].drafts if target else ())
    assert {pair.target for pair in models.pairs(name)} == ({target} if target else set())
