"""Decode 1,000 constrained texts by every draft and rule, and hold each against Python's `re` or `jsonschema`.

    python scripts/constraint_texts.py --output scripts/results/constraint_texts.json

Rules and drafters of the tables below meet in an array: every rule once, along chains and on trees in turns, and every
draft at least once; the full product is on the fake model, in tests/test_combinations.py. A pair decodes a batch of 40
rows on the embedded family: 8 constraints, a third of the texts at temperature 0 and the others at 1, and of every
three texts two let a lossy rule relax inside of them. A finished text has to match as a whole by Python's `re` or
`jsonschema`, one that the limit cuts has to be a prefix of a match, for patterns by the package regex. A file that is
there is gone on with.

Then JSON at temperature 0, with forced text drafted and without, over the prompts below: tau of both, paired by prompt,
with an interval by a bootstrap over prompts. And mars with its margins on and off inside of JSON and of arithmetic
answers: how many texts are whole, how many values differ, and how many answers are right.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mars_jax as mj
from mars_jax import constraints, verify
from mars_jax.constraints.compiled import compiled
from mars_jax.core.guide import Guides
from mars_jax.serve.prepare import prepared
from mars_jax.serve.queue import Queue
from mars_jax.serve.requests import Completion, Request

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "favourite_animal": {"enum": ["cat", "dog", "bird", "fish"]},
    },
    "required": ["first_name", "age", "favourite_animal"],
}
LIST = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": 10},
    "minItems": 2,
    "maxItems": 3,
}
OPTIONAL = {
    "type": "object",
    "properties": {
        "day": {"type": "string", "format": "date"},
        "sunny": {"type": "boolean"},
        "note": {"type": ["string", "null"], "maxLength": 16},
    },
    "required": ["sunny"],
}
CONSTRAINTS: dict[str, constraints.Constraint] = {
    "date": constraints.regex(r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"),
    "sentence": constraints.regex(r" ?[A-Z][a-z]+( [a-z]{1,9}){2,6}\."),
    "list of words": constraints.regex(r"([a-z]{2,8}, ){1,4}and [a-z]{2,8}"),
    "sum": constraints.regex(r"[1-9][0-9]? \+ [1-9][0-9]? = [1-9][0-9]{0,2}"),
    "choice": constraints.choice(["the cat", "the dog", "a bird", "the cat and the dog"]),
    "person": constraints.json_schema(PERSON),
    "list": constraints.json_schema(LIST),
    "optional fields": constraints.json_schema(OPTIONAL, compact=True),
}
Rule = tuple[str, dict[str, Any]]
SCHEMAS = {"person": PERSON, "list": LIST, "optional fields": OPTIONAL}
TREE = mj.drafters.Dynamic(4, 3, 12)
Draft = tuple[str, dict[str, Any]]
MODEL, EAGLE, BLOCK = "model:tiny/draft", "eagle:tiny/eagle3", "dflash:tiny/dflash"
SHAPES: dict[str, tuple[Draft, ...]] = {
    "chain": (
        (MODEL, {"num_draft_tokens": 4}),
        ("ngram", {}),
        (EAGLE, {"num_draft_tokens": 4}),
        (BLOCK, {"num_draft_tokens": 4}),
    ),
    "tree": (
        (MODEL, {"tree": TREE}),
        (MODEL, {"tree": (3, 2, 1)}),
        (EAGLE, {"tree": TREE}),
        (BLOCK, {"tree": TREE}),
    ),
    "sampled chain": (
        (MODEL, {"num_draft_tokens": 4, "sample": True}),
        (EAGLE, {"num_draft_tokens": 4, "sample": True}),
        (BLOCK, {"num_draft_tokens": 4, "sample": True}),
    ),
    "sampled tree": ((MODEL, {"tree": (2, 2), "sample": True}), (EAGLE, {"tree": TREE, "sample": True})),
}
"""The shapes of drafts, and of each the drafters that take turns."""
EDGES: dict[str, Rule] = {
    "exact": ("exact", {}),
    "mars": ("mars", {"theta": 0.8}),
    "mars (gap)": ("mars", {"margin": "gap", "theta": 1.0}),
    "topk": ("topk", {}),
    "typical": ("typical", {}),
    "adaptive": ("adaptive", {}),
    "entropy_gate": ("entropy_gate", {}),
    "fly": ("fly", {"window": 1}),
    "phrase": ("phrase", {"window": 1, "bound": 2.0}),
    "equivalent": ("equivalent:case,space", {}),
    "budget": ("budget", {}),
}
"""Rules over `exact`, for drafts of chains and of trees."""
LAWS: dict[str, Rule] = {
    "rejection": ("rejection", {}),
    "mars over rejection": ("mars", {"base": "rejection", "theta": 0.8}),
    "nucleus": ("nucleus", {}),
    "lenience": ("lenience", {}),
    "mixture": ("mixture", {}),
    "diversed": ("diversed:tiny/diversed", {}),
    "speccascade": ("speccascade", {}),
    "block": ("rejection", {"block": True}),
    "cactus": ("cactus", {}),
    "released": ("released", {}),
}
"""Rules of distributions, for sampled drafts; the last three for chains alone."""
CHAINS_ALONE = ("block", "cactus", "released")
OTHERS: tuple[tuple[Draft, str], ...] = (
    (("none", {}), "exact"),
    (("ngram", {}), "rejection"),
    (("trispec:tiny/trispec", {}), "mars"),
    (("via_sd:tiny/via_sd", {}), "exact"),
    (("sprinter:tiny/sprinter", {}), "mars"),
)
"""Drafters that are outside of the table: no draft, and those that vouch for their own."""
RULES = EDGES | LAWS
ANSWER = constraints.regex(r"([^#\n]{1,120}\n){1,4}#### [1-9]?[0-9]{1,3}")
"""Of arithmetic: lines of reasoning, and a number."""
PROBLEMS = 60
MARS = RULES["mars"]
PROMPTS = tuple(
    f"{who} {what}"
    for who in (
        "Once upon a time",
        "Tom and his mom",
        "A little girl named Lily",
        "The big dog",
        "One day, Ben",
    )
    for what in ("went to the park.", "saw a bird.", "had a red ball.", "was very sad.")
)


def wrong_of(made: constraints.Constraint, one: Completion, schema: Any) -> str | None:
    """What is wrong with a text; None where nothing is."""
    import jsonschema
    import regex

    if one.finish_reason == "failed":
        return "it failed"
    pattern = made.content if made.kind == "regex" else "|".join(map(re.escape, made.content))
    if one.finish_reason == "length":
        # `re` knows no prefixes of matches; the package regex does, and of a schema our automaton has to be believed.
        whole = made.automaton.begins(said(one))
        if made.kind != "json_schema":
            whole = whole and regex.fullmatch(pattern, said(one).decode(), partial=True) is not None
        return None if whole else "it was cut, and is no prefix of a match"
    if made.kind == "json_schema":
        try:
            jsonschema.validate(json.loads(one.text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            return str(error).splitlines()[0]
        return None
    return None if re.fullmatch(pattern, one.text) else "it does not match"


def said(one: Completion) -> bytes:
    """The bytes of a text, also where it ends inside of a character."""
    return one.text.encode().removesuffix("\N{REPLACEMENT CHARACTER}".encode())


def name_of(draft: Draft) -> str:
    """A draft in words."""
    spec, how = draft
    tree = how.get("tree")
    shape = (
        f"chain of {how['num_draft_tokens']}"
        if "num_draft_tokens" in how
        else f"tree of {tree.num_nodes} nodes"
        if isinstance(tree, mj.drafters.Dynamic)
        else f"tree {tree}"
        if tree
        else ""
    )
    return " ".join(["sampled"] * how.get("sample", False) + [spec.partition(":")[0], shape]).strip()


def pairs() -> list[tuple[Draft, str]]:
    """Drafts and rules: every rule, once, along chains and on trees in turns, and every draft at least once."""
    made = list(OTHERS)
    for rules, shapes in ((EDGES, ("chain", "tree")), (LAWS, ("sampled chain", "sampled tree"))):
        used = dict.fromkeys(shapes, 0)
        for i, rule in enumerate(rules):
            shape = shapes[0] if rule in CHAINS_ALONE else shapes[i % 2]
            made.append((SHAPES[shape][used[shape] % len(SHAPES[shape])], rule))
            used[shape] += 1
    return made


def decode(
    target: Any, drafter: Any, rule: Any, requests: list[Request], rows: int, **how: Any
) -> list[Completion]:
    """The completions of requests, in their order."""
    made = prepared(target, drafter, requests, verify=rule)
    if how.get("forced") is False:
        words = made.guides.words
        assert words is not None
        found = compiled([r.constraint for r in requests], words, forced=False)
        made = dataclasses.replace(
            made,
            guides=made.guides._replace(constraint=found),
            params=made.params._replace(guides=Guides(constraint=found.tables)),
        )
    by_number = dict(Queue(made, rows))
    return [by_number[i] for i in range(len(requests))]


def texts(target: Any, limit: int, have: list[Any], save: Callable[[list[Any]], None]) -> None:
    """One row of the report for every pair that `have` lacks."""
    rows = list(have)
    known = {(row["draft"], row["rule"]) for row in rows}
    names = [name for name in CONSTRAINTS for _ in range(5)]
    loaded: dict[str, Any] = {}
    for number, (draft, rule) in enumerate(pairs()):
        name = name_of(draft)
        if (name, rule) in known:
            continue
        if name not in loaded:
            loaded[name] = mj.drafters.load(draft[0], target, **draft[1])
        began = time.perf_counter()
        requests = mj.make_requests(
            target,
            [PROMPTS[(number + i) % len(PROMPTS)] for i in range(len(names))],
            constraint=[CONSTRAINTS[one] for one in names],
            temperature=[0.0 if i % 3 == 0 else 1.0 for i in range(len(names))],
            max_new_tokens=limit,
            seed=1000 * number,
        )
        # Of every three texts one is greedy, and two let the rule relax inside of them.
        chosen = verify.load(RULES[rule][0], target, **RULES[rule][1])
        if not chosen.rule.lossless:
            requests = [
                dataclasses.replace(r, constraint=r.constraint.relaxed())
                if i % 3 != 1 and r.constraint
                else r
                for i, r in enumerate(requests)
            ]
        done = decode(target, loaded[name], chosen, requests, len(names))
        judged = [
            (k, one.text, wrong_of(CONSTRAINTS[k], one, SCHEMAS.get(k)))
            for k, one in zip(names, done, strict=True)
        ]
        faults = [row for row in judged if row[2] is not None]
        rows.append(
            {
                "draft": name,
                "rule": rule,
                "texts": len(done),
                "limit": limit,
                "finished": sum(one.finish_reason == "stop" for one in done),
                "cut": sum(one.finish_reason == "length" for one in done),
                "faults": faults,
                "tau": sum(len(one.tokens) for one in done) / sum(one.metrics.steps for one in done),
                "relaxed_tokens": sum(one.metrics.accepted_relaxed for one in done),
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        save(rows)


def unguided(drafter: Any) -> Any:
    """A drafter that hears nothing of the constraint, so that its drafts only lose what may not follow."""
    own = drafter.drafter
    made = own._replace(
        propose=lambda params, state, given: own.propose(
            params, state, dataclasses.replace(given, guide=None)
        )
    )
    return drafter._replace(drafter=made)


def forced(target: Any, draft: Draft, limit: int) -> dict[str, Any]:
    """tau of JSON at temperature 0 with what a constraint gives a draft over that without, by prompt.

    An n-gram's draft is given forced text; a model's is drafted from what may follow, forced text among it.
    """
    drafter = mj.drafters.load(draft[0], target, **draft[1])
    requests = mj.make_requests(target, list(PROMPTS), constraint=CONSTRAINTS["person"], max_new_tokens=limit)
    without = drafter if draft[0] == "ngram" else unguided(drafter)
    rows = len(requests)
    arms = {
        "with": decode(target, drafter, mj.verify.exact(), requests, rows),
        "without": decode(target, without, mj.verify.exact(), requests, rows, forced=False),
    }
    same = [a.tokens == b.tokens for a, b in zip(*arms.values(), strict=True)]
    taus = {
        how: np.asarray([len(one.tokens) / one.metrics.steps for one in done]) for how, done in arms.items()
    }
    ratios = taus["with"] / taus["without"]
    rng = np.random.default_rng(0)
    draws = rng.choice(ratios, (2000, len(ratios))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return {
        "draft": name_of(draft),
        "texts": len(same),
        "same_tokens": sum(same),
        "tau_with": float(taus["with"].mean()),
        "tau_without": float(taus["without"].mean()),
        "ratio": float(ratios.mean()),
        "interval_95": [float(low), float(high)],
        "bar": 1.2,
        "met": bool(low >= 1.2),
    }


def relaxed(target: Any, limit: int) -> list[dict[str, Any]]:
    """JSON and arithmetic by mars inside of the constraint and without it: whole texts, values that differ, tau.

    A value of JSON is that of a field, one of arithmetic the number after `####`.
    """
    from mars_jax.lab.evaluate.answers import prompt_tokens
    from mars_jax.lab.evaluate.tasks.arithmetic import final_answer
    from mars_jax.lab.evaluate.tasks.catalogue import read

    problems = read("arithmetic", chat=True, limit=PROBLEMS)
    chats = [prompt_tokens(target, one, chat=True) for one in problems]

    def fields(text: str) -> list[Any]:
        return list(json.loads(text).values())

    studies = {
        "person": (list(PROMPTS), CONSTRAINTS["person"], fields),
        "arithmetic": (chats, ANSWER, lambda text: [final_answer(text)]),
    }
    drafter, rows = mj.drafters.load(MODEL, target), []
    for name, (prompts, made, read_values) in studies.items():
        found, values = {}, {}
        for how, one in (("off", made), ("on", made.relaxed())):
            requests = mj.make_requests(target, prompts, constraint=one, max_new_tokens=limit)
            found[how] = decode(target, drafter, verify.load(MARS[0], target, **MARS[1]), requests, 20)
            values[how] = [read_values(c.text) if c.finish_reason == "stop" else None for c in found[how]]
        both = [(a, b) for a, b in zip(values["off"], values["on"], strict=True) if a and b]
        rows.append(
            {
                "texts": name,
                "rule": "mars theta=0.8",
                "prompts": len(prompts),
                "finished": {how: sum(v is not None for v in vs) for how, vs in values.items()},
                "faults": {
                    how: [why for one in done if (why := wrong_of(made, one, PERSON))]
                    for how, done in found.items()
                },
                "values": sum(len(a) for a, _ in both),
                "values_that_differ": sum(x != y for a, b in both for x, y in zip(a, b, strict=True)),
                "tau": {
                    how: sum(len(o.tokens) for o in done) / sum(o.metrics.steps for o in done)
                    for how, done in found.items()
                },
                "relaxed_tokens": sum(one.metrics.accepted_relaxed for one in found["on"]),
            }
        )
        if name == "arithmetic":
            rows[-1]["right"] = {
                how: sum(
                    v is not None and str(v[0]) == p.references[0] for v, p in zip(vs, problems, strict=True)
                )
                for how, vs in values.items()
            }
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("forced", "relaxed", "texts"), default=["forced", "relaxed", "texts"]
    )
    parser.add_argument("--limit", type=int, default=96, help="new tokens of a text")
    parser.add_argument("--texts-limit", type=int, default=64, help="the same, of the array's")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    target = mj.load()
    report: dict[str, Any] = {"target": "tiny/target", "limit": asked.limit}
    if asked.output is not None and asked.output.exists():
        report = json.loads(asked.output.read_text())

    def save(name: str, value: Any) -> None:
        report[name] = value
        if asked.output is not None:
            asked.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    if "forced" in asked.parts:
        rows = []
        for draft in (SHAPES["chain"][1], SHAPES["chain"][0]):
            rows.append(forced(target, draft, asked.limit))
            print(json.dumps(rows[-1]), flush=True)
            save("forced", rows)
    if "relaxed" in asked.parts:
        save("relaxed", relaxed(target, asked.limit))
    if "texts" in asked.parts:
        texts(target, asked.texts_limit, report.get("texts", []), lambda rows: save("texts", rows))


if __name__ == "__main__":
    main()
