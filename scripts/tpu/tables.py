"""Tables about TPU slices: the compiler's plans, 4 and 8 bits on one chip, and speedups at the MARS paper's taus."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from scripts.common import load

GIB = 2**30
GENERATIONS = ("v5e", "v6e", "v5p")


def figures() -> dict[str, Any]:
    """Return the variables of the page's template."""
    return {"plans": plans(), "one_chip": one_chip(), "published": published()}


def one_chip() -> dict[str, Any]:
    """Return the memory and step times of a published model in 4 and 8 bits on one chip, from plan_bits.json."""
    results = load("plan_bits.json")["results"]

    def row(name: str, plan: Mapping[str, Any]) -> list[str]:
        steps = (("autoregressive_step", "autoregressive_floor_seconds"), ("step", "floor_seconds"))
        pairs = [(plan[step]["low_seconds"], plan[floor]) for step, floor in steps]
        memory = f"{plan['held_bytes'] / GIB:.1f} of {plan['hbm_bytes'] / GIB:.0f}"
        return [*name.split(", "), memory, *(f"{1e3 * a:.1f} ({a / b:.2f} x)" for a, b in pairs)]

    return {
        "rows": [row(name, plan) for name, plan in results.items()],
        "fits": all(plan["fits"] for plan in results.values()),
        "trees_over_small_groups_are_longer": all(
            plan["step"]["low_seconds"]
            > results[name.replace("int4 in groups of 32", "int8")]["step"]["low_seconds"]
            for name, plan in results.items()
            if "groups" in name and "tree" in name
        ),
        "fewer_bits_are_faster": all(
            results[name][step]["low_seconds"]
            < results[re.sub("int4[^,]*", "int8", name)][step]["low_seconds"]
            for name in results
            if "int4" in name
            for step in ("step", "autoregressive_step")
            if step == "autoregressive_step" or "groups" not in name
        ),
    }


def published() -> dict[str, Any]:
    """Return speedups that follow from the taus of the MARS paper and the step times in plan_published.json."""
    results = load("plan_published.json")["results"]

    def row(name: str, plan: Mapping[str, Any]) -> list[str]:
        paper, step, plain_step = plan["published"], plan["step"], plan["alone"]
        ranges = [" .. ".join(f"{1e3 * seconds:.2f}" for seconds in times) for times in (plain_step, step)]
        # Divide low by low and high by high: the low ends of both ranges assume the same times per routine, and so do
        # the high ends.
        shares = sorted(a / b for a, b in zip(plain_step, step, strict=True))
        speedups = [" .. ".join(f"{tau * share:.2f}" for share in shares) for tau in paper["tau"]]
        cells = zip(paper["tau"], paper["speed"], speedups, strict=True)
        columns = [cell for tau, speed, speedup in cells for cell in (f"{tau} ({speed:.2f})", speedup)]
        return [name, plan["topology"], *ranges, *columns]

    return {
        "rows": [row(name, plan) for name, plan in results.items()],
        "fits": all(plan["fits"] for plan in results.values()),
    }


def plans() -> dict[str, Any]:
    """Return the compiler's plans for slices from plans.json. Plans for the MARS paper come from paper_plans.json."""
    report, paper_rows = load("plans.json"), load("paper_plans.json")["rows"]
    targets = list(dict.fromkeys(row["target"] for row in report["entries"].values()))
    entries = []
    for row in report["entries"].values():
        paper = paper_rows.get(row["target"], {"topology": None})
        in_paper = (row["topology"], row["dtype"]) == (paper["topology"], "bfloat16")
        if row["draft"] == "mtp":
            entries.append(row | {"tree": "MTP, chain of 3"})
        else:
            entries.append(row | (paper | {"tree": "10-8-60"} if in_paper else {"tree": "10-7-60"}))
    entries.sort(
        key=lambda row: (
            targets.index(row["target"]),
            GENERATIONS.index(row["topology"].split(":")[0]),
            row["chips"],
        )
    )
    rows = [
        [
            row["target"],
            row["dtype"],
            row["topology"],
            row["tree"],
            "yes" if row["fits"] else "no",
            f"{row['held_bytes'] / GIB:.1f} of {row['hbm_bytes'] / GIB:.0f}",
            f"{1e3 * row['floor_seconds']:.1f}",
            f"{1e3 * row['autoregressive_floor_seconds']:.1f}",
        ]
        for row in entries
    ]
    mixture = [row for row in entries if row["target"] == "qwen3-235b-a22b"]
    return {
        "rows": rows,
        "versions": report["versions"],
        "mixture_reads_more": all(
            row["floor_seconds"] > 3 * row["autoregressive_floor_seconds"] for row in mixture
        ),
    }
