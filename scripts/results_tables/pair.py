"""The decode loop, the embedded pair and its drafters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_tables.bars import bar, gain, load

DRAFTERS = {
    "model chain": "`model:tiny/draft`, chain of 5",
    "model dynamic tree": "`model:tiny/draft`, dynamic tree of 60",
    "eagle3 chain": "`eagle:tiny/eagle3`, chain of 5",
    "eagle3 dynamic tree": "`eagle:tiny/eagle3`, dynamic tree of 60",
    "ngram": "`ngram`",
}
"""Names in eval_drafters.json, and what the page calls them."""
RULES = (
    ("exact", 0),
    ("mars over exact", 0),
    ("exact", 1),
    ("mars over exact", 1),
    ("rejection", 1),
    ("mars over rejection", 1),
)
"""Rules and temperatures of eval_embedded.json."""


def speed() -> dict[str, Any]:
    """bench_decode.json: the decode loop with random weights beside transformers."""
    report = load("bench_decode.json")
    rows = []
    for row in report["results"]:
        digits = 0 if row["unit"] == "compilations" else 2 if "tokens/s" in row["unit"] else 3
        case = row["case"][0].upper() + row["case"][1:]
        case += f"; tau {row['tau']:.2f}" if "tau" in row else ""
        rows.append(bar(case, row["figure"], f"{{:.{digits}f}} {row['unit']}", row["bar"]))
    same = [row["same_tokens"] for row in report["results"] if "same_tokens" in row]
    repeats = len(next(iter(report["results"][0]["seconds"].values())))
    return {"rows": rows, "machine": report["machine"], "repeats": repeats, "same": all(same)}


def family() -> dict[str, Any]:
    """eval_embedded.json: the embedded pair."""
    report = load("eval_embedded.json")

    def tau(rule: str, temperature: int) -> float:
        return report[f"stories, {rule}, temperature {temperature}"]["tau"]

    def kept(rule: str, temperature: int) -> float:
        strict, relaxed = (
            report[f"arithmetic, {name}, temperature {temperature}"]["accuracy"]
            for name in (rule, f"mars over {rule}")
        )
        return 100 * relaxed / strict

    accuracy = report["arithmetic, exact, temperature 0"]
    compared = {row["rule"]: row for row in report["speed bfloat16"]["rules"]}
    start = report["start"]
    rows = [
        bar("Target, held-out stories", report["bits target"]["bits_per_byte"], "{:.3f} bits per byte", "<= 0.88"),
        bar(
            f"Target, {accuracy['problems']:,} held-out arithmetic problems, greedy",
            100 * accuracy["accuracy"], "{:.1f}% right", ">= 90%",
        ),
        bar("tau on stories, temperature 0, `exact`", tau("exact", 0), "{:.2f}", ">= 3.2"),
        bar("tau on stories, temperature 1, `exact`", tau("exact", 1), "{:.2f}", ">= 2.6"),
        bar("the same with `rejection`", tau("rejection", 1), "{:.2f}", ">= 2.6"),
        *(
            bar(
                f"`mars(theta=0.9)` over `{rule}` on it, temperature 1",
                gain(tau(f"mars over {rule}", 1), tau(rule, 1)), "{:+.1f}% tau", ">= +13%",
            )
            for rule in ("exact", "rejection")
        ),
        *(
            bar(
                f"arithmetic accuracy kept by `mars` over `{rule}`, temperature {temperature}",
                kept(rule, temperature), "{:.1f}%", ">= 98.1%",
            )
            for rule, temperature in (("exact", 0), ("exact", 1), ("rejection", 1))
        ),
        bar(
            "`--compare`, stories, batch 1, bfloat16: `mars` against autoregression",
            compared["mars"]["speedup"], "{:.2f} x tokens/s", ">= 1.6",
        ),
        bar("Start to first token, nothing compiled yet", start["cold_seconds"], "{:.1f} s", "< 10 s"),
        bar("The same, second start", start["second_seconds"], "{:.1f} s", "< 4 s"),
    ]  # fmt: skip
    rates = {name: row["tokens_per_second"] for name, row in compared.items()}
    return {
        "rows": rows,
        "environment": report["environment"],
        "rates": rates,
        "problems": accuracy["problems"],
        "bits": {
            name: f"{report[f'bits {name}']['bits_per_byte']:.3f}"
            for name in ("target", "draft", "stories260k")
        },
        "rules": [_rule_row(report, rule, temperature) for rule, temperature in RULES],
        "steps": ", ".join(f"{k}: {100 * share:.1f}%" for k, share in accuracy["accuracy_by_steps"].items()),
        "speeds": [_speed_row(report, dtype) for dtype in ("float32", "bfloat16")],
    }


def _rule_row(report: Mapping[str, Any], rule: str, temperature: int) -> list[str]:
    stories, problems = (
        report[f"{task}, {rule}, temperature {temperature}"] for task in ("stories", "arithmetic")
    )
    accuracy = f"{100 * problems['accuracy']:.1f}%"
    return [f"{rule}, temperature {temperature}", f"{stories['tau']:.2f}", f"{problems['tau']:.2f}", accuracy]


def _speed_row(report: Mapping[str, Any], dtype: str) -> list[str]:
    alone, *others = report[f"speed {dtype}"]["rules"]
    relative = [f"{row['tokens_per_second']:.0f} ({row['speedup']:.2f}x)" for row in others]
    return [dtype, f"{alone['tokens_per_second']:.0f}", *relative]


def drafters() -> dict[str, Any]:
    """eval_drafters.json: tau of every drafter."""
    report = load("eval_drafters.json")

    def tau(drafter: str, rule: str, temperature: int) -> float:
        return report[f"stories, {drafter}, {rule}, temperature {temperature}"]["tau"]

    rows = []
    for drafter, name in DRAFTERS.items():
        strict, relaxed = tau(drafter, "exact", 1), tau(drafter, "mars", 1)
        rows.append([
            name, f"{tau(drafter, 'exact', 0):.2f}", f"{strict:.2f}",
            f"{relaxed:.2f} ({gain(relaxed, strict):+.0f}%)",
        ])  # fmt: skip
    lossless, cost = report["lossless"], {name: row["milliseconds"] for name, row in report["cost"].items()}
    equal, prompts = lossless["equal"], lossless["prompts"]
    tree = "eagle3 dynamic tree"
    bars = [
        bar(
            f"Greedy text of every drafter is that of autoregression, float32, {prompts} ragged prompts, "
            f"{len(equal)} drafters",
            min(equal.values()), f"{{}} of {prompts} each", f"== {prompts}",
        ),
        bar(
            "tau of the EAGLE-3 head's dynamic tree over the draft model's chain, temperature 0",
            tau(tree, "exact", 0) / tau("model chain", "exact", 0), "{:.2f} x", ">= 1.25 x",
        ),
        bar(
            "`mars(theta=0.9)` over `exact` on that tree, temperature 1",
            gain(tau(tree, "mars", 1), tau(tree, "exact", 1)), "{:+.1f}% tau", ">= +13%",
        ),
        bar(
            "A step with a dynamic tree of 60 nodes over one with 60 static nodes, batch 1",
            cost[tree] / cost["eagle3 static tree"], "{:.2f} x", "<= 1.6 x",
        ),
    ]  # fmt: skip
    return {
        "rows": rows,
        "bars": bars,
        "stories": report["stories, model chain, exact, temperature 0"]["prompts"],
        "own_tree_is_longer": tau("model dynamic tree", "exact", 0) > tau(tree, "exact", 0),
        "tree_ms": sorted(cost[name] for name in ("model dynamic tree", tree)),
    }
