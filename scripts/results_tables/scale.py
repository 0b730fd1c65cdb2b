"""Growth with sizes, memory, 8 bits, TPU slices, kernels."""

from __future__ import annotations

from typing import Any

from results_tables.bars import Bar, bar, load

GB = 1e9
GIB = 2**30
GENERATIONS = ("v5e", "v6e", "v5p")


def scale() -> dict[str, Any]:
    """bench_scale.json, bench_load.json, eval_int8.json and eval_int8_cache.json."""
    report, loading, int8 = (
        load("bench_scale.json")["results"],
        load("bench_load.json"),
        load("eval_int8.json"),
    )
    cached = load("eval_int8_cache.json")
    exact, story = cached["arithmetic"][0], cached["stories"][0]
    lost = story["nats_int8_minus_bfloat16"]

    def growth(series: str) -> float:
        times = [point["milliseconds"] for point in report[f"{series}, float32"]["points"].values()]
        return times[-1] / times[0]

    worst = max(row["host_bytes"] for row in loading["results"]) / GB
    limit = max(row["bar_bytes"] for row in loading["results"]) / GB
    logits = int8["logits, int8 from bfloat16"]
    rms, same = 100 * logits["rms_error_over_rms_logit"], 100 * logits["same_argmax"]
    taus = [int8[f"{name} target, {name} draft, exact"]["tau"] for name in ("int8", "bfloat16")]
    rows = [
        bar(
            "A step at 256 tokens in a buffer of 8192, over the same in a buffer of 512: chain of 6 nodes",
            report["buffer, float32"]["figure"], "{:.2f} x", "<= 1.3 x",
        ),
        bar(
            "The same, dynamic tree of 60 nodes",
            report["buffer, tree of 60, float32"]["figure"], "{:.2f} x", "<= 1.3 x",
        ),
        Bar(
            "Context 8192 over 256; batch 64 over 1; 64 nodes over 1",
            "; ".join(f"{growth(series):.1f} x" for series in ("context", "batch", "nodes")),
        ),
        bar(
            f"Host memory of loading or converting a checkpoint of {loading['checkpoint_bytes'] / GB:.2f} GB, at most",
            worst, "{:.2f} GB", f"<= {limit:.2f} GB",
        ),
        Bar(
            "int8 against bfloat16: RMS error of the logits; same best token; tau of `exact`",
            f"{rms:.2f}%; {same:.2f}%; {taus[0]:.2f} against {taus[1]:.2f}",
        ),
        Bar(
            f"Key-value cache, int8 against bfloat16, `exact`, {exact['problems']} problems: solved; tau; same answers",
            f"{100 * exact['accuracy']['int8']:.1f}% against {100 * exact['accuracy']['bfloat16']:.1f}%; "
            f"{exact['tau']['int8']:.2f} against {exact['tau']['bfloat16']:.2f}; {100 * exact['same_answers']:.1f}%",
        ),
        Bar(
            f"The same, {story['stories']} stories: nats a token under the bfloat16 cache",
            f"{lost['mean']:+.4f} [{lost['low']:+.4f}, {lost['high']:+.4f}]",
        ),
    ]  # fmt: skip
    return {"rows": rows}


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


def starts() -> dict[str, Any]:
    """bench_start.json: seconds to the first text."""
    report = load("bench_start.json")
    rows = [
        (
            state,
            *(
                f"{report['median'][f'{when}, {state}'][kind]:.1f}"
                for when in ("now", "before")
                for kind in KINDS
            ),
            *(f"{report['over_before'][state][kind]:.2f} x" for kind in KINDS),
        )
        for state in ("cold", "warm")
    ]
    bars = [
        bar(
            f"first text, {state}, seconds",
            report["median"][f"now, {state}"]["clock"],
            "{:.1f} s",
            f"<= {limit:g} s",
        )
        for state, limit in (("cold", report["bars"]["cold"]), ("warm", report["bars"]["warm"]))
    ] + [
        bar(
            f"first text, {state}, over the first version in turns",
            report["over_before"][state]["clock"],
            "{:.2f} x",
            f"<= {report['bars']['over_before']:g} x",
        )
        for state in ("cold", "warm")
    ]
    return {"before": report["before"], "cores": report["machine"]["cores"], "rows": rows, "bars": bars}


KINDS = ("clock", "processor")


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
    """plans.json: slices by the TPU's compiler."""
    report = load("plans.json")
    targets = list(dict.fromkeys(row["target"] for row in report["entries"].values()))
    entries = sorted(
        report["entries"].values(),
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


def kernels() -> dict[str, Any]:
    """bench_kernels_cpu.json: `margin_stats` on the CPU beside `lax.top_k`."""
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
    }
