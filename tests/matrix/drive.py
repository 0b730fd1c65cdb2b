"""A case through its surface, and what must hold of every one of them."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np

import mars_jax as mj
from mars_jax import specs, verify
from mars_jax.core import decode
from mars_jax.core.rule import LoadedRule
from mars_jax.core.types import Visible
from mars_jax.serve.prepare import prepared
from tests.matrix.among import Among
from tests.matrix.cases import SHAPES, Case
from tests.matrix.world import target, world

PROMPTS = ("the sea", "a story of the sun, of the sun", "of a man", "t")
NEW = 12
BANNED = (261, 264, 265, 266, 271, 273)
"""Tokens that the target says often; each is several letters, so that a constraint can be met without them."""
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 23, "of"]}}, "required": ["a"]}
CONSTRAINTS: dict[str, Any] = {
    "regex": "(a|the) [a-e ,]{3,30}",
    "json_schema": SCHEMA,
    "choice": ["the sea", "the sun and a man", "a story"],
    "allowed_tokens": list(range(64, 80)),
}
PER_ROW = ("temperature", "strict", "relax_constrained", "seed", *CONSTRAINTS)
KINDS = ("free", "strict", "constrained", "strict and constrained")
COSTS = [1.0, 1.3, 1.6]
"""Of steps of each size where drafts are as long as pays: given, so that nothing depends on a clock."""


class Found(NamedTuple):
    """Of one prompt."""

    request: Any
    text: str
    tokens: tuple[int, ...]
    finish: str
    steps: int
    counts: tuple[Any, ...]
    log_probs: tuple[float, ...] | None


def of_completion(completion: Any) -> Found:
    m = completion.metrics
    counts = (m.proposed, m.accepted_exact, m.accepted_relaxed, m.accepted_trusted, tuple(m.depth_histogram))
    given = completion.log_probs
    return Found(
        completion.request,
        completion.text,
        tuple(completion.tokens),
        completion.finish_reason,
        m.steps,
        counts,
        None if given is None else tuple(given.log_prob),
    )


def options(case: Case) -> dict[str, Any]:
    """Return the options of `generate` for one prompt of each kind and rule."""
    kinds = [(rule, kind) for rule in case.rules for kind in KINDS]
    made: dict[str, Any] = {"max_new_tokens": NEW, "seed": [3 + i % 7 for i in range(len(kinds))]}
    made["temperature"] = [case.temperature * (i % 4 != 3) for i in range(len(kinds))]
    if case.edits == "bans":
        made["banned_tokens"] = list(BANNED)
    if case.edits == "penalties":
        made |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1}
    lossy = [not rule.row.lossless for rule, _ in kinds]
    if case.constraint:
        made[case.constraint] = [
            CONSTRAINTS[case.constraint] if "constrained" in kind else None for _, kind in kinds
        ]
        if any(lossy):
            made["relax_constrained"] = lossy
    if case.span and any(lossy):
        made[case.span] = "think" if case.span == "relax_in" else "code"
    if any(lossy) or case.row.trusts:
        made["strict"] = [
            "strict" in kind and (far or case.row.trusts) for (_, kind), far in zip(kinds, lossy, strict=True)
        ]
    if case.stop_strings and case.surface != "insert":  # the embedded step knows no texts
        made["stop_strings"] = ["nd", "qq"]
    return made


def prompts(case: Case) -> list[str]:
    return [PROMPTS[i % len(PROMPTS)] for i in range(len(KINDS) * len(case.rules))]


def target_of(case: Case) -> Any:
    return target(case.weights, case.cache, case.mesh)


def drafter_of(case: Case) -> Any:
    given = dict(SHAPES[case.shape])
    size = given.pop("draft_size", "fixed")
    if "tree" in given:
        given["tree"] = specs.parse_tree(given["tree"])
    loaded = mj.drafters.load(
        world().drafters[case.drafter], target_of(case), sample=case.drawn and case.row.samples, **given
    )
    return mj.drafters.sized(loaded, costs=COSTS) if size == "auto" else loaded


def rule_of(case: Case, which: Any = None) -> LoadedRule:
    """Return one rule made of all rules of the case.

    Each of them verifies one prompt of every kind, unless `which` has the number of the rule of each prompt.
    """
    found = [verify.load(world().rules[r.row.name], target_of(case), **r.settings) for r in case.rules]
    rows = np.repeat(np.arange(len(found)), len(KINDS)) if which is None else which
    needs = tuple(sorted({need for rule in case.rules for need in rule.needs}))
    made = Among(rules=tuple(one.rule for one in found), which=np.asarray(rows, np.int32), needs=needs)
    if len(found) == 1:  # a lossless rule alone is one
        return found[0]
    return LoadedRule(made, tuple(one.params for one in found))


def generated(case: Case, **more: Any) -> list[Found]:
    result = mj.generate(
        target_of(case),
        drafter_of(case),
        prompts(case),
        verify=rule_of(case),
        log_probs=case.log_probs,
        **options(case),
        **more,
    )
    return [of_completion(c) for c in result.completions]


@functools.lru_cache(maxsize=64)
def alone(case: Case) -> list[Found]:
    """The target alone, with the same requests: a batch of the same size for every case of the same settings."""
    result = mj.generate(
        target_of(case),
        "none",
        prompts(case),
        **{
            k: v
            for k, v in options(case).items()
            if k not in ("strict", "relax_constrained", "relax_in", "strict_in")
        },
    )
    return [of_completion(c) for c in result.completions]


# The surfaces, and what a case is compared with: the same requests, each batch started again. It runs the programs
# that the surface runs, since they take longer to compile than anything else does.

ROWS = 4
"""Of a batch in which prompts take turns."""


def generate(case: Case) -> list[Found]:
    """All prompts side by side, in one device loop."""
    return generated(case)


def backwards(case: Case) -> list[Found]:
    """All prompts side by side in the opposite order: no row depends on its neighbours."""
    texts = prompts(case)[::-1]
    rules = np.repeat(np.arange(len(case.rules)), len(KINDS))[::-1]
    given = {
        name: value[::-1] if name in PER_ROW and isinstance(value, list) else value
        for name, value in options(case).items()
        if name not in CONSTRAINTS or isinstance(value, list)
    }
    result = mj.generate(
        target_of(case),
        drafter_of(case),
        texts,
        verify=rule_of(case, rules),
        log_probs=case.log_probs,
        **given,
    )
    return [of_completion(c) for c in result.completions][::-1]


def refill(case: Case) -> list[Found]:
    """More prompts than rows."""
    return generated(case, batch_size=ROWS)


def by_batches(case: Case) -> list[Found]:
    """No row takes another prompt."""
    found: list[Found] = []
    loaded, drafter, rows = target_of(case), drafter_of(case), prompts(case)
    for begin in range(0, len(rows), ROWS):
        batch = [i % len(rows) for i in range(begin, begin + ROWS)]
        given = {
            k: [v[i] for i in batch] if k in PER_ROW and isinstance(v, list) else v
            for k, v in options(case).items()
        }
        rule = rule_of(case, [i // len(KINDS) for i in batch])
        result = mj.generate(
            loaded, drafter, [rows[i] for i in batch], verify=rule, log_probs=case.log_probs, **given
        )
        found += [of_completion(c) for c in result.completions]
    return found[: len(rows)]


def text(case: Case) -> list[Found]:
    """As it is said; what is told adds up to what was decoded."""
    said = ["" for _ in prompts(case)]
    found: dict[int, Found] = {}
    for event in mj.generate_stream(
        target_of(case),
        drafter_of(case),
        prompts(case),
        verify=rule_of(case),
        batch_size=ROWS,
        log_probs=case.log_probs,
        **options(case),
    ):
        if hasattr(event, "completion"):
            found[event.index] = of_completion(event.completion)
        else:
            said[event.index] += event.text
    for index, one in found.items():
        assert said[index] == one.text
    return [found[i] for i in range(len(said))]


def chat(case: Case) -> list[tuple[Found, Found]]:
    """The second turn of a conversation by each rule, with what is said where all of it is read again."""
    found = []
    for number in range(len(case.rules)):
        index = len(KINDS) * number + number % len(KINDS)
        given = {k: v[index] if k in PER_ROW and isinstance(v, list) else v for k, v in options(case).items()}
        given = {k: v for k, v in given.items() if v is not None} | {"temperature": case.temperature}
        if not given.keys() & CONSTRAINTS.keys():
            given.pop("relax_constrained", None)
        talk, afresh = (
            mj.Chat(target_of(case), drafter_of(case), verify=rule_of(case, number), **given)
            for _ in range(2)
        )
        talk.say("t")
        afresh.messages = talk.messages
        found.append(tuple(of_completion(one.say("the sea and the sun")) for one in (talk, afresh)))
    return found


def insert(case: Case) -> list[Found | None]:
    """Rows that come into a running state of the embedded step; None for those that were there."""
    count = len(prompts(case))
    rows = np.arange(0, count, 2, dtype=np.int32)

    def put(made, state):
        state, _ = decode.run(made.decoder, made.params, state, max_steps=jnp.int32(2))
        new = made.prompts(rows.tolist())
        return jax.jit(made.decoder.insert)(made.params, state, jnp.asarray(rows), new)

    found = _embedded(case, [*reversed(range(count))], put)
    return [one if row in rows else None for row, one in enumerate(found)]


def embedded(case: Case) -> list[Found]:
    """All rows from the start."""
    return _embedded(case, [*range(len(prompts(case)))], lambda made, state: state)


def _embedded(case: Case, first: list[int], then: Callable[[Any, Any], Any]) -> list[Found]:
    asked = mj.make_requests(target_of(case), prompts(case), **options(case))
    made = prepared(target_of(case), drafter_of(case), asked, verify=rule_of(case))
    with made.target.on_mesh():
        state = then(made, made.start(first))
        state, stats = decode.run(made.decoder, made.params, state, max_steps=jnp.int32(NEW))
    tokens, begins, lengths, steps = jax.device_get(
        (state.tokens, state.prompt_length, state.length, stats.steps)
    )
    return [
        Found(
            asked[row],
            "",
            tuple(tokens[row, begins[row] : lengths[row]].tolist()),
            "",
            int(steps[row]),
            (),
            None,
        )
        for row in range(len(asked))
    ]


# What must hold.


def check(case: Case) -> None:
    """Decode the case, and compare."""
    if case.surface == "chat":
        for said, again in chat(case):
            lawful(case, said)
            same(case, said, again)
        return
    drive, again = SURFACES[case.surface]
    again = again and again(case)
    for number, one in enumerate(drive(case)):
        if one is None:
            continue
        rule = case.rules[number // len(KINDS)]
        lawful(case, one)
        own = one.request.strict or (rule.row.lossless and not case.row.trusts)
        if own and (one.request.temperature == 0 or "q" not in rule.needs):
            same(case, one, alone(case)[number], counted=False)
        if again:
            same(case, one, again[number], counted=case.shape != "auto")
        teacher_forced(case, one)


SURFACES: dict[str, tuple[Callable[[Case], Any], Callable[[Case], list[Found]] | None]] = {
    "generate": (generate, backwards),
    "refill": (refill, by_batches),
    "text": (text, by_batches),
    "insert": (insert, embedded),
}


def lawful(case: Case, one: Found) -> None:
    """Nothing that is banned, and nothing that a constraint forbids."""
    assert one.tokens and one.finish != "failed", one
    if case.edits == "bans":
        assert not set(one.tokens) & set(BANNED), (one.tokens, BANNED)
    wanted = one.request.constraint
    if wanted is None:
        return
    said = one.text or target_of(case).decode([i for i in one.tokens if i])
    ended = one.finish == "stop" or one.tokens[-1] == 0
    if case.stop_strings and ended and one.tokens[-1] != 0:  # cut short by a text of its own
        return
    if case.constraint == "regex":
        pattern = CONSTRAINTS["regex"]
        assert re.fullmatch(pattern, said) if ended else re.match(r"a|t|$", said), said
    if case.constraint == "choice":
        choices = CONSTRAINTS["choice"]
        assert said in choices if ended else any(c.startswith(said) for c in choices), said
    if case.constraint == "json_schema":
        if ended:
            jsonschema.validate(json.loads(said), SCHEMA)
        else:
            assert said.startswith("{"), said
    if case.constraint == "allowed_tokens":
        assert set(one.tokens) <= {0, *CONSTRAINTS["allowed_tokens"]}, one.tokens


def same(case: Case, one: Found, other: Found, *, counted: bool = True) -> None:
    """Equal tokens, steps and counts; in low precision they may part where two tokens are nearly tied."""
    if one.tokens == other.tokens:
        if counted:
            slack = other.steps // 2 if case.shape == "auto" else 0
            assert abs(one.steps - other.steps) <= slack, ("steps", one, other)
            if one.counts and other.counts and not slack:
                assert one.counts == other.counts, ("counts", one, other)
        return
    # Where sums are rounded coarsely, or in another order over devices, two tokens that are nearly tied may change
    # places, and one text then goes on as another.
    assert case.weights != "float32" or case.cache is not None or case.mesh is not None, (
        "tokens",
        one,
        other,
    )


def teacher_forced(case: Case, one: Found) -> None:
    """Log-probabilities are those of one forward over the text."""
    if one.log_probs is None:
        return
    assert all(map(math.isfinite, one.log_probs))
    if case.weights != "float32" or case.cache is not None:
        return  # a forward without a cache of low precision is another one
    table = _log_softmax((*one.request.prompt_tokens, *one.tokens))
    begin = len(one.request.prompt_tokens) - 1
    wanted = [table[begin + i, token] for i, token in enumerate(one.tokens)]
    np.testing.assert_allclose(one.log_probs, wanted, atol=1e-3, rtol=0)


WIDTH = 64


def _log_softmax(ids: tuple[int, ...]) -> np.ndarray:
    made = target("float32", None, None)
    row = np.zeros((1, WIDTH), np.int32)
    row[0, : len(ids)] = ids
    return np.asarray(_forward(made.model, made.params, row))[0]


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, params, row):
    visible = Visible.causal(jnp.zeros((1,), jnp.int32), WIDTH)
    out = model.forward(params, row, visible, model.init_cache(1, WIDTH))
    return jax.nn.log_softmax(model.unembed(params, out.hidden).astype(jnp.float32))
