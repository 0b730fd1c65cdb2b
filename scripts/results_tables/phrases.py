"""Rules over stretches of tokens beside margins of single tokens: eval_phrases.json."""

from __future__ import annotations

from typing import Any

from results_tables.bars import load, span

SCORE = {"stories": "{:+.3f}", "arithmetic": "{:+.1f}"}
"""Nats per token; percent of the answers."""


def phrases() -> dict[str, Any]:
    """The variables of the section: differences at equal tau, and settings calibrated alike."""
    report = load("eval_phrases.json")
    less = report["less_margins"]
    return {
        "less": [_less(found) for found in less],
        "certified": [_certified(found) for found in report["calibrated"]],
        # Differences that zero is not among, by what they are of.
        "better": _decided(less, lambda values: values[1] > 0),
        "worse": _decided(less, lambda values: values[2] < 0),
        "of": {(c["task"], c["family"]): c for c in report["calibrated"]},
        "figure": {
            (t["task"], a["arm"]): a for t in report["tables"] if t["draft"] == "chain" for a in t["arms"]
        },
        "interval": lambda values, task="stories": _score(task, values),
    }


def _decided(less: list[dict[str, Any]], holds: Any) -> list[tuple[str, float, str, str]]:
    return sorted(
        {
            (found["task"], found["temperature"], found["family"], found["margin"])
            for found in less
            for key in ("at_default", "over_sweep")
            if found[key] and holds(found[key])
        }
    )


def _less(found: dict[str, Any]) -> list[str]:
    task = found["task"]
    return [
        f"{task}, temperature {found['temperature']:g}",
        found["family"],
        found["margin"],
        span(*found["tau"]),
        _score(task, found["at_default"]),
        f"{found['range'][0]:.2f} to {found['range'][1]:.2f}",
        _score(task, found["over_sweep"]),
    ]


def _score(task: str, values: list[float] | None) -> str:
    if values is None:
        return "-"
    scale = 100 if task == "arithmetic" else 1
    return span(*(scale * v + 0.0 for v in values), show=SCORE[task])


def _certified(found: dict[str, Any]) -> list[str]:
    setting = "none" if found["setting"] is None else f"{found['setting']:g}"
    return [found["task"], found["family"], setting, f"{found['risk']:.3f}", f"{found['tau']:.2f}"]
