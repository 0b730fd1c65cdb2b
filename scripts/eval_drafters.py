"""Measure the drafters on the embedded family: losslessness, acceptance, and what a dynamic tree costs.

    python scripts/eval_drafters.py --stories heldout.txt.xz --output scripts/results/eval_drafters.json

tau is tokens per target forward. All drafters get the same prompts and seeds, and a relaxed rule the same tree as the
strict one. Costs are medians of decodes taken in turns (A B A B ...) in one process; every single time is in the JSON.
`draft` is the time of a draft alone, and of reading what was accepted; `speed` tokens per second beside no draft;
`chi_square` holds block drafters to the target's distribution.
`--only` runs some parts and `--drafters` some drafters; the others' figures are kept.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from eval_embedded import acceptance, story_prompts

import mars_jax as mj
from mars_jax import assets
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.types import DraftInput, ForwardOutput, Params, Verdict, keys_from_seeds
from mars_jax.drafters import Dynamic
from mars_jax.lab.training.data import documents

CHAIN = 5
TREE = Dynamic(top_k=10, depth=7, nodes=60)
STATIC = (1, 1, 3, 2, 2, 1, 2)  # as deep, and also of 60 nodes


def drafters(target: mj.Pretrained, heads: dict[str, str]) -> dict[str, Any]:
    """Every drafter by its name in the report."""
    draft = f"model:{assets.DRAFT}"
    made = {
        "model chain": mj.drafters.load(draft, target, num_draft_tokens=CHAIN, dtype="float32"),
        "model dynamic tree": mj.drafters.load(draft, target, tree=TREE, dtype="float32"),
        "model static tree": mj.drafters.load(draft, target, tree=STATIC, dtype="float32"),
        "ngram": mj.drafters.load("ngram", target),
    }
    for name, spec in heads.items():
        made[f"{name} chain"] = mj.drafters.load(spec, target, num_draft_tokens=CHAIN, dtype="float32")
        if not spec.startswith("medusa:"):
            made[f"{name} dynamic tree"] = mj.drafters.load(spec, target, tree=TREE, dtype="float32")
            made[f"{name} static tree"] = mj.drafters.load(spec, target, tree=STATIC, dtype="float32")
        else:
            made[f"{name} static tree"] = mj.drafters.load(spec, target, tree=(4, 3, 2), dtype="float32")
    return made


def lossless(target: mj.Pretrained, made: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Prompts whose greedy continuation is that of autoregression, token for token, in float32 and ragged batches."""
    ragged = [ids[: 2 + i % len(ids)] for i, ids in enumerate(prompts)]
    options: dict[str, Any] = {"max_new_tokens": 96, "batch_size": 16}
    plain = mj.generate(target, "none", ragged, **options).tokens
    equal = {}
    for name, drafter in made.items():
        tokens = mj.generate(target, drafter, ragged, verify=mj.verify.exact(), **options).tokens
        equal[name] = sum(a == b for a, b in zip(tokens, plain, strict=True))
    return {"prompts": len(ragged), "equal": equal}


def chi_square(target: mj.Pretrained, made: dict[str, Any], prompt: list[int], rows: int) -> dict[str, Any]:
    """Pairs of the second and third new token at temperature 1 beside those of no draft with other seeds: `rows`
    samples each, and the chance that as large a statistic comes of one distribution. Pairs that both hold fewer than
    ten times together count as one."""
    from scipy.stats import chi2

    size = target.config.vocab_size

    def pairs(drafter: Any, rule: Any, seed: int) -> Any:
        options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 3, "ignore_eos": True}
        found = mj.generate(
            target, drafter, [prompt], verify=rule, samples=rows, batch_size=64, seed=seed, **options
        )
        tokens = np.asarray(found.tokens)
        return np.bincount(tokens[:, 1] * size + tokens[:, 2], minlength=size * size), found.metrics

    plain, _ = pairs("none", mj.verify.exact(), 0)
    report = {}
    for number, (name, (drafter, rule)) in enumerate(made.items()):
        mine, metrics = pairs(drafter, rule, (number + 1) * rows)
        often = mine + plain >= 10
        cells = [(int(m), int(p)) for m, p in zip(mine[often], plain[often], strict=True)]
        cells.append((int(mine[~often].sum()), int(plain[~often].sum())))
        statistic = sum((m - p) ** 2 / (m + p) for m, p in cells)
        report[name] = {
            "rule": rule.name,
            "statistic": statistic,
            "cells": len(cells),
            "p": float(chi2.sf(statistic, len(cells) - 1)),
            "accepted": metrics.accepted,
        }
    return {"rows": rows, "drafters": report}


