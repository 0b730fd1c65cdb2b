"""The figures of docs/smollm2.md: SmolLM2-135M-Instruct, from the JSON that the scripts/smollm2_*.py wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from results_tables.bars import RESULTS, Bar, bar, load, span

TASKS = {
    "mt_bench": "MT-Bench",
    "alpaca": "Alpaca",
    "gsm8k_test": "GSM8K",
    "humaneval": "HumanEval",
    "cnn_dm": "CNN/DM",
    "wmt19": "WMT19",
}
TEMPERATURES = ("0", "1")
PUBLISHED = 0.535
"""The paper's share of strict rejections with a ratio above 0.9."""
LEAST_SCORE = 5
"""Of 100: a ratio of scores below it is not shown."""
JUDGES = {"rouge_l": "ROUGE-L", "bleu": "BLEU"}


def smollm2() -> dict[str, Any]:
    """All of it; a part whose JSON is not there is None."""
    found = {
        "replay": _optional("smollm2_replay.json", _replay),
        "evidence": _optional("smollm2_evidence.json", _evidence),
        "head": _optional("smollm2_head.json", _head),
        "self": _optional("smollm2_self.json", _self),
        "peers": _optional("smollm2_peers.json", _peers),
        "first": _optional("smollm2_first_text.json", _first),
        "defaults": _optional("bench_defaults.json", _defaults),
        "parity": _optional("smollm2_parity.json", _parity),
        "bits": _bits([load(f"bits_{name}.json") for name in ("tiny", "smollm2")]),
        "compounding": _optional("compounding-smollm2/compounding.json", _compounding),
    }
    bars = {name: part.get("bars", []) for name, part in found.items() if part}
    return found | {"bars": [row for rows in bars.values() for row in rows]}


def _optional(name: str, read: Any) -> dict[str, Any] | None:
    return read(load(name)) if (RESULTS / name).exists() else None


def _percent(cell: Sequence[float]) -> str:
    return _span([100 * x for x in cell], "{:.1f}") + "%"


def _span(cell: Sequence[float], show: str = "{:.2f}") -> str:
    mean, low, high = cell
    return span(mean, low, high, show)


def _rejections(report: Mapping[str, Any], name: str, case: str) -> tuple[str, ...]:
    found = report["cases"][case]
    refused = found["rejected"]["7"]
    return (
        name, case[-1], str(found["prompts"]), f"{refused['median_z1']:.1f}", f"{refused['places_above_0.9']:.1%}",
        str(refused["rejections"]), _percent(refused["share_above_0.9"]), _percent(refused["share_that_mars_takes"]),
    )  # fmt: skip


def _replay(report: Mapping[str, Any]) -> dict[str, Any]:
    cases = report["cases"]
    named = [(name, f"{task}, T={t}") for task, name in TASKS.items() for t in TEMPERATURES]
    named += [("all", f"all, T={t}") for t in TEMPERATURES]
    sweep, gaps = {}, {}
    for t in TEMPERATURES:
        taus = cases[f"all, T={t}"]["tau"]
        lengths = [k for k in taus["ratio"]["inf"] if k in ("3", "4", "5", "7", "9", "12")]
        sweep[t] = [
            ("inf, which is `exact`" if theta == "inf" else theta, *(f"{cells[k][0]:.2f}" for k in lengths))
            for theta, cells in taus["ratio"].items()
        ]
        gaps[t] = {x: f"{cells['3'][0]:.2f}" for x, cells in taus["gap"].items() if x != "inf"}
    both = [cases[f"all, T={t}"]["rejected"]["7"]["share_above_0.9"] for t in TEMPERATURES]
    return {
        "rejections": [_rejections(report, name, case) for name, case in named if case in cases],
        "shares": [_percent(cell) for cell in both],
        "above": min(cell[0] for cell in both) > PUBLISHED,
        "taken": [
            _percent(cases[f"all, T={t}"]["rejected"]["7"]["share_that_mars_takes"]) for t in TEMPERATURES
        ],
        "lengths": lengths,
        "sweep": sweep,
        "gaps": gaps,
        "places": sum(cases[f"all, T={t}"]["places"] for t in TEMPERATURES),
        "prompts": cases["all, T=0"]["prompts"],
    }


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


