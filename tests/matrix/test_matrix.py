"""Every drafter and every rule on every surface, with what else there is to choose: a covering array of the tables."""

from __future__ import annotations

import itertools

import pytest

import mars_jax as mj
from mars_jax import specs, verify
from mars_jax.cli.generate.applies import check_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.job import open_job
from mars_jax.cli.generate.output_file import fingerprints
from mars_jax.cli.generate.prompts import from_texts
from mars_jax.core.errors import MarsError
from tests.matrix import cases
from tests.matrix.cases import DRAFTERS, RULES, SHAPES
from tests.matrix.drive import check
from tests.matrix.world import target, world

ALL = cases.cases()
FAST = cases.fast(6)


@pytest.mark.parametrize(
    "case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in ALL], ids=str
)
def test_a_combination_does_what_the_documents_say(case):
    check(case)


def test_every_pair_and_every_triple_of_drafter_rule_and_surface_is_driven():
    """As far as the tables allow it; a pair of settings is in some case where it is in any that is not refused."""
    driven = {(c.drafter, c.shape, str(rule), c.surface) for c in ALL for rule in c.rules}
    allowed = {
        (row.name, shape, str(rule), surface)
        for (row, shape), rule, surface in itertools.product(DRAFTERS, RULES, cases.SURFACES)
        if cases.refusal(row, shape, rule) is None
    }
    assert driven == allowed
    levels = [("surface", cases.SURFACES), *cases.OTHERS.items()]
    pairs = set().union(*(case.pairs() for case in ALL))
    for (a, one), (b, two) in itertools.combinations(levels, 2):
        for pair in itertools.product(((a, x) for x in one), ((b, y) for y in two)):
            if pair in pairs:
                continue
            assert dict(pair).get("mesh") == "data=2" and dict(pair).get("surface") in ("chat", "insert"), (
                pair
            )


def flags_of(drafter, shape, rule):
    argv = ["--target", world().target, "--draft", world().drafters[drafter], "--max-new-tokens", "8"]
    argv += [f"--{k.replace('_', '-')}={v}" for k, v in SHAPES[shape].items()]
    argv += ["--verify", world().rules[rule.row.name]]
    for name, value in rule.settings.items():
        argv += ["--rule-option", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    return argv


@pytest.mark.parametrize("drafter", list(dict.fromkeys(row.name for row, _ in DRAFTERS)))
def test_the_command_opens_what_the_tables_allow_and_refuses_the_rest(drafter):
    """Every rule with the drafter in each of its shapes, up to the first token."""
    opened = 0
    for (row, shape), rule in itertools.product(DRAFTERS, RULES):
        if row.name != drafter:
            continue
        argv = [*flags_of(drafter, shape, rule), "--json", "the sea"]
        why = cases.refusal(row, shape, rule)
        if why is None:
            args = parse(argv)
            check_flags(args, from_texts(["the sea"]))
            opened += 1
            continue
        with pytest.raises(MarsError, match=why):
            check_flags(parse(argv), from_texts(["the sea"]))
    assert opened


@pytest.mark.parametrize("drafter", [row.name for row in specs.DRAFTERS.values()])
def test_the_command_loads_every_drafter(drafter):
    [shape, *_] = [shape for row, shape in DRAFTERS if row.name == drafter]
    args = parse([*flags_of(drafter, shape, RULES[0]), "--output", "rows.jsonl", "the sea"])
    rows = from_texts(["the sea"])
    choices = check_flags(args, rows)
    job = open_job(args, choices, rows)
    assert {"target", "draft"} >= fingerprints(job.session, choices.draft).keys()
    assert job.session.drafter.drafter.num_nodes == 1 + (drafter != "none") * (
        job.session.drafter.drafter.num_nodes - 1
    )


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_loads_by_its_name(rule):
    made = verify.load(world().rules[rule.row.name], target("float32", None, None), **rule.settings)
    assert callable(made.rule) and mj.core.rules.lossless(made.rule) == rule.row.lossless
