"""Summary, Markdown and plot of a study of compounding errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mars_jax.lab.pictures.palette import GREY, KINDS
from mars_jax.lab.pictures.style import picture, zero_line
from mars_jax.lab.studies.branch_curves import curves, relapse
from mars_jax.lab.studies.branches import Decoded, Event

PANELS = {
    "same_place": "share of tokens that are the strict\nones, place by place",
    "same_order": "share of tokens that the strict text\nhas too, in order",
    "surprise": "extra surprise under the target,\nnats per token",
    "relapse": "rate of relaxed tokens after a relaxed\none / overall",
}
COLOURS = {"relaxed": KINDS["relaxed"], "control": GREY}


def summarize(
    texts: Sequence[Decoded], events: Sequence[Event], *, horizon: int, seed: int = 0
) -> dict[str, Any]:
    """The figures of one task: of relaxed tokens, of the control, and of how relaxed tokens follow each other."""
    parts = {
        name: curves(chosen, horizon, seed=seed) if chosen else None
        for name, chosen in (
            ("relaxed", [e for e in events if not e.control]),
            ("control", [e for e in events if e.control]),
        )
    }
    found = {"texts": len(texts), **parts, "relapse": relapse(texts, horizon, seed=seed)}
    return found | {"findings": findings(found)}


def findings(found: Mapping[str, Any]) -> list[str]:
    """The findings in sentences. Errors compound where the text after a relaxed token grows less and less likely under
    the target."""
    relaxed, control = found["relaxed"], found["control"]
    if relaxed is None:
        return ["Nothing was relaxed, so nothing can compound."]
    said = []
    low, high = (relaxed["grows"]["surprise"][k][0] for k in ("low", "high"))
    change = relaxed["grows"]["surprise"]["mean"][0]
    if low is None:
        said.append("The continuations are too short to say whether errors compound.")
    else:
        span = f"{change:+.3f} nats per token [{low:+.3f}, {high:+.3f}]"
        # An interval that holds zero is no proof of the contrary, least of all a wide one.
        verdict = (
            "Errors compound" if low > 0 else "Errors fade" if high < 0 else "No sign that errors compound"
        )
        said.append(
            f"{verdict}: from the first to the last third of the distances, what a relaxed token adds to the surprise "
            f"of a token after it changes by {span}."
        )
    places = [x for x in relaxed["same_order"]["mean"] if x is not None]
    if places:
        line = (
            f"At distance {len(places)}, {places[-1]:.0%} of the tokens are the strict text's own, in order"
        )
        other = [x for x in control["same_order"]["mean"] if x is not None] if control else []
        said.append(
            line + (f"; after a refused runner-up put in by force, {other[-1]:.0%}." if other else ".")
        )
    if relaxed["score"] is not None:
        lost = relaxed["score"]
        line = (
            f"A relaxed token costs {100 * lost['mean'][0]:.2f} points of score [{100 * lost['low'][0]:.2f}, "
            f"{100 * lost['high'][0]:.2f}]"
        )
        forced = control["score"] if control else None
        if forced is not None:
            line += f"; a forced one {100 * forced['mean'][0]:.2f} [{100 * forced['low'][0]:.2f}, "
            line += f"{100 * forced['high'][0]:.2f}]"
        said.append(line + ".")
    again = found["relapse"]
    if again["mean"] and again["mean"][0] is not None and again["low"][0] is not None:
        said.append(
            f"The token after a relaxed one is relaxed {again['mean'][0]:.2f} [{again['low'][0]:.2f}, "
            f"{again['high'][0]:.2f}] times as often as any; passages that are hard as a whole count in this too."
        )
    return said


def markdown(summary: Mapping[str, Any]) -> str:
    """The report for people."""
    settings = summary["settings"]
    facts = "; ".join(f"{k.replace('_', ' ')} {v}" for k, v in settings.items() if v is not None)
    lines = ["# Do errors compound?", "", f"{facts}; temperature 0.", ""]
    lines += [
        "At tokens that the rule relaxed, the strict rule continues the text after them and after the target's own "
        "token. The control puts the target's runner-up in where the rule would have refused it.",
        "",
    ]
    for task, found in summary["tasks"].items():
        lines += [f"## {task}", "", *(f"- {line}" for line in found["findings"]), ""]
        lines += _table(found)
    return "\n".join([*lines, "![compounding](compounding.png)", ""])


def _table(found: Mapping[str, Any]) -> list[str]:
    if found["relaxed"] is None:
        return []
    length = len(found["relaxed"]["surprise"]["mean"])
    shown = sorted({d for d in (1, 2, 4, 8, 16, 32, 64, length) if d <= length})
    lines = [
        f"{found['relaxed']['events']} relaxed tokens of {found['texts']} texts, "
        f"{found['control']['events'] if found['control'] else 0} controls; {found['relapse']['share']:.1%} of all "
        "tokens are relaxed.",
        "",
        "| distance | " + " | ".join(map(str, shown)) + " |",
        "|---|" + "---:|" * len(shown),
    ]
    for part in ("relaxed", "control"):
        for name in ("same_place", "same_order", "surprise"):
            if found[part] is not None:
                curve = found[part][name]
                cells = [_cell(*(curve[k][d - 1] for k in ("mean", "low", "high"))) for d in shown]
                lines.append(f"| {part}: {name.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _cell(mean: float | None, low: float | None, high: float | None) -> str:
    return "-" if mean is None or low is None else f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def draw(summary: Mapping[str, Any], files: Sequence[Path]) -> None:
    """A row of panels for every task; shades are 95% intervals."""
    tasks = summary["tasks"]
    grid = {"rows": len(tasks), "columns": len(PANELS), "panel": (3.4, 2.8), "sharex": True}
    with picture(files, **grid, caption=caption(summary)) as axes:
        for row, (task, found) in zip(axes, tasks.items(), strict=True):
            for axis, name in zip(row, PANELS, strict=True):
                _panel(axis, name, found)
                axis.set_xlabel("tokens after it")
                axis.set_title(f"{task}: {PANELS[name]}", fontsize=8.5)


def caption(summary: Mapping[str, Any]) -> str:
    """The pair, n and the date."""
    settings, tasks = summary["settings"], summary["tasks"]
    count = ", ".join(
        f"{found['relaxed']['events'] if found['relaxed'] else 0} relaxed tokens of {found['texts']} texts of {task}"
        for task, found in tasks.items()
    )
    pair = f"{settings['target']} drafted by {settings['draft']}"
    facts = (
        pair,
        "temperature 0",
        f"n = {count}",
        summary.get("date", "")[:10],
        "shades: 95%, bootstrap over problems",
    )
    return "; ".join(fact for fact in facts if fact) + "."


def _panel(axis: Any, name: str, found: Mapping[str, Any]) -> None:
    if name == "relapse":
        series = {"relaxed": found["relapse"]}
    else:
        series = {part: found[part][name] for part in COLOURS if found[part]}
    for label, curve in series.items():
        points = [
            (d + 1, m, lo, hi)
            for d, (m, lo, hi) in enumerate(zip(curve["mean"], curve["low"], curve["high"], strict=True))
            if m is not None and lo is not None
        ]
        if points:
            at, mean, low, high = zip(*points, strict=True)
            axis.plot(at, mean, color=COLOURS[label], label=label)
            axis.fill_between(at, low, high, color=COLOURS[label], alpha=0.2, linewidth=0)
    if name in ("surprise", "relapse"):
        zero_line(axis, float(name == "relapse"))
    else:
        axis.set_ylim(0, 1.02)
