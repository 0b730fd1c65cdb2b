"""`mars` and its controls on four pairs of task and draft, and beside transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from results_tables.bars import Bar, bar, gain, load

EVIDENCE = {
    "stories-chain": "draft model",
    "stories-eagle3": "EAGLE-3 head",
    "arithmetic-chain": "draft model",
    "arithmetic-eagle3": "EAGLE-3 head",
}
"""Folders of scripts/results/evidence, and the drafter of each."""


def evidence() -> dict[str, Any]:
    """evidence/*/summary.json: `mars` and its controls on four pairs of task and draft."""
    rows, arms, replays = [], {}, {}
    for folder, draft in EVIDENCE.items():
        for part in load(f"evidence/{folder}/summary.json")["tables"]:
            found = {arm["arm"]: arm for arm in part["arms"]}
            arms[folder, int(part["temperature"])] = found
            replays[folder, int(part["temperature"])] = dict(
                zip(part["replay"]["thetas"], part["replay"]["tau"], strict=True)
            )
            rows.append(_evidence_row(part, draft, found))
    loose = arms["arithmetic-chain", 0]["mars theta=0.7"]
    story = arms["stories-chain", 1]["mars theta=0.9"]
    return {
        "rows": rows,
        "bars": _evidence_bars(arms),
        # tau of stories with the draft model at temperature 1 and theta 0.7
        "decoded": arms["stories-chain", 1]["mars theta=0.7"]["tau"],
        "replayed": replays["stories-chain", 1][0.7],
        "arms": arms,
        "loose_lost": 100 * (arms["arithmetic-chain", 0]["autoregressive"]["score"] - loose["score"]),
        "strict_tau": arms["arithmetic-chain", 1]["exact"]["tau"],
        "sharper": story["recovered_interval"][0] > 1,
        "tree_never_pays": all(
            found[arm]["speedup"] < 1
            for (folder, _), found in arms.items()
            if folder.endswith("eagle3")
            for arm in ("exact", "mars theta=0.9")
        ),
    }


def _percents(interval: Sequence[float]) -> str:
    return ", ".join(f"{100 * x:.1f}" for x in interval)


def _evidence_row(part: Mapping[str, Any], draft: str, arms: Mapping[str, Any]) -> list[str]:
    alone, strict = arms["autoregressive"], arms["exact"]
    mars, matched = arms["mars theta=0.9"], arms["mars(gap) matched"]
    return [
        f"{part['task']}, {part['temperature']:g}",
        draft,
        f"{strict['tau']:.2f}",
        f"{mars['tau']:.2f} ({gain(mars['tau'], strict['tau']):+.0f}%)",
        f"{matched['tau']:.2f}",
        f"{100 * mars['relaxed_share']:.1f}%",
        f"{mars['regret_per_token']:.3f}",
        f"{strict['speedup']:.2f}x, {mars['speedup']:.2f}x",
        f"{100 * alone['score']:.1f}",
        _distance(alone, mars, part["task"]),
        f"{100 * (matched['score'] - alone['score']):+.1f}",
    ]


def _distance(alone: Mapping[str, Any], arm: Mapping[str, Any], task: str) -> str:
    """What a rule adds to the target's own score, in points, and what that is. The interval is that of the ratio of
    the two, times the target's score."""
    low, high = (100 * alone["score"] * (x - 1) for x in arm["recovered_interval"])
    word = "lost" if high < 0 else "as alone" if low <= 0 else "better" if task == "arithmetic" else "sharper"
    return f"{100 * (arm['score'] - alone['score']):+.1f} [{low:+.1f}, {high:+.1f}], {word}"


def _evidence_bars(arms: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[Bar]:
    bars = []
    for folder in ("arithmetic-chain", "arithmetic-eagle3"):
        for temperature in (0, 1):
            mars = arms[folder, temperature]["mars theta=0.9"]
            case = f"{mars['problems']:,} arithmetic problems, temperature {temperature}, {EVIDENCE[folder]}"
            interval = _percents(mars["recovered_interval"])
            case = f"Accuracy recovered by `mars(theta=0.9)`, {case}"
            bars.append(bar(case, 100 * mars["recovered"], f"{{:.1f}}% [{interval}]", ">= 98.1%"))
    for folder, draft in EVIDENCE.items():
        found = arms[folder, 1]
        shape = "chain of 5" if folder.endswith("chain") else "dynamic tree of 60"
        case = (
            f"tau of `mars(theta=0.9)` over `exact`, temperature 1, {folder.split('-')[0]}, {draft}, {shape}"
        )
        bars.append(
            bar(case, gain(found["mars theta=0.9"]["tau"], found["exact"]["tau"]), "{:+.1f}%", ">= +13%")
        )
    return bars


def _assisted_bars(report: Mapping[str, Any]) -> list[Bar]:
    return [
        bar(
            "`mars(theta=0.9)` over transformers' assisted generation, tokens/s, batch 1, "
            f"{case['task']}, temperature {case['temperature']:g}",
            case["ways"]["mars-jax mars(0.9)"]["against_assisted"], "{:.2f} x", ">= 4 x",
            prompts=case["prompts"], turns=len(case["ways"]["mars-jax mars(0.9)"]["seconds"]),
        )
        for case in report["cases"]
        if case["batch"] == 1
    ]  # fmt: skip


def _own(case: Mapping[str, Any]) -> float:
    """Tokens/s of `mars` over our own decoding without a draft."""
    ways = case["ways"]
    return (
        ways["mars-jax mars(0.9)"]["tokens_per_second"] / ways["mars-jax autoregressive"]["tokens_per_second"]
    )


def assisted() -> dict[str, Any]:
    """bench_assisted.json: transformers on PyTorch beside mars-jax."""
    report = load("bench_assisted.json")
    names = (
        "transformers generate", "transformers assisted",
        "mars-jax autoregressive", "mars-jax exact", "mars-jax mars(0.9)",
    )  # fmt: skip
    cases = sorted(
        report["cases"], key=lambda case: (case["task"] != "stories", case["batch"], case["temperature"])
    )
    rows = [
        [
            case["task"],
            f"{case['temperature']:g}",
            str(case["batch"]),
            *(f"{case['ways'][name]['tokens_per_second']:.0f}" for name in names),
            f"{case['ways'][names[-1]]['against_assisted']:.2f} x",
            f"{_own(case):.2f} x",
        ]
        for case in cases
    ]
    of_batches = {batch: [_own(case) for case in cases if case["batch"] == batch] for batch in (1, 8)}
    return {
        "rows": rows,
        "environment": report["environment"],
        "bars": _assisted_bars(report),
        "least": {batch: min(found) for batch, found in of_batches.items()},
        "most": {batch: max(found) for batch, found in of_batches.items()},
        "repeats": len(cases[0]["ways"][names[0]]["seconds"]),
        "prompts": cases[0]["prompts"],
    }
