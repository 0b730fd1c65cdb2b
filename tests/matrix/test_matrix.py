"""Every drafter and every rule on every surface, with what else there is to choose: a covering array of the tables."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import pytest

import mars_jax as mj
from mars_jax import contrib, specs, verify
from mars_jax.cli.generate.applies import check_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.job import open_job
from mars_jax.cli.generate.output_file import fingerprints
from mars_jax.cli.generate.prompts import from_texts
from mars_jax.core import decode
from mars_jax.core.errors import MarsError
from mars_jax.serve.prepare import prepared
from tests.matrix import cases
from tests.matrix.cases import DRAFTERS, RULES, SHAPES
from tests.matrix.drive import CONSTRAINTS, check, drafter_of, target_of
from tests.matrix.world import target, world

ALL = cases.cases()
FAST = cases.fast(1)


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
        if cases.refusal(row, shape, rule) is None and cases.worth(row, rule)
    }
    assert driven == allowed
    levels = [("surface", cases.SURFACES), *cases.OTHERS.items()]
    pairs = set().union(*(case.pairs() for case in ALL))
    for (a, one), (b, two) in itertools.combinations(levels, 2):
        for pair in itertools.product(((a, x) for x in one), ((b, y) for y in two)):
            if pair in pairs:
                continue
            divides_rows = str(dict(pair).get("mesh")).startswith("data=2")
            assert divides_rows and dict(pair).get("surface") in ("chat", "insert"), pair


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
    named = {"target", "draft"} if specs.DRAFTERS[drafter].path else {"target"}
    assert fingerprints(job.session, choices.draft).keys() == named
    assert (job.session.drafter.drafter.num_nodes > 1) == (drafter != "none")


@pytest.mark.parametrize(
    ("row", "shape", "drawn"),
    [(row, shape, drawn) for row, shape in DRAFTERS for drawn in (False, True) if row.samples or not drawn],
    ids=lambda of: getattr(of, "name", str(of)),
)
def test_a_step_with_every_drafter_is_traced(row, shape, drawn):
    """In each of its shapes, drawn or constrained: its drafts are as many tokens as the rule gets."""
    lossy = verify.exact() if shape == "auto" else verify.mars(theta=0.5)
    rule = verify.rejection() if drawn else lossy
    case = next(c for c in ALL if (c.drafter, c.shape, c.drawn) == (row.name, shape, drawn))
    plain = dataclasses.replace(case, weights="float32", cache=None, mesh=None)
    given = {} if drawn else {"allowed_tokens": CONSTRAINTS["allowed_tokens"]}
    asked = mj.make_requests(target_of(plain), ["the sea"], max_new_tokens=8, temperature=0.7, **given)
    made = prepared(target_of(plain), drafter_of(plain), asked, verify=rule)
    state = decode.shapes(made.decoder, made.params, made.prompts([0]))
    after, info = jax.eval_shape(made.decoder.step, made.params, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    assert info.emitted.shape[0] == 1 and (info.emitted.shape[1] > 1) == (row.name != "none")


def entry_points():
    """The functions that take prompts for a pair, and the command."""

    def said(make):
        return lambda target, drafter, **given: list(make(target, drafter, ["the sea"], **given))

    def chat(target, drafter, **given):
        return mj.Chat(target, drafter, **given).say("the sea")

    def command(target, drafter, *, verify, **given):
        rule = verify.name.split()[0]
        argv = ["--target", world().target, "--draft", drafter, "--verify", rule, "--json", "the sea"]
        if rule == "simulated":
            argv += ["--rule-option", f"tau={verify.tau:g}"]
        for name, value in given.items():
            argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        args = parse(argv)
        return open_job(args, check_flags(args, from_texts(["the sea"])), from_texts(["the sea"]))

    of_prompts = {name: said(getattr(mj, name)) for name in ("generate", "generate_iter", "generate_stream")}
    return {**of_prompts, "Chat": chat, "command": command}


REFUSED = {
    "relax_in under exact": ("ngram", {"relax_in": "think"}, "in does not apply"),
    "spans under exact": ("ngram", {"strict_in": "code"}, "in does not apply"),
    "relaxed constraint under exact": (
        "ngram",
        {"regex": "a+", "relax_constrained": True},
        "relax.constrained does not apply",
    ),
    "strictness under exact": ("ngram", {"strict": True}, "strict does not apply"),
    "draft_stop of n-grams": ("ngram", {"draft_stop": 1.0}, "draft.stop does not apply"),
    "simulated tau of n-grams": ("ngram", {"verify": contrib.simulated(tau=2.0)}, "simulated does not apply"),
    "draft_stop under simulated tau": (
        "model",
        {"verify": contrib.simulated(tau=2.0), "draft_stop": 1.0},
        "draft.stop does not apply",
    ),
    "no new tokens": ("ngram", {"max_new_tokens": 0}, "max.new.tokens"),
    "a temperature below 0": ("ngram", {"temperature": -1.0}, "temperature"),
}


@pytest.mark.parametrize(
    ("entry", "what"),
    # In a command strict is a setting of a row, and no flag.
    [
        (entry, what)
        for entry in entry_points()
        for what in REFUSED
        if (entry, what[:6]) != ("command", "strict")
    ],
)
def test_what_is_refused_is_refused_by_every_entry_point(entry, what):
    drafter, given, sentence = REFUSED[what]
    with pytest.raises(MarsError, match=sentence):
        given = {"verify": verify.exact()} | given
        entry_points()[entry](target("float32", None, None), world().drafters[drafter], **given)
