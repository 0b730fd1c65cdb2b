"""Figures of SmolLM2-135M-Instruct: its head, its speed compared with peers, its tokens compared with transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.common import load, span


def figures() -> dict[str, Any]:
    """Return the variables of the page."""
    return {
        "head": _head(load("smollm2_head.json")),
        "peers": _peers(load("smollm2_peers.json")),
        "parity": _parity(load("smollm2_parity.json")),
    }


def _span(cell: Sequence[float], show: str = "{:.2f}") -> str:
    mean, low, high = cell
    return span(mean, low, high, show)


def _head(report: Mapping[str, Any]) -> dict[str, Any]:
    ships, before = (report["heads"][name] for name in ("ships", "before"))
    rows = [
        (
            *name.replace("temperature ", "").split(", "),
            _span(case["tau"]),
            _span(before[name]["tau"]) if name in before else "",
        )
        for name, case in ships.items()
    ]
    return {"prompts": report["prompts"], "new_tokens": report["new_tokens"], "rows": rows}


def _peers(report: Mapping[str, Any]) -> dict[str, Any]:
    tables = {}
    for batch, found in report["batches"].items():
        ways = found["ways"]
        base = ways["transformers, generate"]["tokens_per_second"]
        tables[batch] = [
            (name, "-", "-", way["error"])
            if "error" in way
            else (
                name,
                _span([way["tokens_per_second"], *way["spread"]], "{:.1f}"),
                f"{way['tokens_per_second'] / base:.2f} x",
                f"{way['texts_as_transformers']} of {found['prompts']}",
            )
            for name, way in ways.items()
        ]
    ways = {
        name: way["tokens_per_second"]
        for name, way in report["batches"]["1"]["ways"].items()
        if "error" not in way
    }
    own = max(rate for name, rate in ways.items() if name.startswith("mars-jax"))
    return {
        "tables": tables,
        "environment": report["environment"],
        "report": report,
        "above": [name for name, rate in ways.items() if rate > own],
    }


def _parity(report: Mapping[str, Any]) -> dict[str, Any]:
    arms = report["arms"] | ({"llama.cpp": report["llama_cpp"]} if "llama_cpp" in report else {})
    return {
        "report": report,
        "rows": [
            (name, str(found["texts"]), str(found["equal"]), str(found["ties"]), str(found["different"]))
            for name, found in arms.items()
        ],
        "largest": max(row["largest_difference"] for row in report["logits"]),
    }
