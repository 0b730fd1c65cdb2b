"""Rules, drafters, constraints and meshes together: in full on the fake model, by a covering array on the family.

Each batch mixes rows: constrained and free, greedy and drawn, strict and not. So a pair of a rule and a drafter, on a
device and on a mesh, meets every constraint and every kind of row.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import constraints, contrib, drafters, fake, specs, verify
from mars_jax.constraints.batch_tables import compiled
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.guide import Guides
from mars_jax.core.rule import facts
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from mars_jax.verify.retargeted import Retargeted
from tests.helpers import ragged
from tests.verify.test_rules import CASES, SMALL, TARGET, VOCAB

# What the fake model's tokens say; 1 ends a text.
PIECES = (None, None, b"a", b"b", b"c", b"ab", b"bc", b"abc", b" ", b"1", b"12", b"-", b"d")
STOP, BUFFER = 1, 40
VOCABULARY = constraints.Vocabulary(tokens=PIECES)
REGEX = constraints.regex(r"[ab]+-[ab1]{1,9}")
CHOICE = constraints.choice(["abcabcabc", "abcd"])
ALLOWED = constraints.tokens([2, 3, 4, 7])
TWO = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

DRAFTERS = {
    "ngram": drafters.ngram(4),
    "replay": contrib.replay(4),
    "chain": drafters.language_model(SMALL, 4),
    "static tree": drafters.language_model(SMALL, tree=(3, 2, 1)),
    "dynamic tree": drafters.language_model(SMALL, tree=drafters.Dynamic(top_k=3, depth=3, nodes=8)),
    "sampled chain": drafters.language_model(SMALL, 4, sample=True),
    "sampled tree": drafters.language_model(SMALL, tree=(2, 2), sample=True),
    "sampled dynamic tree": drafters.language_model(SMALL, tree=drafters.Dynamic(2, 3, 7), sample=True),
    "cascade": contrib.cascade(drafters.ngram(4), fake.hash_model(vocab_size=VOCAB, seed=6, agree=0.8), 12),
    "sprinter": contrib.sprinter(SMALL, 8),
}
WEIGHTS = {
    "replay": contrib.corpus([[2, 3, 4, 7, 8, 9, 2, 3, 5]], 64),
    "cascade": contrib.CascadeParams((), ()),
    "sprinter": contrib.SprinterParams((), jnp.zeros((1,)), jnp.float32(1.0)),
}
TRUSTING = ("cascade", "sprinter")
# A tree is a matter of the drafter here, and has no row of its own.
RULES = [name for name in CASES if not name.endswith("on trees")]


def takes(rule, drafter):
    """Whether a rule goes with the drafts of a drafter."""
    name = re.split(r"[ (]", CASES[rule].rule.name)[0]
    if name == "diversed" and drafter in (
        "ngram",
        "replay",
        *TRUSTING,
    ):  # whose drafts know nothing for its head
        return False
    chains = name == "block" or "chain" in specs.RULES[name].needs
    # What the draft's law is a part of asks what a tree was drawn from.
    drawn = isinstance(CASES[rule].rule, Retargeted)
    return not ("tree" in drafter and (chains or (drawn and "sampled" not in drafter)))


PAIRS = [pair for pair in itertools.product(RULES, DRAFTERS) if takes(*pair)]
# Each row: constraint, temperature, strict.
ROWS = (
    (None, 0.0, False),
    (None, 0.9, False),
    (REGEX, 0.0, False),
    (REGEX, 0.9, False),
    (None, 0.0, True),
    (REGEX, 0.0, True),
    (CHOICE, 0.9, False),
    (ALLOWED, 0.9, True),
)


def texts(drafter, weights, rule, params=(), *, order=None, mesh=None):
    """Tokens that each of `ROWS` got, in the order of `ROWS`, decoded in some order."""
    order = list(range(len(ROWS))) if order is None else order
    found = compiled([one for one, *_ in ROWS], VOCABULARY)
    tokens, lengths = ragged([1, 6, 12, 4, 9, 3, 2, 7], BUFFER, VOCAB)
    chosen = [ROWS[i] for i in order]
    made = make_controls(
        len(ROWS), limit=BUFFER, stop_tokens=(STOP,),
        temperature=[t for _, t, _ in chosen], strict=[s for *_, s in chosen],
    )  # fmt: skip
    made = made.replace(guides=Guides(constraint=found.rows([one for one, *_ in chosen])))
    decoder = decode.speculative_decoder(TARGET, drafter, rule, prefill_chunk=16)
    given = Params(target=(), draft=weights, verify=params, guides=Guides(constraint=found.tables))
    index = np.asarray(order)
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        keys = keys_from_seeds(jnp.asarray(index, jnp.uint32))
        state = decode.start(decoder, given, Prompts(tokens[index], lengths[index], made, rule, keys))
        state, _ = decode.run(decoder, given, state)
    rows = [
        row[n:m] for row, n, m in zip(state.tokens.tolist(), state.prompt_length, state.length, strict=True)
    ]
    return [rows[order.index(i)] for i in range(len(ROWS))]


@functools.cache
def autoregression():
    return texts(drafters.none(), (), verify.exact())


def holds(constraint, tokens):
    """Whether the tokens are what a constraint asks for, or begin it where the buffer was full."""
    said = b"".join(PIECES[t] or b"" for t in tokens)
    if constraint is ALLOWED:
        return {*tokens} <= {2, 3, 4, 7, STOP}
    ended = tokens[-1] == STOP or constraint.automaton.matches(said.decode())
    return constraint.automaton.matches(said.decode()) if ended else constraint.automaton.begins(said)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "drafter"), PAIRS, ids=[", ".join(pair) for pair in PAIRS])
def test_in_full_on_the_fake_model(rule, drafter):
    case = CASES[rule]
    do = functools.partial(texts, DRAFTERS[drafter], WEIGHTS.get(drafter, ()), case.rule, case.params)
    found, want = do(), autoregression()
    for tokens, (constraint, *_) in zip(found, ROWS, strict=True):
        assert constraint is None or holds(constraint, tokens)
    # Strict rows are what their base makes, which is the target's own text where nothing is drawn, and also where it is
    # if the base is `exact`.
    law = not isinstance(case.base, verify.Rejection)
    for i, (_, temperature, strict) in enumerate(ROWS):
        if strict and (temperature == 0 or law):
            assert found[i] == want[i], ROWS[i]
    # Whatever stands beside it, a row gets its own text; on a mesh too.
    backwards = list(range(len(ROWS)))[::-1]
    assert do(order=backwards) == found
    assert do(mesh=TWO) == found


# On the embedded family: each rule with each kind of draft, and meshes dealt out so that each meets each of both.
FAMILY = {
    "ngram": ("ngram", {"num_draft_tokens": 4}),
    "chain": ("model:tiny/draft", {"num_draft_tokens": 4}),
    "dynamic tree": ("model:tiny/draft", {"tree": drafters.Dynamic(top_k=3, depth=3, nodes=8)}),
    "sampled chain": ("model:tiny/draft", {"num_draft_tokens": 4, "sample": True}),
    "sampled tree": ("model:tiny/draft", {"tree": (2, 2), "sample": True}),
    "eagle tree": ("eagle:tiny/eagle3", {"tree": drafters.Dynamic(top_k=3, depth=3, nodes=8)}),
    "dflash": ("dflash:tiny/dflash", {}),
    "via_sd": ("via_sd:tiny/via_sd", {}),
}
MESHES = ("", "data=2", "model=2", "data=2,model=2")
NAMED = {"diversed": "diversed:tiny/diversed", "equivalent": "equivalent:case,space"}
SETTINGS = {"fly": {"window": 1}, "mars": {"theta": 0.7}}
WITHOUT = {"learned": "its head is nobody's to ship", "simulated": "its text means nothing"}


def dealt(pairs, meshes):
    """A mesh for each pair: the one that its rule and its drafter have met least."""
    met = {}
    for rule, drafter in pairs:
        best = min(meshes, key=lambda mesh: met.get((rule, mesh), 0) + met.get((drafter, mesh), 0))
        for one in (rule, drafter):
            met[one, best] = met.get((one, best), 0) + 1
        yield rule, drafter, best


def goes(rule, drafter):
    """Whether a rule of the table goes with the drafts of a drafter of `FAMILY`; see `takes`."""
    needs = specs.RULES[rule].needs
    if rule == "diversed" and "chain" not in drafter and drafter != "sampled tree":
        return False
    tree = "tree" in drafter or drafter == "dflash"
    return not (
        tree and ("chain" in needs or ("q" in needs and rule != "rejection" and "sampled" not in drafter))
    )


def covering():
    named = [name for name in specs.RULES if name not in WITHOUT]
    pairs = [(rule, drafter) for rule, drafter in itertools.product(named, FAMILY) if goes(rule, drafter)]
    return list(dealt(pairs, MESHES))


def test_each_rule_and_each_draft_meets_each_mesh():
    cases = covering()
    met = {(one, mesh) for rule, drafter, mesh in cases for one in (rule, drafter)}
    assert {rule for rule, *_ in cases} | set(WITHOUT) == set(specs.RULES)
    assert {(one, mesh) for one, mesh in itertools.product({*FAMILY}, MESHES)} <= met
    for rule in {rule for rule, *_ in cases}:
        had = [mesh for one, _, mesh in cases if one == rule]
        assert len(set(had)) == min(len(MESHES), len(had)), rule


TEXT = "Once upon a time, there was a"
STORY = constraints.regex(
    r" (little|big) (girl|boy|dog)( named [A-Z][a-z]{2,7})?\.( [A-Z][a-z ]{3,60}\.){1,3}"
)
SCHEMA = constraints.json_schema(
    {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
)
OPTIONS = {
    "prompt": [TEXT] * 6,
    "constraint": [None, None, STORY, SCHEMA, STORY, constraints.choice([" dog", " small dog"])],
    "temperature": [0.0, 0.8, 0.0, 0.8, 0.8, 0.0],
    "strict": [False, False, True, False, True, True],
    "seed": [3, 4, 5, 6, 7, 8],
    "max_new_tokens": 20,
}


@functools.cache
def family(mesh=""):
    return mj.load("tiny/target", dtype="float32", **({"mesh": mesh} if mesh else {}))


def written(target, drafter, rule, order=None):
    """The completions of the prompts, in their own order, decoded side by side in some order."""
    index = list(order or range(6))
    rows = {k: [v[i] for i in index] if isinstance(v, list) else v for k, v in OPTIONS.items()}
    lossless = rule is None or facts(rule.rule).lossless
    if lossless and not (rule and "trusts" in drafter.drafter.traits):
        del rows["strict"]
    if not lossless:  # it relaxes below a constraint where it is asked to
        rows["constraint"] = [
            c.relaxed() if c is not None and i == 3 else c
            for i, c in zip(index, rows["constraint"], strict=True)
        ]
    found = mj.generate(target, drafter, rows.pop("prompt"), verify=rule, batch_size=6, **rows)
    return [found.completions[index.index(i)] for i in range(6)]


@functools.cache
def family_alone():
    return [one.tokens for one in written(family(), "none", None)]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "drafter", "mesh"), covering(), ids=[", ".join(c) for c in covering()])
def test_each_rule_with_each_draft_on_the_family(rule, drafter, mesh):
    target = family(mesh)
    spec, options = FAMILY[drafter]
    made = drafters.load(spec, target, **options, **({"dtype": "float32"} if ":" in spec else {}))
    loaded = verify.load(NAMED.get(rule, rule), target, **SETTINGS.get(rule, {}))
    found, want = written(target, made, loaded), family_alone()
    for one, constraint in zip(found, OPTIONS["constraint"], strict=True):
        if constraint is not None:
            automaton = constraint.automaton
            assert automaton.begins(one.text.encode())
            assert one.finish_reason != "stop" or automaton.matches(one.text)
    law = loaded.rule.name == "exact" or getattr(loaded.rule, "base", None) == verify.exact()
    lossless = facts(loaded.rule).lossless and "trusts" not in made.drafter.traits
    for i, strict in enumerate(OPTIONS["strict"]):
        if (strict or lossless) and (law or OPTIONS["temperature"][i] == 0):
            assert found[i].tokens == want[i]
    again = written(target, made, loaded, order=(5, 3, 1, 4, 2, 0))
    assert [one.tokens for one in again] == [one.tokens for one in found]
