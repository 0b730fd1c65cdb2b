"""Context-dependent thresholds against the single global one, on the embedded family, at equal risk.

    python scripts/eval_context.py --stories heldout.txt.xz --output scripts/results/eval_context.json

Risk is the mean regret per token (z1 - z[token] of the target, nats). Every rule is the paper's ratio over `exact` at
temperature 0, with a context that scales the looseness of its threshold, or without. On one half of the prompts every
rule sweeps theta, and gets the theta at which its risk is that of a global threshold; on the other half the rules run
with these, and tau, risk and score are compared with the global rule's by the paired bootstrap over prompts. A context
beats the global threshold where its tau is higher with 95% confidence, after what tau the global rule would have gained
by the risk in which the two differ. Beside the JSON goes a PNG; `--picture` draws it anew from the JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eval_embedded import ANSWER_TOKENS, CHAIN, NEW_TOKENS, story_prompts

import mars_jax as mj
from mars_jax import assets
from mars_jax.core.logprobs import entropy
from mars_jax.lab.evaluate.tasks import arithmetic
from mars_jax.lab.pictures.palette import BLUE, GREY, Look
from mars_jax.lab.pictures.style import no_grid, picture, whiskers
from mars_jax.lab.training.data import documents
from mars_jax.lab.training.objectives import predict
from mars_jax.serve.likelihood import batches
from mars_jax.serve.likelihood import score as likelihood

THETA = 0.9
LOOSENESS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # of the sweep, in units of that of THETA
REFERENCES = (
    1.0,
    4.0,
    8.0,
)  # looseness of the global thresholds whose risk the contexts get: 0.9, 0.69, 0.53
RESAMPLES = 4000


def rules(target: mj.Pretrained, median_entropy: float) -> dict[str, mj.verify.LoadedRule]:
    """The global rule and every context that is tried; chosen before anything is measured."""
    texts = [target.tokenizer.decode([i]) for i in range(target.config.vocab_size)]
    classes = mj.contrib.token_classes(texts)
    contexts = {
        "entropy, loose where low": mj.contrib.context("entropy", (2, 0.5), edges=(median_entropy,)),
        "entropy, loose where high": mj.contrib.context("entropy", (0.5, 2), edges=(median_entropy,)),
        "position, loose early": mj.contrib.context("position", (2, 1, 0.5), edges=(1, 3)),
        "position, loose late": mj.contrib.context("position", (0.5, 1, 2), edges=(1, 3)),
        "class, strict on numbers": mj.contrib.context("class", (1, 0, 1), classes=classes),
        "class, half on numbers": mj.contrib.context("class", (1, 0.5, 1), classes=classes),
        "class, strict on punctuation": mj.contrib.context("class", (1, 1, 0), classes=classes),
        "class, strict on words": mj.contrib.context("class", (0, 1, 1), classes=classes),
    }
    with_table = mj.verify.LoadedRule
    return {"global": with_table(mj.verify.mars())} | {
        name: with_table(mj.contrib.by_context(chosen.by), chosen) for name, chosen in contexts.items()
    }


def theta_of(looseness: float) -> float:
    """Of a ratio, from multiples of the looseness of THETA."""
    return 1 / (1 + looseness * (1 / THETA - 1))


def middle_entropy(target: mj.Pretrained, texts: list[list[int]]) -> float:
    """Median entropy of the target where its margin is low at THETA, in texts of its own."""

    @jax.jit
    def entropies(params, tokens):
        return entropy(predict(target.model, params, tokens[:, :-1], jnp.zeros_like(tokens[:, :-1])))

    found = []
    scored = likelihood(target, texts)
    for group, tokens in batches(texts, 4, target.config.max_positions):
        values = np.asarray(entropies(target.params, jnp.asarray(tokens)))
        for row, i in enumerate(group):
            low = (scored[i].z1 > 0) & (scored[i].z2 > THETA * scored[i].z1)
            found += values[row, : len(low)][low].tolist()
    return float(np.median(found))


class Task:
    """Prompts, and what decoding them with a rule gives, prompt by prompt."""

    def __init__(self, target: mj.Pretrained, drafter: Any, prompts: list[Any], problems: list[Any] | None):
        self._target, self._drafter, self._prompts, self._problems = target, drafter, prompts, problems

    def run(self, rule: Any, theta: float, chosen: slice) -> dict[str, np.ndarray]:
        """f64[n] each: steps, emitted tokens, regret, and score where there is one."""
        result = mj.generate(
            self._target,
            self._drafter,
            self._prompts[chosen],
            verify=rule._replace(rule=dataclasses.replace(rule.rule, theta=np.float32(theta))),
            chat=self._problems is not None,
            max_new_tokens=ANSWER_TOKENS if self._problems is not None else NEW_TOKENS,
            batch_size=16,
        )
        columns = {
            name: np.asarray([getattr(c.metrics, name) for c in result.completions], np.float64)
            for name in ("steps", "emitted", "regret", "accepted_relaxed")
        }
        if self._problems is not None:
            right = zip(self._problems[chosen], result.text, strict=True)
            columns["score"] = np.asarray([float(arithmetic.is_correct(p, text)) for p, text in right])
        return columns


def figures(columns: dict[str, np.ndarray], weights: np.ndarray | None = None) -> dict[str, Any]:
    """tau, risk and score, of the prompts or of resamplings f64[R, n] of them."""
    w = np.ones((1, len(columns["steps"]))) if weights is None else weights
    total = {name: w @ values for name, values in columns.items()}
    found = {"tau": total["emitted"] / total["steps"], "risk": total["regret"] / total["emitted"]}
    if "score" in total:
        found["score"] = total["score"] / w.sum(axis=1)
    return {name: float(v[0]) for name, v in found.items()} if weights is None else found


def matched(sweep: list[dict[str, float]], risk: float) -> dict[str, Any]:
    """The theta at which a swept rule has `risk`, its tau there, and whether the sweep came so far.

    Looseness is followed upwards to where the risk is first reached, and then between the neighbours.
    """
    points = [(row["looseness"], row["risk"], row["tau"]) for row in sweep]
    for (l0, r0, t0), (l1, r1, t1) in itertools.pairwise([(0.0, 0.0, points[0][2]), *points]):
        if r1 >= risk:
            share = (risk - r0) / (r1 - r0) if r1 > r0 else 1.0
            theta = theta_of(l0 + share * (l1 - l0))
            return {"theta": theta, "tuned_tau": t0 + share * (t1 - t0), "risk_reached": True}
    return {"theta": theta_of(points[-1][0]), "tuned_tau": points[-1][2], "risk_reached": False}


def steepness(sweep: list[dict[str, float]], looseness: float) -> float:
    """The tau that the global rule gains by a unit of risk, around a looseness of its sweep."""
    at = [row["looseness"] for row in sweep].index(looseness)
    before, after = sweep[max(at - 1, 0)], sweep[min(at + 1, len(sweep) - 1)]
    more = after["risk"] - before["risk"]
    return max((after["tau"] - before["tau"]) / more, 0.0) if more > 0 else 0.0


def compare(task: Task, made: dict[str, Any], count: int) -> dict[str, Any]:
    """Sweep on the first half, compare on the second, at the risk of each global threshold of `REFERENCES`."""
    tune, test = slice(0, count // 2), slice(count // 2, count)
    sweeps: dict[str, list[dict[str, float]]] = {}
    for name, rule in made.items():
        sweeps[name] = []
        for looseness in LOOSENESS:
            found = figures(task.run(rule, theta_of(looseness), tune))
            sweeps[name].append({"looseness": looseness, "theta": theta_of(looseness)} | found)
        print(name, sweeps[name], flush=True)
    at = []
    for reference in REFERENCES:
        risk = next(row["risk"] for row in sweeps["global"] if row["looseness"] == reference)
        at.append(
            {"theta": theta_of(reference), "risk": risk} | held_out(task, made, sweeps, reference, risk, test)
        )
    return {"prompts": count, "sweeps": sweeps, "at_equal_risk": at}


def held_out(
    task: Task, made: dict[str, Any], sweeps: dict[str, Any], reference: float, risk: float, test: slice
) -> dict[str, Any]:
    """Every context at the theta that had the risk of the global rule, beside that rule."""
    plain = task.run(made["global"], theta_of(reference), test)
    n = len(plain["steps"])
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(np.float64)
    resampled = figures(plain, weights)
    results = {"global": {"theta": theta_of(reference)} | figures(plain)}
    slope = steepness(sweeps["global"], reference)
    for name in made:
        if name == "global":
            continue
        row = matched(sweeps[name], risk)
        columns = task.run(made[name], row["theta"], test)
        row |= figures(columns)
        drawn = figures(columns, weights)
        differences = {key: (row[key] - results["global"][key], drawn[key] - resampled[key]) for key in drawn}
        # What of the tau is owed to the risk that the two halves did not match.
        owed = [slope * of_risk for of_risk in differences["risk"]]
        differences["tau_at_equal_risk"] = (differences["tau"][0] - owed[0], differences["tau"][1] - owed[1])
        for key, (value, values) in differences.items():
            low, high = np.quantile(values, [0.025, 0.975])
            row[f"{key}_difference"] = [float(value), float(low), float(high)]
        row["beats_global"] = bool(row["tau_at_equal_risk_difference"][1] > 0)
        results[name] = row
    # Chosen on the first half, so that the best of many is not best by luck.
    best = max((name for name in results if name != "global"), key=lambda name: results[name]["tuned_tau"])
    print(best, results[best], flush=True)
    return {"rules": results, "best": best, "beats_global": results[best]["beats_global"]}


def draw(report: dict[str, Any], files: list[Path]) -> None:
    """What each context gains in tau at equal risk on the held-out half, a panel for each task and risk."""
    tasks = report["tasks"]
    counts = ", ".join(f"{found['prompts'] // 2} held-out prompts of {task}" for task, found in tasks.items())
    facts = (
        "tiny/target drafted by tiny/draft, a chain of 5",
        "temperature 0",
        f"{report['environment']['cores']} cores",
        f"n = {counts}",
        report.get("date"),
        "whiskers: 95%, paired bootstrap over prompts; filled: chosen on the other half",
    )
    told = "; ".join(fact for fact in facts if fact) + "."
    grid = {
        "rows": len(tasks),
        "columns": len(REFERENCES),
        "panel": (3.1, 2.7),
        "sharex": True,
        "sharey": True,
    }
    with picture(files, **grid, caption=told, legend=False) as axes:
        for row, (task, found) in zip(axes, tasks.items(), strict=True):
            for axis, at in zip(row, found["at_equal_risk"], strict=True):
                names = [name for name in at["rules"] if name != "global"]
                gains = [at["rules"][name]["tau_at_equal_risk_difference"] for name in names]
                for place, (name, (value, *span)) in enumerate(zip(names, gains, strict=True)):
                    chosen = Look(BLUE, open=name != at["best"])
                    axis.errorbar([value], [place], xerr=whiskers([value], [span]), **chosen.line)
                axis.axvline(0, color=GREY, linewidth=0.9, linestyle=":")
                axis.set_yticks(range(len(names)), names)
                axis.set_title(f"{task}, risk {at['risk']:.4f} (theta {at['theta']:.2f})", fontsize=8.5)
                no_grid(axis, "y")
        axes[0, 0].invert_yaxis()
        for axis in axes[-1]:
            axis.set_xlabel("tau over the global threshold's")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stories", type=Path, help="held-out stories")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=600, help="arithmetic problems, both halves")
    parser.add_argument("--prompts", type=int, default=128, help="stories, both halves")
    parser.add_argument(
        "--picture", action="store_true", help="draw what is in the JSON, and measure nothing"
    )
    args = parser.parse_args()
    if args.picture:
        draw(json.loads(args.output.read_text()), [args.output.with_suffix(".png")])
        return
    if args.stories is None:
        parser.error("--stories is needed")
    target = mj.load(assets.TARGET, dtype="float32")
    drafter = mj.drafters.load(f"model:{assets.DRAFT}", target, num_draft_tokens=CHAIN, dtype="float32")
    stories = story_prompts(target, list(documents(args.stories)), args.prompts)
    problems = list(arithmetic.generate(args.problems, split="eval"))
    told = mj.generate(target, "none", stories[:16], max_new_tokens=NEW_TOKENS, batch_size=16).tokens
    edge = middle_entropy(target, [[*p, *t] for p, t in zip(stories, told, strict=False)])
    made = rules(target, edge)
    report: dict[str, Any] = {
        "environment": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "cores": os.cpu_count(),
        },
        "date": datetime.date.today().isoformat(),
        "entropy_edge": edge,
        "tasks": {},
    }
    tasks = {
        "arithmetic": (Task(target, drafter, [p.question for p in problems], problems), len(problems)),
        "stories": (Task(target, drafter, stories, None), len(stories)),
    }
    for name, (task, count) in tasks.items():
        report["tasks"][name] = compare(task, made, count)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    draw(report, [args.output.with_suffix(".png")])


if __name__ == "__main__":
    main()
