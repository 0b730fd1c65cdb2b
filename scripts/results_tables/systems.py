"""Systems that ask the target less often, and what a rule costs: eval_systems.json and rule_cost.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_tables.bars import bar, load, span

NAMES = {
    "strict": "strict chain of 5",
    "mars": "`mars` on it",
    "trispec": "TriSpec",
    "via_sd": "VIA-SD",
    "sprinter": "SPRINTER",
}


def systems() -> dict[str, Any]:
    """eval_systems.json."""
    report = load("eval_systems.json")
    rows = [_row(name, arm) for name, arms in report["arms"].items() for arm in arms]
    published = report["arms"]["trispec"][0]
    within = [arm for arm in report["arms"]["trispec"] if arm["accuracy_over_base"]["low"] >= -0.02]
    fewest = min(within, key=lambda arm: arm["calls_over_base"]) if within else None
    lost = published["accuracy_over_base"]
    return {
        "problems": report["problems"],
        "environment": report["environment"],
        "rows": rows,
        "fewest": fewest,
        "published": published,
        "bars": [
            bar(
                "TriSpec at its margin of 0.5: accuracy below strict, points, lower 95% bound",
                -100 * lost["low"], "{:.1f}", "<= 2",
            ),
            bar("the same: target calls a token over strict", published["calls_over_base"], "{:.2f} x", "<= 0.6 x"),
        ],
        "speeds": [
            (rows, *(f"{found[name]:.0f}" for name in NAMES)) for rows, found in report.get("tokens_per_s", {}).items()
        ],
        "speed_names": list(NAMES.values()),
    }  # fmt: skip


def _row(name: str, arm: Mapping[str, Any]) -> tuple[str, ...]:
    setting = arm["setting"]
    shown = (
        "" if setting is None else ", ".join(map(str, setting)) if isinstance(setting, list) else str(setting)
    )
    change = {key: 100 * value for key, value in arm["accuracy_over_base"].items()}
    sure = f"{100 * arm['confidently_wrong']:.2f}% of {100 * arm['sure']:.0f}%" if "sure" in arm else ""
    return (
        NAMES[name],
        shown,
        f"{100 * arm['accuracy']:.1f}%",
        span(change["mean"], change["low"], change["high"], "{:+.1f}"),
        f"{arm['calls_per_token']:.3f} ({arm['calls_over_base']:.2f} x)",
        f"{100 * arm['trusted_share']:.0f}%",
        f"{arm['regret_per_token']:.3f}",
        f"{arm['modelled']:.3f}",
        sure,
    )


def costs() -> dict[str, Any]:
    """rule_cost.json."""
    report = load("rule_cost.json")
    medians = [case["time_ratio"]["median"] for case in report["cases"]]
    return {
        "cores": report["cores"],
        "count": len(medians),
        "least": min(medians),
        "most": max(medians),
        "bars": [
            bar(
                f"`{case['rule']}`, {case['group']}",
                case["time_ratio"]["upper_95"],
                f"{case['time_ratio']['median']:.3f}, at most {{:.3f}} x",
                f"<= {case['bar']} x",
                turns=case["starts"] * case["pairs"],
            )
            for case in report["cases"]
        ],
    }
