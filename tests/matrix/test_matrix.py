"""Pairs of a drafter, a rule, a surface and a setting of the tables, chosen so that few cases cover nearly all."""

import dataclasses
import itertools

import jax
import pytest

import mars_jax as mj
from mars_jax import contrib, verify
from mars_jax.cli.generate.applies import check_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.job import open_job
from mars_jax.cli.generate.output import fingerprints
from mars_jax.cli.generate.prompts import from_texts
from mars_jax.core import decode
from mars_jax.drafters.registry import definition, definitions
from mars_jax.serve.prepare import prepared
from mars_jax.utils.errors import MarsError
from tests.matrix import cases
from tests.matrix.cases import DRAFTERS, RULES, SHAPES
from tests.matrix.drive import CONSTRAINTS, check, drafter_of, target_of
from tests.matrix.world import target, world

ALL = cases.cases()


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_combination_does_what_the_documents_say(case):
    check(case)


def flags_of(drafter, shape, rule):
    argv = ["--target", world().target, "--draft", world().drafters[drafter], "--max-new-tokens", "8"]
    argv += [f"--{k.replace('_', '-')}={v}" for k, v in SHAPES[shape].items()]
    argv += ["--verify", world().rules[rule.definition.name]]
    for name, value in rule.settings.items():
        argv += ["--rule-option", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    return argv


ROWS = from_texts(["the sea"])


@pytest.mark.parametrize("drafter", definitions())
def test_the_command_opens_what_the_tables_allow_and_refuses_the_rest(drafter):
    """Check the flags of every rule in each shape of the drafter, and load the drafter in its first shape."""
    shapes = [shape for row, shape in DRAFTERS if row.name == drafter]
    for shape, rule in itertools.product(shapes, RULES):
        args = parse([*flags_of(drafter, shape, rule), "--json", "the sea"])
        message = cases.refusal(definition(drafter), shape, rule)
        if message is None:
            check_flags(args, ROWS)
        else:
            with pytest.raises(MarsError, match=message):
                check_flags(args, ROWS)
    args = parse([*flags_of(drafter, shapes[0], RULES[0]), "--output", "rows.jsonl", "the sea"])
    choices = check_flags(args, ROWS)
    session = open_job(args, choices, ROWS).session
    named = {"target", "draft"} if definition(drafter).path else {"target"}
    assert fingerprints(session, choices.draft).keys() == named
    assert (session.drafter.drafter.num_nodes > 1) == (drafter != "none")


@pytest.mark.parametrize("name", definitions())
def test_a_step_with_every_drafter_is_traced(name):
    """Trace a constrained step in the drafter's first shape, with a sampled draft if the drafter has one.

    The step keeps the shapes of the state and emits drafted tokens. The slow cases decode in each shape.
    """
    row, shape = next(pair for pair in DRAFTERS if pair[0].name == name)
    rule = verify.rejection() if row.samples else verify.mars(theta=0.5)
    case = next(c for c in ALL if (c.drafter, c.shape, c.drawn) == (row.name, shape, row.samples))
    case = dataclasses.replace(case, weights="float32", cache=None, mesh=None)
    options = {"max_new_tokens": 8, "temperature": 0.7, "allowed_tokens": CONSTRAINTS["allowed_tokens"]}
    requests = mj.make_requests(target_of(case), ["the sea"], **options)
    ready = prepared(target_of(case), drafter_of(case), requests, verify=rule)
    state = decode.shapes(ready.decoder, ready.params, ready.prompts([0]))
    next_state, info = jax.eval_shape(ready.decoder.step, ready.params, state)
    shapes, next_shapes = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (state, next_state))
    assert next_shapes == shapes
    assert info.emitted.shape[0] == 1 and (info.emitted.shape[1] > 1) == (row.name != "none")


def by_function(name):
    def call(target, drafter, **options):
        return list(getattr(mj, name)(target, drafter, ["the sea"], **options))

    return call


def by_chat(target, drafter, **options):
    return mj.Chat(target, drafter, **options).say("the sea")


def by_command(target, drafter, *, verify, **options):
    argv = ["--target", world().target, "--draft", drafter, "--verify", verify.name.split()[0]]
    if verify.name.startswith("simulated"):
        argv += ["--rule-option", f"tau={verify.tau:g}"]
    for name, value in options.items():
        argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    args = parse([*argv, "--json", "the sea"])
    return open_job(args, check_flags(args, ROWS), ROWS)


ENTRY_POINTS = {name: by_function(name) for name in ("generate", "generate_iter", "generate_stream")}
ENTRY_POINTS |= {"Chat": by_chat, "command": by_command}
TAU = {"verify": contrib.simulated(tau=2.0)}
RELAXED = {"regex": "a+", "relax_constrained": True}
REFUSED = {
    "relax_in under exact": ("ngram", {"relax_in": "think"}, "in does not apply"),
    "relax_constrained under exact": ("ngram", RELAXED, "relax.constrained does not apply"),
    "strict under exact": ("ngram", {"strict": True}, "strict does not apply"),
    "draft_stop of n-grams": ("ngram", {"draft_stop": 1.0}, "draft.stop does not apply"),
    "simulated tau of n-grams": ("ngram", TAU, "simulated does not apply"),
    "draft_stop under simulated tau": ("model", TAU | {"draft_stop": 1.0}, "draft.stop does not apply"),
    "a temperature below 0": ("ngram", {"temperature": -1.0}, "temperature"),
}


@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_by_every_entry_point(entry, name):
    if (entry, name) == ("command", "strict under exact"):
        pytest.skip("the command has no such flag")
    drafter, options, message = REFUSED[name]
    options = {"verify": verify.exact()} | options
    with pytest.raises(MarsError, match=message):
        ENTRY_POINTS[entry](target("float32", None, None), world().drafters[drafter], **options)