def _evidence(report: Mapping[str, Any]) -> dict[str, Any]:
    cases, together = report["cases"], report["all"]

    def figures(key: str) -> dict[str, Any] | None:
        return cases[key]["figures"] if key in cases else None

    taus, quality = [], []
    for task, name in TASKS.items():
        for t in TEMPERATURES:
            arms = {
                rule: figures(f"{task}, chain of 3, {rule}, T={t}")
                for rule in ("exact", "mars(0.96)", "mars(0.9)", "mars(0.84)")
            }
            mars = arms["mars(0.9)"]
            if mars is None or arms["exact"] is None:
                continue
            taus.append((
                name, t, str(mars["prompts"]), *(_span(arm["tau"]) if arm else "" for arm in arms.values()),
                _percent(mars["relaxed_share"]), _span(mars["regret_per_token"], "{:.3f}"),
            ))  # fmt: skip
            judge = next((j for j in JUDGES if j in mars), None)
            quality.append((
                name, t, _recovered(mars["likelihood"]),
                _change(JUDGES[judge], mars[judge]) if judge else "",
                _recovered(mars[judge]) if judge else "",
                f"{arms['exact']['loop_rate'][0]:.0%}", f"{mars['loop_rate'][0]:.0%}",
            ))  # fmt: skip
    arms = [
        (
            draft, rule, t.removeprefix("T="), f"{found['prompts']} of {found['tasks']}", _span(found["tau"]),
            " ".join("-" if x is None else f"{x:.0%}" for x in found["accepted_at_depth"][:4]),
            _percent(found["relaxed_share"]), _span(found["regret_per_token"], "{:.3f}"),
            _recovered(found["likelihood"]) if "likelihood" in found else "",
            f"{found['loop_rate'][0]:.0%}",
        )
        for name, found in together.items()
        for draft, rule, t in [name.split(", ")]
    ]  # fmt: skip
    check = report.get("replay_check", [])
    apart = [row["replayed"][0] / row["decoded"][0] - 1 for row in check]
    tree = figures("mt_bench, tree 10-8-60, exact, T=0")
    bars: list[Bar] = []
    if tree:
        bars.append(
            bar(
                "tau of the head's tree 10-8-60, `exact`, temperature 0, MT-Bench",
                tree["tau"][0],
                "{:.2f}",
                ">= 2.5",
                prompts=tree["prompts"],
            )
        )
    gains = {name: found for name, found in report.get("gain", {}).items() if found["prompts"]}
    if "chain of 3, T=1" in gains:
        found = gains["chain of 3, T=1"]
        case = (
            f"tau of `mars(0.9)` over `exact`, temperature 1, chain of 3, the same {found['prompts']} prompts"
        )
        bars.append(bar(case, 100 * (found["ratio"][0] - 1), "{:+.0f}%", ">= +13%", prompts=found["prompts"]))
    return {
        "settings": report["settings"],
        "environment": report["environment"],
        "prompts": max(found["prompts"] for found in together.values()),
        "taus": taus,
        "quality": quality,
        "gains": [
            (*name.rsplit(", T=", 1), str(found["prompts"]), _gain(found["ratio"]))
            for name, found in gains.items()
        ],
        "arms": arms,
        "checked": len(check),
        "inside": sum(row["inside_interval"] for row in check),
        "apart": 100 * fmean(abs(x) for x in apart) if apart else None,
        "worst": 100 * max(map(abs, apart)) if apart else None,
        "bars": bars,
    }


def _gain(ratio: Sequence[float]) -> str:
    return _span([100 * (x - 1) for x in ratio], "{:+.0f}") + "%"


def _change(name: str, found: Mapping[str, Any]) -> str:
    return f"{name} {100 * found['strict']:.1f} -> {100 * found['score']:.1f}"


def _recovered(found: Mapping[str, Any]) -> str:
    """A ratio as a signed change; none of scores so low that it would say nothing."""
    if found["recovered"] is None or 100 * found.get("strict", 1) < LEAST_SCORE:
        return "-"
    if found["interval"] is None:
        return f"{100 * (found['recovered'] - 1):+.0f}%"
    return _gain([found["recovered"], *found["interval"]])


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


def _bits(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def row(case: str, arm: str, found: Mapping[str, Any]) -> tuple[str, ...]:
        places = [place for place in found["parted_at"] if place is not None]
        return (
            case, arm, f"{found['same']} of {found['prompts']}", str(found["same_log_probs"]),
            *((f"{median(places):.0f}", f"{max(map(abs, found['gaps']), default=0):.3f}") if places else ("", "")),
            f"{found['tau']:.2f}",
        )  # fmt: skip

    cases = {case: arms for report in reports for case, arms in report["cases"].items()}
    chains = [
        (found["same_log_probs"], found["prompts"])
        for arms in cases.values()
        for arm, found in arms.items()
        if "chain" in arm and "batch" not in arm
    ]
    return {
        "new_tokens": reports[0]["new_tokens"],
        "rows": [row(case, arm, found) for case, arms in cases.items() for arm, found in arms.items()],
        "chains_are_plain": all(same == count for same, count in chains),
    }


def _compounding(report: Mapping[str, Any]) -> dict[str, Any]:
    return {"tasks": {name: found["findings"] for name, found in report["tasks"].items()}}
