"""The systems that ask the target less often, on the embedded family: target calls, quality, regret, tokens/s.

    python scripts/eval_systems.py --output scripts/results/eval_systems.json

Held-out arithmetic problems at temperature 0, answered by strict verification of a chain of 5 (the base), by `mars` on
it, and by TriSpec, VIA-SD and SPRINTER under `exact`. Accuracy is paired with the base, with a 95% interval of a
bootstrap over problems. A target call is a forward of the target for one row. `modelled` is the time for a token over
that of autoregression where a forward of the target costs 1 and one of the proxy and of the drafter what `COSTS` says:
the ratios of weights of the models that the papers use (32B, 1.7B and a head of one layer), and for VIA-SD's verifier
the share of sublayers that it keeps. `confidently_wrong` is the
share of the places where the proxy is sure and its best token is not the target's, on the target's own answers.

The weights were learned for a target of 12M: they prove the machinery, and not what the papers report.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mars_jax as mj
from mars_jax import assets
from mars_jax.contrib.drafters.cascade import CascadeState
from mars_jax.contrib.drafters.gates import GATES
from mars_jax.contrib.drafters.system_files import load_system
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.types import Params, keys_from_seeds
from mars_jax.lab.evaluate.tasks import arithmetic
from mars_jax.lab.training.objectives import predict

ROWS, PROMPT, NEW = 40, 128, 128
COSTS = {"target": 1.0, "proxy": 1.7 / 32, "slim": 7 / 12, "draft": 0.6 / 32}
CHAIN = 5
ARMS = {
    "strict": (f"model:{assets.DRAFT}", "exact"),
    "mars": (f"model:{assets.DRAFT}", "mars"),
    "trispec": (f"trispec:{assets.TRISPEC}", "exact"),
    "via_sd": (f"via_sd:{assets.VIA_SD}", "exact"),
    "sprinter": (f"sprinter:{assets.SPRINTER}", "exact"),
}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "trispec": (0.5, 0.7, 0.9, 0.99),
    "via_sd": ((0.6, 0.3), (0.99, 0.9)),
    "sprinter": (0.5, 0.9, 0.99),
}
"""Of their gates: the published ones first."""


class Arm(NamedTuple):
    """A compiled loop."""

    drafter: Any
    params: Params
    rule: Any
    decoder: Any
    run: Any


def open_arm(name: str, target: mj.Pretrained) -> Arm:
    draft, rule = ARMS[name]
    length = CHAIN if draft.startswith("model:") else None
    drafter, weights, *_ = mj.drafters.load(draft, target, num_draft_tokens=length)
    made = mj.verify.load(rule).rule
    decoder = decode.speculative_decoder(target.model, drafter, made)
    run = jax.jit(lambda params, state: decode.run(decoder, params, state))
    return Arm(drafter, Params(target.params, weights), made, decoder, run)


def begin(arm: Arm, target: mj.Pretrained, prompts: list[list[int]], new: int) -> Any:
    """A state of these rows."""
    tokens = np.zeros((len(prompts), PROMPT + NEW), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    lengths = jnp.asarray([len(ids) for ids in prompts], jnp.int32)
    controls = make_controls(
        len(prompts), limit=lengths + new, stop_tokens=[list(target.stop_tokens)] * len(prompts)
    )
    seeds = jnp.arange(len(prompts), dtype=jnp.uint32)
    return jax.jit(arm.decoder.init)(
        arm.params, jnp.asarray(tokens), lengths, controls, arm.rule, keys_from_seeds(seeds)
    )


def interval(values: np.ndarray) -> dict[str, float]:
    """The mean and its 95% interval."""
    drawn = np.random.default_rng(0).integers(len(values), size=(10_000, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), [0.025, 0.975])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


def answer(arm: Arm, target: mj.Pretrained, problems: list[Any]) -> dict[str, Any]:
    """Right or wrong by problem, and what it took."""
    right, texts = [], []
    counts = dict.fromkeys(("calls", "tokens", "trusted", "rounds", "drafted"), 0.0)
    regret = 0.0
    for first in range(0, len(problems), ROWS):
        part = problems[first : first + ROWS]
        prompts = [target.encode(p.question, chat=True) for p in part]
        state, stats = arm.run(arm.params, begin(arm, target, prompts, NEW))
        tokens, length = np.asarray(state.tokens), np.asarray(state.length)
        for row, (problem, ids) in enumerate(zip(part, prompts, strict=True)):
            made = [int(t) for t in tokens[row, len(ids) : length[row]]]
            texts.append((ids, made))
            text = target.decode([t for t in made if t not in target.stop_tokens])
            right.append(float(arithmetic.is_correct(problem, text)))
        counts["calls"] += float(jnp.sum(stats.steps))
        counts["tokens"] += float(jnp.sum(stats.emitted))
        counts["trusted"] += float(jnp.sum(stats.accepted_trusted))
        counts["drafted"] += float(jnp.sum(stats.proposed))
        regret += float(jnp.sum(stats.regret))
        if isinstance(state.draft, CascadeState):
            counts["rounds"] += float(jnp.sum(state.draft.rounds))
    return {"right": np.asarray(right), "texts": texts, "regret": regret, **counts}


def modelled(name: str, found: dict[str, Any]) -> float:
    """Time for a token over that of autoregression. A round of a cascade drafts `CHAIN` tokens, which the proxy reads
    at once."""
    drafts = {"trispec": CHAIN * found["rounds"], "via_sd": CHAIN * found["rounds"]}.get(
        name, found["drafted"]
    )
    proxy = COSTS["slim" if name == "via_sd" else "proxy"]
    seconds = COSTS["target"] * found["calls"] + proxy * found["rounds"] + COSTS["draft"] * drafts
    return seconds / found["tokens"]


def with_setting(arm: Arm, setting: Any) -> Arm:
    """The arm with another number in its gate: a value, so nothing is compiled."""
    if setting is None:
        return arm
    numbers = jax.tree.map(np.float32, setting)
    draft = arm.params.draft
    changed = {"gate": numbers} if hasattr(draft, "gate") else {"threshold": numbers}
    return arm._replace(params=arm.params._replace(draft=draft._replace(**changed)))


def confidently_wrong(
    target: mj.Pretrained, arm: Arm, margin: float, proxy: Any, texts: list[Any]
) -> dict[str, float]:
    """Of the proxy on the target's own answers, where its margin is at least `margin`."""
    sure_count = wrong = places = 0

    @jax.jit
    def read(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        segments = jnp.zeros_like(tokens)
        p = predict(target.model, params.target, tokens, segments)
        q = predict(proxy, params.draft.proxy, tokens, segments)
        nothing = jnp.full(tokens.shape, -1, jnp.int32)
        said = GATES["margin"].judge(q, nothing, np.float32(margin))
        return ~said.unsure, said.own != jnp.argmax(p, axis=-1)

    for first in range(0, len(texts), ROWS):
        part = texts[first : first + ROWS]
        tokens = np.zeros((len(part), PROMPT + NEW), np.int32)
        answers = np.zeros(tokens.shape, bool)
        for row, (ids, made) in enumerate(part):
            tokens[row, : len(ids) + len(made)] = [*ids, *made]
            answers[row, len(ids) - 1 : len(ids) + len(made) - 1] = True
        sure, differs = (np.asarray(x) & answers for x in read(arm.params, jnp.asarray(tokens)))
        sure_count += int(sure.sum())
        wrong += int((sure & differs).sum())
        places += int(answers.sum())
    return {"sure": sure_count / places, "confidently_wrong": wrong / max(1, sure_count)}


def speeds(
    arms: dict[str, Arm], target: mj.Pretrained, problems: list[Any], rows: int, turns: int
) -> dict[str, float]:
    """Tokens/s of every arm, medians of turns that alternate."""
    prompts = [target.encode(p.question, chat=True) for p in problems[:rows]]
    states = {name: begin(arm, target, prompts, NEW) for name, arm in arms.items()}
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 1):
        for name, arm in arms.items():
            began = time.perf_counter()
            _, stats = jax.block_until_ready(arm.run(arm.params, states[name]))
            if turn:
                rates[name].append(float(jnp.sum(stats.emitted)) / (time.perf_counter() - began))
    return {name: float(np.median(found)) for name, found in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5, help="of the timings")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--output", type=Path, required=True, help="raw JSON")
    args = parser.parse_args()
    target = mj.load(assets.TARGET)
    problems = list(arithmetic.generate(args.problems, split="eval"))
    arms = {name: open_arm(name, target) for name in args.arms}
    assert target.model.with_layers is not None
    slim = target.model.with_layers(load_system(assets.VIA_SD, "via_sd").layers)
    proxies = {"trispec": mj.load(assets.PROXY).model, "via_sd": slim}
    report: dict[str, Any] = {
        "environment": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "cores": len(os.sched_getaffinity(0)),
        },
        "problems": len(problems),
        "costs": COSTS,
        "arms": {},
    }
    base: dict[str, Any] | None = None
    for name, opened in arms.items():
        for setting in SETTINGS.get(name, (None,)):
            arm = with_setting(opened, setting)
            found = answer(arm, target, problems)
            base = base or found
            row = {
                "setting": setting,
                "accuracy": float(found["right"].mean()),
                "accuracy_over_base": interval(found["right"] - base["right"]),
                "tau": found["tokens"] / found["calls"],
                "calls_per_token": found["calls"] / found["tokens"],
                "calls_over_base": (found["calls"] / found["tokens"]) / (base["calls"] / base["tokens"]),
                "trusted_share": found["trusted"] / found["tokens"],
                "regret_per_token": found["regret"] / found["tokens"],
                "modelled": modelled(name, found),
            }
            if name in ("trispec", "via_sd"):
                margin = setting if name == "trispec" else 0.5
                row |= confidently_wrong(target, arm, margin, proxies[name], base["texts"])
            report["arms"].setdefault(name, []).append(row)
            print(name, json.dumps(row), flush=True)
            args.output.write_text(json.dumps(report, indent=1) + "\n")
    report["tokens_per_s"] = {
        f"batch {rows}": speeds(arms, target, problems, rows, args.turns) for rows in (1, 8)
    }
    print(json.dumps(report["tokens_per_s"]))
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
