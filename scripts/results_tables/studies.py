"""What relaxed tokens do to a text, calibration, and the learned indicator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_tables.bars import Bar, load, span


def studies() -> dict[str, Any]:
    """compounding, theta_arithmetic.json and eval_indicator.json."""
    compounding = load("compounding/compounding.json")["tasks"]
    math = compounding["arithmetic"]
    score = {
        kind: {k: 100 * math[kind]["score"][k][0] for k in ("mean", "low", "high")}
        for kind in ("relaxed", "control")
    }
    surprise = {task: [found["relaxed"]["grows"]["surprise"][k][0] for k in ("mean", "low", "high")]
                for task, found in compounding.items()}  # fmt: skip
    theta, indicator = load("theta_arithmetic.json"), load("eval_indicator.json")
    failed = [trial["theta"] for trial in theta["trials"] if not trial["passed"]]
    return {
        "events": math["relaxed"]["events"],
        "texts": math["texts"],
        "cost": score["relaxed"]["mean"],
        "forced": span(*score["control"].values(), show="{:.0f}"),
        "surprise": {task: span(*values, show="{:+.3f}") for task, values in surprise.items()},
        "grows": any(low > 0 for _, low, _ in surprise.values()),
        "theta": theta,
        "failed": failed,
        "auc": {
            task: {name: span(*found[name], show="{:.3f}") for name in ("learned", "ratio")}
            for task, found in indicator["auc"].items()
        },
        "auc_better": all(found["learned_less_ratio"][1] > 0 for found in indicator["auc"].values()),
        "loop": indicator["loop"][0],
        "loop_lost": span(*(100 * x for x in indicator["loop"][0]["score_difference"]), show="{:.1f}"),
        "looser_unreached": all(
            row["learned"]["tau"] < row["ratio"]["tau"] - 0.01 for row in indicator["loop"][1:]
        ),
    }


def contexts() -> dict[str, Any]:
    """eval_context.json: thresholds by context beside the global one."""
    report = load("eval_context.json")
    choices = [(task, choice) for task, found in report["tasks"].items() for choice in found["at_equal_risk"]]
    ahead = [choice for _, choice in choices if choice["beats_global"]]
    return {
        "bars": [_context_bar(task, choice) for task, choice in choices],
        "count": len(choices[0][1]["rules"]) - 1,
        "tried": len(choices),
        "ahead": len(ahead),
        "by": [
            (
                choice["rules"][choice["best"]]["tau_at_equal_risk_difference"][0],
                choice["rules"]["global"]["tau"],
            )
            for choice in ahead
        ],
    }


def _context_bar(task: str, choice: Mapping[str, Any]) -> Bar:
    best, rules = choice["best"], choice["rules"]
    difference = span(*rules[best]["tau_at_equal_risk_difference"], show="{:+.3f}")
    return Bar(
        f"{task}, where global theta is {choice['theta']:.2f}: {best}",
        f"tau {difference} of {rules['global']['tau']:.2f}",
        "> 0",
        "yes" if choice["beats_global"] else "no",
    )
