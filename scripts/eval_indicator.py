"""A learned indicator against the ratio of logits, on the embedded family: does relaxing here change the outcome?

    python scripts/eval_indicator.py --stories train.txt.xz heldout.txt.xz --work runs/indicator \\
        --output scripts/results/eval_indicator.json

Examples: the target's own greedy text, and at some of its tokens the runner-up in the best one's place, continued
greedily. The outcome of a problem is its final answer; that of a story has changed where less than half of the next
48 tokens are those of the strict text, in order. The head (`models.indicator`) learns on problems and stories of the
training splits and is judged on held-out ones: area under the curve against ratio and gap, and, as a rule in the
loop, tau and score against `mars` at equal tau, with 95% intervals by the bootstrap over problems. Beside the JSON
goes a PNG.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eval_embedded import ANSWER_TOKENS, CHAIN, NEW_TOKENS, story_prompts

import mars_jax as mj
from mars_jax import assets
from mars_jax.contrib.models import indicator
from mars_jax.core import decode
from mars_jax.lab.evaluate.tasks import arithmetic
from mars_jax.lab.pictures.palette import look
from mars_jax.lab.pictures.style import no_grid, picture, whiskers, zero_line
from mars_jax.lab.studies.branch_curves import aligned
from mars_jax.lab.studies.branches import continue_strictly
from mars_jax.lab.training.data import documents
from mars_jax.lab.training.indicator_training import Examples, train
from mars_jax.lab.training.objectives import read
from mars_jax.serve.likelihood import batches
from mars_jax.serve.likelihood import score as likelihood
from mars_jax.serve.prepare import prepare
from mars_jax.serve.requests import batches as groups
from mars_jax.serve.session import Session

WIDEST = 4.0  # nats between the two best tokens, beyond which nothing is asked
PER_TEXT = 5
HORIZON = 48  # of a story
THETAS = (0.9, 0.6, 0.4)  # of mars, whose tau the indicator gets too
ROWS = 32
RESAMPLES = 2000


@dataclasses.dataclass
class Set:
    """Examples, the text that each is of, and what they are of."""

    examples: Examples
    text: np.ndarray  # i32[n]


def collect(
    target: mj.Pretrained, drafter: Any, prompts: Sequence[Sequence[int]], *, scored: bool, seed: int
) -> Set:
    """Branch off greedy texts at random tokens whose runner-up is near."""
    length = ANSWER_TOKENS if scored else NEW_TOKENS
    told = mj.generate(target, drafter, prompts, max_new_tokens=length, batch_size=ROWS).tokens
    texts = [(*p, *t) for p, t in zip(prompts, told, strict=True)]
    rng = np.random.default_rng(seed)
    places, branches = [], []
    for i, (p, s) in enumerate(zip(prompts, likelihood(target, texts), strict=True)):
        at = np.arange(len(p) - 1, len(texts[i]) - 1)
        near = (s.z1[at] - s.z2[at] < WIDEST) & ~np.isin(s.best[at], target.stop_tokens)
        near &= ~np.isin(s.second[at], target.stop_tokens)
        if not scored:  # a changed story must have room to show it
            near &= at < len(texts[i]) - 1 - HORIZON
        chosen = rng.permutation(at[near])[:PER_TEXT]
        for place in sorted(chosen.tolist()):
            places.append((i, place, s.z1[place], s.z2[place]))
            left = len(p) + length - place - 2
            branches.append(((*texts[i][: place + 1], int(s.second[place])), left if scored else HORIZON))
    done = continue_strictly(Session(target=target, drafter=drafter, batch_size=ROWS), branches)
    changed = []
    for (i, place, *_), (branch, _), tail in zip(places, branches, done, strict=True):
        if scored:
            start = len(prompts[i])
            ours = arithmetic.final_answer(target.decode([*branch[start:], *tail]))
            changed.append(ours != arithmetic.final_answer(target.decode(told[i])))
        else:
            changed.append(aligned(texts[i][place + 2 : place + 2 + HORIZON], tail).sum() < HORIZON / 2)
    hidden = features(target, texts, [(i, place) for i, place, *_ in places])
    z1, z2 = (np.asarray([p[k] for p in places], np.float32) for k in (2, 3))
    return Set(Examples(hidden, z1, z2, np.asarray(changed, np.float32)), np.asarray([p[0] for p in places]))


def features(
    target: mj.Pretrained, texts: Sequence[Sequence[int]], places: list[tuple[int, int]]
) -> np.ndarray:
    """f32[n, E]: what the target knew where it chose the token after each place."""

    @jax.jit
    def hidden(params, tokens):
        return read(target.model, params, tokens, jnp.zeros_like(tokens)).hidden

    wanted: dict[int, list[tuple[int, int]]] = {}
    for n, (text, place) in enumerate(places):
        wanted.setdefault(text, []).append((n, place))
    found = np.zeros((len(places), target.config.hidden_size), np.float32)
    for group, tokens in batches(texts, 8, target.config.max_positions):
        values = np.asarray(hidden(target.params, jnp.asarray(tokens)), np.float32)
        for row, text in enumerate(group):
            for n, place in wanted.get(text, []):
                found[n] = values[row, place]
    return found


def auc(score: np.ndarray, changed: np.ndarray) -> float:
    """Chance that a changed example has the higher score, ties counting half (Mann and Whitney)."""
    bad, good = score[changed > 0.5], np.sort(score[changed <= 0.5])
    if not len(bad) or not len(good):
        return float("nan")
    below, upto = np.searchsorted(good, bad, "left"), np.searchsorted(good, bad, "right")
    return float(np.mean(below + upto) / 2 / len(good))


def curves(held: Set, harm: np.ndarray) -> dict[str, Any]:
    """AUC of each indicator with a 95% interval over texts, and of the head less the ratio's."""
    e = held.examples
    scores = {"learned": harm, "ratio": -e.z2 / np.where(e.z1 > 0, e.z1, np.inf), "gap": e.z1 - e.z2}
    rng = np.random.default_rng(0)
    by_text = [np.flatnonzero(held.text == t) for t in np.unique(held.text)]
    resampled: dict[str, list[float]] = {name: [] for name in scores}
    for _ in range(RESAMPLES):
        chosen = np.concatenate([by_text[i] for i in rng.integers(0, len(by_text), len(by_text))])
        for name, score in scores.items():
            resampled[name].append(auc(score[chosen], e.changed[chosen]))
    found: dict[str, Any] = {"examples": len(harm), "changed": float(e.changed.mean())}
    for name, score in scores.items():
        low, high = np.nanquantile(resampled[name], [0.025, 0.975])
        found[name] = [auc(score, e.changed), float(low), float(high)]
    difference = np.subtract(resampled["learned"], resampled["ratio"])
    low, high = np.nanquantile(difference, [0.025, 0.975])
    found["learned_less_ratio"] = [found["learned"][0] - found["ratio"][0], float(low), float(high)]
    return found


