"""Figures for SmolLM2-135M-Instruct: tau of its head, speed compared with peers, and agreement with transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scripts.common import load, ratio_of_sums, span


def figures() -> dict[str, Any]:
    """Return the variables of the page."""
    return {
        "head": _head(load("smollm2_head.json")),
        "peers": _peers(load("smollm2_peers.json")),
        "parity": _parity(load("smollm2_parity.json")),
        "first": _first(load("first_token.json")),
        "bits": _bits(load("cpu_bits.json")),
        "defaults": {name: _defaults(load(f"defaults_{name}.json")) for name in ("smollm2", "tiny")},
    }


def over_plain(
    rows: Sequence[Mapping[str, Any]], arm: str, kind: str | None = None, clock: str = "processor_seconds"
) -> list[float]:
    """Return [speed relative to plain decoding, low, high] of an arm, for prompts of one kind or of all kinds.

    The interval is a 95% bootstrap interval over rows. Each row is one timed decode of a prompt.
    """
    plain, other = (
        np.asarray([row["arms"][name][clock] for row in rows if kind in (row["kind"], None)])
        for name in ("plain", arm)
    )
    return ratio_of_sums(plain, other, digits=3)


def _defaults(report: Mapping[str, Any]) -> dict[str, Any]:
    timed = report["rows"]
    kinds, arms = (
        dict.fromkeys(row["kind"] for row in timed),
        [arm for arm in timed[0]["arms"] if arm != "plain"],
    )
    table, by_kind = [], {}
    for arm in sorted(arms):
        counts = [row["arms"][arm] for row in timed]
        tau = sum(one["tokens"] for one in counts) / sum(one["steps"] for one in counts)
        by_kind[arm] = [over_plain(timed, arm, kind)[0] for kind in kinds]
        ratios = [f"{ratio:.2f}" for ratio in by_kind[arm]]
        table.append((arm, _span(over_plain(timed, arm)), f"{tau:.2f}", *ratios))
    differing = sum(
        one["digest"] != row["arms"]["plain"]["digest"] for row in timed for one in row["arms"].values()
    )
    return {
        "kinds": list(kinds),
        "rows": table,
        "lowest": {arm: min(ratios) for arm, ratios in by_kind.items()},
        "differing": differing,
        "turns": 1 + max(row["turn"] for row in timed),
        "prompts": len({(row["kind"], row["prompt"]) for row in timed}),
        "new_tokens": report["settings"]["new_tokens"],
    }


def _first(report: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        (
            name,
            f"{model['cold']['seconds']:.1f} s",
            f"{model['median']['seconds']:.1f} s",
            f"{model['median']['processor_seconds']:.1f} s",
        )
        for name, model in report["models"].items()
    ]
    repeats = len(report["models"]["smollm2"]["warm"])
    return {"rows": rows, "repeats": repeats, "size": report["stand_in_millions"]}


def _bits(report: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for name, dtypes in report["models"].items():
        base = dtypes["bfloat16"]["tokens_per_s"]
        for dtype, row in dtypes.items():
            rate, loss = row["tokens_per_s"], row.get("loss")
            rows.append(
                (name, dtype, f"{rate:.1f}", f"{rate / base:.2f} x", "-" if loss is None else f"{loss:.3f}")
            )
    compared = {name: rates for name, rates in report["models"].items() if "transformers, float32" in rates}
    over_transformers = {
        name: max(rates[dtype]["tokens_per_s"] for dtype in ("float32", "bfloat16"))
        / max(rates[f"transformers, {dtype}"]["tokens_per_s"] for dtype in ("float32", "bfloat16"))
        for name, rates in compared.items()
    }
    differing = [
        name
        for name, rates in compared.items()
        if rates["transformers, float32"]["tokens_as_float32"] < report["new_tokens"]
    ]
    return {
        "rows": rows,
        "turns": report["turns"],
        "new_tokens": report["new_tokens"],
        "over_transformers": over_transformers,
        "differing": differing,
    }


def _span(cell: Sequence[float], show: str = "{:.2f}") -> str:
    mean, low, high = cell
    return span(mean, low, high, show)


def _head(report: Mapping[str, Any]) -> dict[str, Any]:
    ships, earlier = (report["heads"][name] for name in ("ships", "before"))
    rows = [
        (
            *name.replace("temperature ", "").split(", "),
            _span(case["tau"]),
            _span(earlier[name]["tau"]) if name in earlier else "",
        )
        for name, case in ships.items()
    ]
    return {"prompts": report["prompts"], "new_tokens": report["new_tokens"], "rows": rows}


def _peers(report: Mapping[str, Any]) -> dict[str, Any]:
    tables = {}
    for batch, batch_report in report["batches"].items():
        peers = batch_report["ways"]
        base = peers["transformers, generate"]["tokens_per_second"]
        tables[batch] = [
            (name, "-", "-", peer["error"])
            if "error" in peer
            else (
                name,
                _span([peer["tokens_per_second"], *peer["spread"]], "{:.1f}"),
                f"{peer['tokens_per_second'] / base:.2f} x",
                f"{peer['texts_as_transformers']} of {batch_report['prompts']}",
            )
            for name, peer in peers.items()
        ]
    peers = {
        name: peer["tokens_per_second"]
        for name, peer in report["batches"]["1"]["ways"].items()
        if "error" not in peer
    }
    best = max(rate for name, rate in peers.items() if name.startswith("mars-jax"))
    return {
        "tables": tables,
        "environment": report["environment"],
        "report": report,
        "above": [name for name, rate in peers.items() if rate > best],
    }


def _parity(report: Mapping[str, Any]) -> dict[str, Any]:
    arms = report["arms"] | ({"llama.cpp": report["llama_cpp"]} if "llama_cpp" in report else {})
    return {
        "report": report,
        "rows": [
            (name, str(arm["texts"]), str(arm["equal"]), str(arm["ties"]), str(arm["different"]))
            for name, arm in arms.items()
        ],
        "largest": max(row["largest_difference"] for row in report["logits"]),
    }
