"""Rows that come and go, drafts as long as pays, learning, 8 bits, TPU slices, kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from results_tables.bars import bar, load, span

GIB = 2**30
GENERATIONS = ("v5e", "v6e", "v5p")


def bits() -> dict[str, Any]:
    """eval_bits.json and eval_int8_cache.json: weights in 8 and 4 bits, and the cache in 8."""
    report, cached = load("eval_bits.json"), load("eval_int8_cache.json")
    exact, story = cached["arithmetic"][0], cached["stories"][0]
    lost = story["nats_int8_minus_bfloat16"]

    def row(model: str, dtype: str, found: Mapping[str, Any]) -> list[str]:
        shares = [f"{100 * found[name]:.1f}%" if name in found else "-" for name in ("accuracy", "same")]
        tau = f"{found['tau']:.2f}" if "tau" in found else "-"
        return [f"`{model}`", dtype, span(*found["lost"], show="{:+.4f}"), *shares, tau]

    results = report["results"]
    return {
        "stories": report["stories"],
        "problems": report["problems"],
        "native": abs(results["smollm2"]["int4"]["lost"][0]) < abs(results["smollm2"]["int8"]["lost"][0]),
        "rows": [
            row(model, dtype, found) for model, some in results.items() for dtype, found in some.items()
        ],
        "cache": [
            [
                f"of {exact['problems']} problems solved, 8 bits against 16",
                f"{100 * exact['accuracy']['int8']:.1f}% against {100 * exact['accuracy']['bfloat16']:.1f}%",
            ],
            ["answers that are the same", f"{100 * exact['same_answers']:.1f}%"],
            [
                f"nats a token on {story['stories']} stories, 8 bits less 16",
                f"{lost['mean']:+.4f} [{lost['low']:+.4f}, {lost['high']:+.4f}]",
            ],
        ],
    }


def one_chip() -> dict[str, Any]:
    """plan_bits.json: a published model in few bits on one chip, by the compiler's schedule."""
    results = load("plan_bits.json")["results"]

    def row(name: str, found: Mapping[str, Any]) -> list[str]:
        steps = (("autoregressive_step", "autoregressive_floor_seconds"), ("step", "floor_seconds"))
        pairs = [(found[step]["low_seconds"], found[floor]) for step, floor in steps]
        held = f"{found['held_bytes'] / GIB:.1f} of {found['hbm_bytes'] / GIB:.0f}"
        return [*name.split(", "), held, *(f"{1e3 * a:.1f} ({a / b:.2f} x)" for a, b in pairs)]

    return {
        "rows": [row(name, found) for name, found in results.items()],
        "fits": all(found["fits"] for found in results.values()),
        "trees_over_small_groups_are_longer": all(
            found["step"]["low_seconds"]
            > results[name.replace("int4 in groups of 32", "int8")]["step"]["low_seconds"]
            for name, found in results.items()
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
    """plan_published.json: taus of the MARS paper times the compiler's steps."""
    results = load("plan_published.json")["results"]

    def row(name: str, found: Mapping[str, Any]) -> list[str]:
        paper, step, alone = found["published"], found["step"], found["alone"]
        ranges = [" .. ".join(f"{1e3 * seconds:.2f}" for seconds in times) for times in (alone, step)]
        # The lower time of a routine for both steps, or the upper one for both.
        shares = sorted(a / b for a, b in zip(alone, step, strict=True))
        ours = [" .. ".join(f"{tau * share:.2f}" for share in shares) for tau in paper["tau"]]
        both = [f"{tau} ({speed:.2f})" for tau, speed in zip(paper["tau"], paper["speed"], strict=True)]
        return [name, found["topology"], *ranges, both[0], ours[0], both[1], ours[1]]

    return {
        "rows": [row(name, found) for name, found in results.items()],
        "fits": all(found["fits"] for found in results.values()),
    }


def refill() -> dict[str, Any]:
    """bench_refill.json."""
    report = load("bench_refill.json")
    cases = report["results"]
    rows = [
        (
            name,
            f"{found['refill']['forwards']} ({found['refill']['of_ideal']:.2f} x)",
            f"{found['static']['forwards']} ({found['static']['of_ideal']:.2f} x)",
            f"{found['refill']['tokens_per_second'] / found['static']['tokens_per_second']:.2f} x",
        )
        for name, found in cases.items()
    ]
    worst = max(found["refill"]["of_ideal"] for found in cases.values())
    differ = sum(found["refill"]["rows_that_differ_from_one_by_one"] for found in cases.values())
    return {
        "requests": report["requests"],
        "slots": report["rows"],
        "cores": report["machine"]["cores"],
        "rows": rows,
        "bars": [
            bar(
                "target forwards over tokens / (rows x tau), refilled rows, at most",
                worst,
                "{:.2f} x",
                "<= 1.15 x",
            ),
            bar("texts that differ from decoding one by one", differ, "{:.0f}", "<= 0"),
        ],
    }


def sizes() -> dict[str, Any]:
    """bench_sizes.json: drafts as long as pays."""
    report = load("bench_sizes.json")
    rows = [
        (
            str(found["rows"]),
            *(f"{found['median_tokens_per_second'][way]:.0f}" for way in ("none", "fixed", "auto")),
            f"{found['tokens_per_row_and_forward']['auto']:.2f}",
            f"{found['auto_over_the_better']:.2f} x",
        )
        for found in report["results"]
    ]
    worst = min(found["auto_over_the_better"] for found in report["results"])
    differ = sum(found["rows_that_differ_from_the_fixed_chain"] for found in report["results"])
    return {
        "chain": report["chain"],
        "rows": rows,
        "bars": [
            bar(
                "drafts as long as pays, over the better of the two, at least", worst, "{:.2f} x", ">= 0.95 x"
            ),
            bar("texts that differ from those of the chain", differ, "{:.0f}", "<= 0"),
        ],
    }


def shift() -> dict[str, Any]:
    """online_shift.json: drafters that learn as they decode."""
    report = load("online_shift.json")
    rows, bars = [], []
    for kind, name in (("model", "a draft model"), ("eagle", "an EAGLE-3 head")):
        found = report[kind]
        tau = found["tau"]
        rows.append(
            (
                name,
                *(f"{tau[domain][when]:.2f}" for domain in ("new", "old") for when in ("stale", "refreshed")),
                str(found["texts_that_differ"]),
                str(found["compiled_after_the_first_round"]),
            )
        )
        bars += [
            bar(
                f"{name}, refreshed over stale, on word problems", found["new_ratio"], "{:.2f} x", ">= 1.2 x"
            ),
            bar(f"{name}, refreshed over stale, on stories", found["old_ratio"], "{:.2f} x", ">= 0.97 x"),
        ]
    return {"rows": rows, "bars": bars}


def plans() -> dict[str, Any]:
    """plans.json, and paper_plans.json where it has the same slice: slices by the TPU's compiler."""
    report, own = load("plans.json"), load("paper_plans.json")["rows"]
    targets = list(dict.fromkeys(row["target"] for row in report["entries"].values()))
    entries = sorted(
        (
            row | {"tree": "10-7-60"} | ({**own[name], "tree": "10-8-60"} if _is_own(own, name, row) else {})
            for row in report["entries"].values()
            for name in [row["target"]]
        ),
        key=lambda row: (
            targets.index(row["target"]),
            GENERATIONS.index(row["topology"].split(":")[0]),
            row["chips"],
        ),
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


def _is_own(own: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> bool:
    return name in own and (row["topology"], row["dtype"]) == (own[name]["topology"], "bfloat16")


def kernels() -> dict[str, Any]:
    """bench_kernels_cpu.json: `margin_stats` on the CPU; tpu_cost_batch.json: attention of batches on a TPU."""
    report = load("bench_kernels_cpu.json")
    prefix = "margin_stats "
    found = [row for row in report["results"] if row["name"].startswith(prefix)]
    rows, ratios = [], {}
    for row in found:
        ms = {name: form["median_ms"] for name, form in row["forms"].items()}
        name = row["name"].removeprefix(prefix)
        plain, summed = ms["top_k"] / ms["margin_stats"], ms["top_k"] / ms["margin_stats logsumexp"]
        ratios[name] = (plain, summed)
        rows.append([
            f"`{name}`", f"{row['floor_ms']:.2f}", f"{ms['margin_stats']:.2f}", f"{ms['margin_stats logsumexp']:.2f}",
            f"{ms['top_k']:.2f}", f"{plain:.2f}", f"{summed:.2f}",
        ])  # fmt: skip
    plain, summed = ratios["(8, 8, 128256) float32"]
    smallest = min(x for name, (x, _) in ratios.items() if ", 4096)" in name)
    bars = [
        bar("`top_k` over `xla` at `(8, 8, 128256) float32`", plain, "{:.2f} x", ">= 2.5"),
        bar("the same with the logsumexp", summed, "{:.2f} x", ">= 2"),
        bar("`top_k` over `xla` at a vocabulary of 4096", smallest, "{:.2f} x", ">= 1"),
    ]
    return {
        "rows": rows,
        "bars": bars,
        "machine": report["machine"],
        "jax": report["jax"],
        "repeats": report["repeats"],
        "batch": [
            *[_of_batch(f"{rows}", f"b{rows}", draft) for rows in (8, 32) for draft in ("none", "chain-5")],
            _of_batch("32, ragged", "ragged", "none"),
        ],
    }


def gpu() -> dict[str, Any]:
    """check_h100.json and bench_attention_h100.json: a step of an 8B on a GPU, and attention of one of its layers."""
    report, attention = load("check_h100.json"), load("bench_attention_h100.json")
    large = report["large"]
    copy, product = large["copy_bytes_per_second"], large["product_flops"]
    steps = [
        [
            row["arm"], str(row["rows"]), f"{row['milliseconds']:.2f}", f"{1e3 * row['bytes'] / copy:.2f}",
            f"{row['tau']:.2f}", f"{row['tokens_per_second']:.0f}",
        ]
        for row in large["steps"]
    ]  # fmt: skip
    attended = [
        [
            str(row["rows"]), str(row["nodes"]), f"{1e3 * row['bytes'] / copy:.3f}",
            *(f"{row[form]['milliseconds']:.3f}" for form in ("turns", "all", "cudnn")),
        ]
        for row in attention["rows"]
    ]  # fmt: skip
    by_form = {
        name: [
            row["milliseconds"]
            for row in report["kernels"]
            if row["implementation"] == name and "margin" in row["operation"]
        ]
        for name in ("xla", "partitioned", "pallas_gpu")
    }
    return {
        "kind": report["device"]["kind"],
        "jax": report["versions"]["jax"],
        "seconds": report["seconds"],
        "copied": f"{copy / 1e9:,.0f}",
        "product": f"{product / 1e12:.0f}",
        "steps": steps,
        "prompt": f"{large['prompt']['milliseconds']:.0f}",
        "attended": attended,
        "forms": [[f"`{name}`", *(f"{taken:.4f}" for taken in times)] for name, times in by_form.items()],
        "right": not report["wrong"],
        "partitioned_is_fastest": all(
            first <= min(others)
            for first, *others in zip(
                by_form["partitioned"], by_form["xla"], by_form["pallas_gpu"], strict=True
            )
        ),
    }


def _of_batch(rows: str, label: str, draft: str) -> list[str]:
    cases = load("tpu_cost_batch.json")["cases"]
    xla, auto = (cases[f"{form}-{label}"][draft]["estimate"] for form in ("xla", "auto"))
    name = "none" if draft == "none" else f"EAGLE-3, chain of {draft.partition('-')[2]}"
    spans = [f"{1e3 * x['low_seconds']:.2f} .. {1e3 * x['high_seconds']:.2f}" for x in (xla, auto)]
    over = f"{auto['low_seconds'] / auto['bytes_seconds']:.2f}"
    return [rows, name, *spans, str(xla["ops"]), str(auto["ops"]), over]