def decodes(
    target: mj.Pretrained, made: dict[str, Any], requests: Sequence[Any], steps: dict[str, int]
) -> dict[str, Callable[[], None]]:
    """A decode of one request with every drafter under `exact`, which leaves its steps in `steps`."""
    from mars_jax.serve.generation import run_batch

    def decode(name: str) -> None:
        [done] = run_batch(target, made[name], requests, verify=mj.verify.exact())
        steps[name] = done.metrics.steps

    return {name: functools.partial(decode, name) for name in made}


def cost(target: mj.Pretrained, made: dict[str, Any], prompt: list[int], repeats: int) -> dict[str, Any]:
    """Milliseconds of a step at batch 1: a decode with a rule that accepts next to nothing, over its steps."""
    requests = mj.make_requests(target, [prompt], max_new_tokens=96, ignore_eos=True, temperature=1.0)
    steps: dict[str, int] = {}
    found = common.in_turns(decodes(target, made, requests, steps), repeats)
    times = {name: (1e3 * seconds / steps[name]).tolist() for name, seconds in found.items()}
    return {name: {"milliseconds": statistics.median(ts), "all": ts} for name, ts in times.items()}


def draft_cost(
    target: mj.Pretrained, made: dict[str, Any], prompt: list[int], repeats: int
) -> dict[str, Any]:
    """Milliseconds of a draft at batch 1, and of `update` where three nodes were accepted, compiled each by itself."""
    rule, calls = mj.verify.exact(), {}
    tokens = jnp.zeros((1, 256), jnp.int32).at[0, : len(prompt)].set(jnp.asarray(prompt))
    lengths = jnp.asarray([len(prompt)], jnp.int32)
    for name, (drafter, weights) in made.items():
        params = Params(target=target.params, draft=weights)
        decoder = decode.speculative_decoder(target.model, drafter, rule)
        controls, keys = make_controls(1, limit=256), keys_from_seeds(jnp.zeros((1,), jnp.uint32))
        state = decode.start(decoder, params, tokens, lengths, controls, rule, keys)
        given = DraftInput(keys=keys, tokens=state.tokens, length=state.length, controls=controls)
        propose, update = jax.jit(drafter.propose), jax.jit(drafter.update)
        tree, drafted = propose(params, state.draft, given)
        size, hidden = target.config.hidden_size, drafter.num_nodes
        path = jnp.minimum(jnp.arange(drafter.max_depth + 1, dtype=jnp.int32)[None], 3)
        verdict = Verdict(
            path=path,
            num_accepted=jnp.minimum(jnp.asarray([3], jnp.int32), drafter.max_depth),
            next_token=jnp.asarray([5], jnp.int32),
            relaxed=jnp.zeros((1, drafter.max_depth), bool),
        )
        one = jnp.zeros((1, hidden, size), jnp.float32)
        output = ForwardOutput(one, (one,) * len(drafter.feature_layers), state.cache)
        calls[name] = {
            "propose": lambda p=propose, w=params, d=state.draft, g=given: p(w, d, g),
            "update": lambda u=update, w=params, d=drafted, t=tree, v=verdict, o=output: u(
                w, d, t, v, o, lengths
            ),
        }
        for call in calls[name].values():
            jax.block_until_ready(call())
    flat = {(name, key): call for name, parts in calls.items() for key, call in parts.items()}
    times = {key: (1e3 * seconds).tolist() for key, seconds in common.in_turns(flat, repeats).items()}
    found: dict[str, Any] = {}
    for name, parts in calls.items():
        mine = {key: times[name, key] for key in parts}
        middle = {key: statistics.median(ts) for key, ts in mine.items()}
        found[name] = middle | {"milliseconds": sum(middle.values()), "all": mine}
    return found