class Loop:
    """Decoding held-out problems with a rule, whether it has weights or not."""

    def __init__(self, target: mj.Pretrained, drafter: Any, problems: list[Any], head: Any):
        self._target, self._drafter, self._problems, self._head = target, drafter, problems, head
        questions = [target.encode(p.question, chat=True) for p in problems]
        self._requests = mj.make_requests(target, questions, max_new_tokens=ANSWER_TOKENS)

    def run(self, rule: Any, theta: float) -> dict[str, np.ndarray]:
        """f64[n] each: steps, emitted, regret and score of every problem."""
        columns: dict[str, list[float]] = {"steps": [], "emitted": [], "regret": [], "score": []}
        loaded = mj.verify.LoadedRule(dataclasses.replace(rule, theta=np.float32(theta)), self._head)
        for group in groups(self._requests, ROWS):
            decoder, params, state = prepare(self._target, self._drafter, group, verify=loaded, rows=ROWS)
            state, stats = decode.run(decoder, params, state)
            tokens, length, stats = jax.device_get((state.tokens, state.length, stats))
            for row, request in enumerate(group):
                problem = self._problems[len(columns["score"])]
                said = tokens[row, len(request.prompt_tokens) : length[row]].tolist()
                columns["score"].append(float(arithmetic.is_correct(problem, self._target.decode(said))))
                for name in ("steps", "emitted", "regret"):
                    columns[name].append(float(getattr(stats, name)[row]))
        return {name: np.asarray(values) for name, values in columns.items()}


