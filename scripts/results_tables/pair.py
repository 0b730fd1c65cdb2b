"""The embedded pair and its drafters, and what nodes cost on a CPU."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from results_tables.bars import bar, gain, load, span

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


def blocks() -> dict[str, Any]:
    """eval_dflash.json: what a draft costs, of all drafters with weights, and what it wins; tpu_cost_dflash.json."""
    report = load("eval_dflash.json")
    drafts, speed, equal = report["draft"], report["speed"], report["lossless"]["equal"]
    of_block, of_eagle = (drafts[f"{name} dynamic tree"]["milliseconds"] for name in ("dflash", "eagle3"))
    prompts, chi, ahead = report["lossless"]["prompts"], report["chi_square"], report.get("ahead", {})
    chains = {name: row for name, row in ahead.items() if name.startswith("chain")}
    mine = {name: count for name, count in equal.items() if name.startswith("dflash")}
    tau = {name: speed[f"{name} dynamic tree"]["tau"] for name in ("dflash", "eagle3")}
    cases = load("tpu_cost_dflash.json")["cases"]["now"]
    eagle, block = (_draft_of(cases[name]) for name in ("tree", "dflash"))
    ops = cases["dflash"]["draft_ops"]["best_first"], cases["tree"]["draft_ops"]["level"]
    where = "Llama-3.1-8B on v5e 2x2"
    bars = [
        bar("Time of a draft of 60 nodes, DFlash over EAGLE-3", of_block / of_eagle, "{:.2f} x", "<= 0.5 x"),
        bar(f"Greedy text of {len(mine)} DFlash drafts is that of autoregression, {prompts} ragged prompts",
            min(mine.values()), f"{{}} of {prompts} each", f"== {prompts}"),
        bar("Instructions of a tree of 60 from marginals over those of a level of EAGLE's, on v5e", ops[0] / ops[1],
            "{:.2f} x", "<= 1.5 x"),
        bar(f"Bytes of a draft of 60 nodes, DFlash over EAGLE-3, {where}", block[0] / eagle[0], "{:.2f} x", "<= 0.4 x"),
        bar(f"Estimated time of it, {where}", block[1] / eagle[1], "{:.2f} x", "<= 0.4 x"),
    ]  # fmt: skip
    name = f"Least p of a chi-square test at temperature 1, {chi['rows']} samples of each draft"
    bars.append(bar(name, min(row["p"] for row in chi["drafters"].values()), "{:.2f}", ">= 0.01"))
    alone = cases["small-6"]["estimate"]["parts"]
    of_small = 1e3 * sum(seconds for part, seconds in alone.items() if part.startswith("draft"))
    return {
        "bars": bars,
        "cost": of_block / of_eagle,
        "floors": [moved / eagle[0] for moved in _floors()],
        "speed": [
            [name, f"{row['tau']:.2f}", f"{row['tokens_per_s']:.0f}", f"{_paired(row, speed['none']):.2f} x"]
            for name, row in speed.items()
        ],
        "prompts": len(speed["none"]["all"]),
        "chi": [
            [name, row["rule"], str(row["cells"]), f"{row['statistic']:.1f}", f"{row['p']:.2f}"]
            for name, row in chi["drafters"].items()
        ],
        "gb": [found[0] / 1e9 for found in (eagle, block)],
        "ms": [1e3 * found[1] for found in (eagle, block)],
        "ahead": [
            [
                length,
                *(f"{row['tokens_per_s'][way]:.0f}" for way in ("in turns", "at once")),
                f"{row['ratio']:.2f} x",
                f"{100 * row['held']:.0f}%",
            ]
            for length, row in chains.items()
        ],
        "ahead_equal": all(row["equal"] == row["prompts"] for row in chains.values()),
        "tau": [tau["dflash"], tau["eagle3"]],
        "apart_ms": [of_small, 1e3 * sum(alone.values()) - of_small],
    }


def _paired(row: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    """The median of the ratios of two arms' rates, prompt by prompt."""
    return statistics.median(mine / other for mine, other in zip(row["all"], base["all"], strict=True))


def _floors() -> list[float]:
    """Bytes that a chip of four reads for a block of the published shape for Llama-3.1-8B: of its layers and of what
    fuses the features in bfloat16; with the target's unembedding; both in 8 bits one after the other; and with an
    unembedding of 32,000 tokens."""
    width, inner, keys, vocab, chips = 4096, 14336, 1024, 128256, 4
    own = 5 * (2 * width * width + 2 * width * keys + 3 * width * inner) + 5 * width * width
    unembedding, short = width * vocab, width * 32000
    return [
        moved / chips
        for moved in (2 * own, 2 * (own + unembedding), own + 2 * unembedding, own + unembedding, own + short)
    ]


def _draft_of(case: Mapping[str, Any]) -> tuple[float, float]:
    """Bytes of a device and seconds of drafting and of reading what was accepted."""

    def own(part: str) -> bool:
        return part.startswith(("draft", "update"))

    parts, estimate = case["figures"]["parts"], case["estimate"]["parts"]
    moved = sum(
        row.get("read_bytes", 0) + row.get("written_bytes", 0) for part, row in parts.items() if own(part)
    )
    return moved, sum(seconds for part, seconds in estimate.items() if own(part))


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
    ]  # fmt: skip
    rates = {name: row["tokens_per_second"] for name, row in compared.items()}
    return {
        "bars": rows,
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


def _ratio(found: Mapping[str, float]) -> str:
    return span(found["median"], found["lower_95"], found["upper_95"])


def on_cpu() -> dict[str, Any]:
    """bench_cpu.json: nodes, n-grams and a long prompt at 135M parameters on a CPU."""
    report = load("bench_cpu.json")
    prompt = report["prompt"]
    return {
        "turns": report["turns"],
        "cores": report["cores"],
        "nodes": [
            [str(row["nodes"]), f"{row['ms']:.0f}", _ratio(row["over_one"])] for row in report["nodes"]
        ],
        "ngram": [
            [
                row["prompts"],
                *(f"{row['tokens_per_second'][name]:.0f}" for name in ("none", "ngram")),
                _ratio(row["ngram_over_none"]),
            ]
            for row in report["ngram"]
        ],
        "prompt": prompt | {"ratio": _ratio(prompt["over_transformers"])},
    }


def shapes() -> dict[str, Any]:
    """bench_shapes.json: the shapes of Qwen2.5-1.5B and 0.5B on a CPU."""
    report = load("bench_shapes.json")
    plain, drafted = report["plain"], report["drafted"]
    return {
        "turns": report["turns"],
        "cores": report["cores"],
        "plain": [[name, f"{speed:.2f}"] for name, speed in plain["tokens_per_second"].items()],
        "best": plain["best_of_transformers"].removeprefix("transformers, "),
        "over": {name: _ratio(found) for name, found in plain.items() if "_over_" in name},
        "forward": [
            [
                str(row["rows"]),
                str(row["nodes"]),
                f"{row['ms']:.0f}",
                f"{row['products_ms']:.0f}",
                _ratio(row["over_products"]),
                _ratio(row["over_one"]),
            ]
            for row in report["forward"]["rows"]
        ],
        "drafted": [
            [name, f"{row['tau']:.2f}", f"{row['tokens_per_second']:.2f}", _ratio(row["over_plain"])]
            for name, row in drafted.items()
            if "tau" in row  # which the time of a step and of the draft alone have not
        ],
        "speeds": {name: drafted[name]["tokens_per_second"] for name in ("plain", "the draft alone")},
        "ngram": report["ngram"] | {"ratio": _ratio(report["ngram"]["over_plain"])},
    }
