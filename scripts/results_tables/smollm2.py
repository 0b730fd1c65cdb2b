"""The figures of docs/smollm2.md: SmolLM2-135M-Instruct, from the JSON that the scripts/smollm2_*.py wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from results_tables.bars import RESULTS, bar, load, span


def smollm2() -> dict[str, Any]:
    """All of it; a part whose JSON is not there is None."""
    found = {
        "head": _optional("smollm2_head.json", _head),
        "self": _optional("smollm2_self.json", _self),
        "peers": _optional("smollm2_peers.json", _peers),
        "first": _optional("smollm2_first_text.json", _first),
        "defaults": _optional("bench_defaults.json", _defaults),
        "parity": _optional("smollm2_parity.json", _parity),
        "bits": _bits([load(f"bits_{name}.json") for name in ("tiny", "smollm2")], load("bits_trees.json")),
    }
    bars = {name: part.get("bars", []) for name, part in found.items() if part}
    return found | {"bars": [row for rows in bars.values() for row in rows]}


def _optional(name: str, read: Any) -> dict[str, Any] | None:
    return read(load(name)) if (RESULTS / name).exists() else None


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


def _self(report: Mapping[str, Any]) -> dict[str, Any]:
    rows = report["rows"]
    return {
        "prompts": len(rows),
        "same": sum(row["same"] for row in rows),
        "tau": _span(report["tau"]),
        "tokens": report["tokens"],
        "new_tokens": report["new_tokens"],
    }


def _peers(report: Mapping[str, Any]) -> dict[str, Any]:
    tables, bars = {}, []
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
    theirs = {name: rate for name, rate in ways.items() if name.startswith("transformers")}
    ours = {name: rate for name, rate in ways.items() if "mars(0.9)" in name}
    few = {"prompts": report["batches"]["1"]["prompts"], "turns": report["repeats"]}
    best, alone = max(ours, key=lambda name: ours[name]), ways["mars-jax, autoregression"]
    bars += [
        bar(
            f"tokens/s at batch 1, {best}, over transformers' best",
            ours[best] / max(theirs.values()), "{:.2f} x", ">= 2.5 x", **few,
        ),
        bar("the same over our autoregression", ours[best] / alone, "{:.2f} x", ">= 1.3 x", **few),
    ]  # fmt: skip
    own = max(rate for name, rate in ways.items() if name.startswith("mars-jax"))
    return {
        "tables": tables,
        "environment": report["environment"],
        "report": report,
        "bars": bars,
        "above": [name for name, rate in ways.items() if rate > own],
    }


def _defaults(report: Mapping[str, Any]) -> dict[str, Any]:
    names = {"ngram": "n-gram", "head": "its head"}
    arms, wanted = report["arms"], {"ngram": ">= 0.97 x", "head": ">= 1.1 x"}
    over = {name: arms[name]["over_plain"] for name in names}
    return {
        "settings": report["settings"],
        "cores": len(report["affinity"]),
        "prompts": sum(report["prompts"].values()),
        "differ": sum(arms[name]["texts_that_differ"] for name in names),
        "rows": [
            [
                shown,
                f"{over[name]['median']:.2f} x [{over[name]['lower_95']:.2f}, {over[name]['upper_95']:.2f}]",
                f"{arms[name]['tau']:.2f}",
                *(f"{ratio:.2f}" for ratio in arms[name]["over_plain_by_kind"].values()),
            ]
            for name, shown in names.items()
        ],
        "bars": [
            bar(
                f"default draft, {shown}, processor time, over plain decoding",
                over[name]["median"],
                "{:.2f} x",
                wanted[name],
                prompts=sum(report["prompts"].values()),
                turns=report["settings"]["turns"],
            )
            for name, shown in names.items()
        ],
    }


def _first(report: Mapping[str, Any]) -> dict[str, Any]:
    over, middle = report["over_transformers"], report["median"]
    return {
        "seconds": middle,
        "repeats": len(report["seconds"]["cold"]),
        "cores": report["environment"]["cores"],
        "bars": [
            bar(
                f"first text, {name} ({middle[name]:.1f} s), over transformers",
                over[name],
                "{:.2f} x",
                "<= 1.5 x",
                turns=len(report["seconds"]["cold"]),
            )
            for name in ("cold", "warm")
        ],
    }


def _parity(report: Mapping[str, Any]) -> dict[str, Any]:
    arms = report["arms"] | ({"llama.cpp": report["llama_cpp"]} if "llama_cpp" in report else {})
    different = sum(found["different"] for found in report["arms"].values())
    wanted = f"{report['prompts']} prompts, batch of {report['batch_size']}, {len(report['arms'])} drafters"
    return {
        "report": report,
        "rows": [
            (name, str(found["texts"]), str(found["equal"]), str(found["ties"]), str(found["different"]))
            for name, found in arms.items()
        ],
        "largest": max(row["largest_difference"] for row in report["logits"]),
        "bars": [bar(f"{wanted}: texts that differ from transformers'", different, "{:.0f}", "== 0")],
    }


def _bits(reports: Sequence[Mapping[str, Any]], trees: Mapping[str, Any]) -> dict[str, Any]:
    def row(case: str, arm: str, found: Mapping[str, Any]) -> tuple[str, ...]:
        places = [place for place in found["parted_at"] if place is not None]
        return (
            case, arm, f"{found['same']} of {found['prompts']}", str(found["same_log_probs"]),
            *((f"{median(places):.0f}", f"{max(map(abs, found['gaps']), default=0):.3f}") if places else ("", "")),
            f"{found['tau']:.2f}",
        )  # fmt: skip

    cases = {case: arms for report in reports for case, arms in report["cases"].items()}

    def chains(dtype: str, what: str) -> bool:
        return all(
            found[what] == found["prompts"]
            for case, arms in cases.items()
            for arm, found in arms.items()
            if dtype in case and "chain" in arm and "batch" not in arm
        )

    wide = {case: arms for case, arms in trees["cases"].items() if "float64" in case}
    narrow = {case.split(", sums")[0]: trees["cases"][case.split(", sums")[0]] for case in wide}
    longer = [
        sum(arms[arm]["seconds"] for arms in wide.values())
        / sum(arms[arm]["seconds"] for arms in narrow.values())
        for arm in ("none", "head, tree of 12")
    ]
    return {
        "new_tokens": reports[0]["new_tokens"],
        "rows": [row(case, arm, found) for case, arms in cases.items() for arm, found in arms.items()],
        "chains_are_plain": chains("bfloat16", "same_log_probs"),
        "chains_say_the_same": chains("float32", "same"),
        "trees": [
            row(case, "head, tree of 12", arms["head, tree of 12"]) for case, arms in trees["cases"].items()
        ],
        "trees_are_plain": all(
            found["same_log_probs"] == found["prompts"] for arms in wide.values() for found in arms.values()
        ),
        "longer": [f"{ratio:.2f}" for ratio in longer],
    }