def tau(columns: dict[str, np.ndarray]) -> float:
    return columns["emitted"].sum() / columns["steps"].sum()


def at_tau(
    run: Callable[[float], dict[str, np.ndarray]], wanted: float, halvings: int = 8
) -> tuple[float, dict]:
    """Bisect the head's threshold, on a log scale, for a tau."""
    low, high, best = np.log(1e-4), 0.0, None
    for _ in range(halvings):
        middle = (low + high) / 2
        columns = run(float(np.exp(middle)))
        if best is None or abs(tau(columns) - wanted) < abs(tau(best[1]) - wanted):
            best = float(np.exp(middle)), columns
        if abs(tau(columns) - wanted) < 0.003 * wanted:
            break
        low, high = (middle, high) if tau(columns) < wanted else (low, middle)
    assert best is not None
    return best


def in_the_loop(loop: Loop) -> list[dict[str, Any]]:
    """Score of both rules at the tau of each theta."""
    rows = []
    for theta in THETAS:
        ratio = loop.run(mj.verify.mars(), theta)
        chosen, learned = at_tau(lambda t: loop.run(mj.contrib.learned(), t), tau(ratio))
        rng = np.random.default_rng(0)
        n = len(ratio["score"])
        weights = rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES) / n
        difference = weights @ (learned["score"] - ratio["score"])
        low, high = np.quantile(difference, [0.025, 0.975])
        row: dict[str, Any] = {"theta": theta, "learned_theta": chosen, "problems": n}
        for name, columns in (("ratio", ratio), ("learned", learned)):
            row[name] = {
                "tau": tau(columns),
                "score": float(columns["score"].mean()),
                "regret_per_token": float(columns["regret"].sum() / columns["emitted"].sum()),
            }
        row["score_difference"] = [float((learned["score"] - ratio["score"]).mean()), float(low), float(high)]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


INDICATORS = {"learned": look("learned"), "ratio": look("mars"), "gap": look("mars (gap)")}
"""How the indicators look: as the rules that read them."""


def draw(report: dict[str, Any], files: list[Path]) -> None:
    """The areas under the curves of the indicators, and score over tau in the loop."""
    loop = report["loop"]
    counts = ", ".join(f"{found['examples']} tokens of {task}" for task, found in report["auc"].items())
    facts = (
        "tiny/target drafted by tiny/draft, a chain of 5",
        f"{report['environment']['cores']} cores",
        f"n = {counts}, {loop[0]['problems']} problems in the loop",
        report.get("date"),
        "whiskers: 95%, on the left by the bootstrap over texts, on the right Wilson's",
    )
    told = "; ".join(fact for fact in facts if fact) + "."
    with picture(files, columns=2, panel=(4.4, 3.1), caption=told) as (row,):
        for offset, (name, how) in zip((-0.15, 0, 0.15), INDICATORS.items(), strict=True):
            found = [report["auc"][task][name] for task in report["auc"]]
            values, spans = [f[0] for f in found], [f[1:] for f in found]
            places = [place + offset for place in range(len(found))]
            line = {**how.line, "linestyle": "none"}
            row[0].errorbar(places, values, yerr=whiskers(values, spans), label=name, **line)
        zero_line(row[0], 0.5)
        row[0].set_xticks(range(len(report["auc"])), report["auc"])
        row[0].set(
            xlim=(-0.5, 1.5),
            ylim=(0.35, 1.02),
            ylabel="area under the curve",
            title="which relaxed tokens change the outcome",
        )
        no_grid(row[0], "x")
        for name in ("ratio", "learned"):
            x, y = ([r[name][key] for r in loop] for key in ("tau", "score"))
            spans = [wilson(r[name]["score"], r["problems"]) for r in loop]
            percent, ends = [100 * v for v in y], [[100 * e for e in span] for span in spans]
            row[1].errorbar(x, percent, yerr=whiskers(percent, ends), **INDICATORS[name].line)
        row[1].set(xlabel="tau", ylabel="problems right, %", title="in the loop, arithmetic")
        row[1].set(xlim=(4.6, 5.1), ylim=(None, 101))