def speed(
    target: mj.Pretrained, made: dict[str, Any], prompts: list[list[int]], repeats: int
) -> dict[str, Any]:
    """Tokens per second at batch 1, temperature 0, `exact`: decodes of each prompt in turns, and none as a drafter."""
    every = {"none": mj.drafters.load("none", target)} | made
    rates, taus = {name: [] for name in every}, {name: [] for name in every}
    steps: dict[str, int] = {}
    for number, prompt in enumerate(prompts[:repeats]):
        requests = mj.make_requests(target, [prompt], max_new_tokens=96, ignore_eos=True)
        ways = decodes(target, every, requests, steps)
        for name, [seconds] in common.in_turns(ways, 1, warm=int(number == 0)).items():
            rates[name].append(96 / seconds)
            taus[name].append(96 / steps[name])
    alone = statistics.median(rates["none"])
    return {
        name: {
            "tokens_per_s": statistics.median(found),
            "over_none": statistics.median(found) / alone,
            "tau": statistics.mean(taus[name]),
            "all": found,
        }
        for name, found in rates.items()
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--stories", type=Path, required=True, help="held-out stories")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=128, help="stories to continue")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, default=4096, help="samples of the chi-square test")
    parser.add_argument(
        "--head",
        nargs=2,
        action="append",
        metavar=("NAME", "SPEC"),
        help="heads for the embedded target (default: eagle3 eagle:tiny/eagle3 and dflash dflash:tiny/dflash)",
    )
    parser.add_argument("--drafters", nargs="*", default=(), help="take only those of these names")
    parts = ("lossless", "acceptance", "cost", "draft", "speed", "chi_square")
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    args = parser.parse_args()
    report = common.kept(args.output)

    def keep(name: str, value: Any) -> None:
        report[name] = value
        common.write(args.output, report)
        print(name, json.dumps(value), flush=True)

    target = mj.load(assets.TARGET, dtype="float32")
    report["environment"] = common.provenance(target=target.params)
    heads: dict[str, str] = dict(
        args.head or [("eagle3", f"eagle:{assets.EAGLE3}"), ("dflash", f"dflash:{assets.DFLASH}")]
    )
    made = drafters(target, heads)
    made = {name: drafter for name, drafter in made.items() if name in args.drafters or not args.drafters}
    prompts = story_prompts(target, list(documents(args.stories)), args.prompts)
    exact, mars = mj.verify.exact(), mj.verify.mars(theta=0.9)
    if "lossless" in args.only:
        keep("lossless", lossless(target, made, prompts[:64]))
    if "acceptance" in args.only:
        for name, drafter in made.items():
            for rule, t in ((exact, 0.0), (exact, 1.0), (mars, 1.0)):
                key = f"stories, {name}, {rule.name}, temperature {t:g}"
                keep(key, acceptance(target, drafter, rule, prompts, temperature=t))
    if "cost" in args.only:
        trees = {name: d for name, d in made.items() if "tree" in name}
        keep("cost", cost(target, trees, prompts[0], args.repeats))
    if "draft" in args.only:
        own = {name: d for name, d in made.items() if name != "ngram"}
        keep("draft", draft_cost(target, own, prompts[0], args.repeats))
    if "chi_square" in args.only:
        block = heads.get("dflash")
        drawn = block and mj.drafters.load(block, target, sample=True, dtype="float32")
        asked = {name: (drafter, exact) for name, drafter in made.items() if name.startswith("dflash")}
        asked |= {"dflash chain, drawn": (drawn, mj.verify.rejection())} if drawn else {}
        keep("chi_square", chi_square(target, asked, prompts[1], args.rows))
    if "speed" in args.only:
        keep("speed", speed(target, made, prompts, args.repeats))


if __name__ == "__main__":
    main()