def wilson(share: float, count: int) -> list[float]:
    """95% interval of a share of `count` (Wilson 1927)."""
    z = 1.959964
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * (share * (1 - share) / count + z**2 / (4 * count**2)) ** 0.5
    return [middle - half, middle + half]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stories", type=Path, nargs=2, metavar=("TRAIN", "HELDOUT"), help="text files")
    parser.add_argument("--work", type=Path, help="a new folder for the training")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--problems", type=int, nargs=2, default=(1500, 1000), metavar=("TRAIN", "HELDOUT"))
    parser.add_argument("--prompts", type=int, nargs=2, default=(400, 128), metavar=("TRAIN", "HELDOUT"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--save", type=Path, help="a folder for the head, as `--verify learned:FOLDER` reads it"
    )
    parser.add_argument(
        "--picture", action="store_true", help="draw what is in the JSON, and measure nothing"
    )
    args = parser.parse_args()
    if args.picture:
        draw(json.loads(args.output.read_text()), [args.output.with_suffix(".png")])
        return
    if args.stories is None or args.work is None:
        parser.error("--stories and --work are needed")
    target = mj.load(assets.TARGET, dtype="float32")
    drafter = mj.drafters.load(f"model:{assets.DRAFT}", target, num_draft_tokens=CHAIN, dtype="float32")
    sets: dict[str, list[Set]] = {"arithmetic": [], "stories": []}
    for i, split in enumerate(("train", "eval")):
        questions = [p.question for p in arithmetic.generate(args.problems[i], split=split)]
        asked = [target.encode(q, chat=True) for q in questions]
        sets["arithmetic"].append(collect(target, drafter, asked, scored=True, seed=i))
        begun = story_prompts(target, list(documents(args.stories[i])), args.prompts[i])
        sets["stories"].append(collect(target, drafter, begun, scored=False, seed=i))
        print(split, {k: (len(v[i].text), v[i].examples.changed.mean()) for k, v in sets.items()}, flush=True)
    pooled = Examples(*(np.concatenate(c) for c in zip(*(s[0].examples for s in sets.values()), strict=True)))
    head = train(pooled, args.work, steps=args.steps)
    if args.save:
        mj.contrib.save(args.save, head)
    held = {
        task: (s[1], np.asarray(indicator.logit(head, *map(jnp.asarray, s[1].examples[:3]))))
        for task, s in sets.items()
    }
    report: dict[str, Any] = {
        "environment": {"python": platform.python_version(), "jax": jax.__version__, "cores": os.cpu_count()},
        "date": datetime.date.today().isoformat(),
        "training_examples": {task: len(s[0].text) for task, s in sets.items()},
        "auc": {task: curves(*pair) for task, pair in held.items()},
    }
    print(json.dumps(report["auc"]), flush=True)
    problems = list(arithmetic.generate(args.problems[1], split="eval"))
    report["loop"] = in_the_loop(Loop(target, drafter, problems, head))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    draw(report, [args.output.with_suffix(".png")])


if __name__ == "__main__":
    main()
