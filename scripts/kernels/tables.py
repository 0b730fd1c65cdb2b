"""Times of kernels: `margin_stats` on a CPU, attention as scheduled for a TPU, and a step of an 8B model on a GPU."""

from __future__ import annotations

from typing import Any

from scripts.common import load

VARIANTS = ("no dot merger", "no dot merger, graphs", "no dot merger, no triton", "joined")
"""Variants of `gpu_step`, except the default and the variant with XLA's attention."""


def figures() -> dict[str, Any]:
    """Return the variables of the page's template."""
    return {"kernels": kernels(), "gpu": gpu()}


def kernels() -> dict[str, Any]:
    """Return times of `margin_stats` from bench_kernels_cpu.json, and of attention from tpu_cost_batch.json."""
    report = load("bench_kernels_cpu.json")
    prefix = "margin_stats "
    rows = []
    for row in report["results"]:
        if not row["name"].startswith(prefix):
            continue
        ms = {name: form["median_ms"] for name, form in row["forms"].items()}
        name = row["name"].removeprefix(prefix)
        ratio, ratio_logsumexp = ms["top_k"] / ms["margin_stats"], ms["top_k"] / ms["margin_stats logsumexp"]
        rows.append([
            f"`{name}`", f"{row['floor_ms']:.2f}", f"{ms['margin_stats']:.2f}", f"{ms['margin_stats logsumexp']:.2f}",
            f"{ms['top_k']:.2f}", f"{ratio:.2f}", f"{ratio_logsumexp:.2f}",
        ])  # fmt: skip
    return {
        "rows": rows,
        "machine": report["machine"],
        "jax": report["jax"],
        "repeats": report["repeats"],
        "batch": [
            *[_of_batch(f"{rows}", f"b{rows}", draft) for rows in (8, 32) for draft in ("none", "chain-5")],
            _of_batch("32, ragged", "ragged", "none"),
        ],
    }


def gpu() -> dict[str, Any]:
    """Return times on a GPU: operations, an 8B model's steps and prompts, and the attention of one layer."""
    report, attention = load("check_h100.json"), load("bench_attention_h100.json")
    sections = {name: section["rows"] for name, section in load("gpu_step_h100.json")["sections"].items()}
    [device] = sections["device: default"]
    copy = device["copy_bytes_per_second"]
    in_turns = {(row["arm"], row["rows"]): row["milliseconds"] for row in report["large"]["steps"]}
    timed = {
        variant: {
            (row["arm"], row["rows"]): row
            for group in ("steps", "batches")
            for row in sections.get(f"{group}: {variant}", [])
        }
        for variant in ("default", "attention xla", *VARIANTS)
    }

    def milliseconds(variant: str, step: tuple[str, int]) -> str:
        return f"{timed[variant][step]['milliseconds']:.2f}" if step in timed[variant] else ""

    prompts = zip(
        *(sections[f"prompts: {name}"] for name in ("default", "attention xla", "no dot merger, no triton")),
        strict=True,
    )
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
        "product": f"{device['product_flops'] / 1e12:.0f}",
        "steps": [
            [
                step[0],
                str(step[1]),
                f"{1e3 * row['bytes'] / copy:.2f}",
                milliseconds("default", step),
                milliseconds("attention xla", step),
                f"{in_turns[step]:.2f}",
                f"{row['tau']:.2f}",
                f"{row['tokens_per_second']:.0f}",
            ]
            for step, row in timed["default"].items()
        ],
        "variants": list(VARIANTS),
        "options": [
            [step[0], str(step[1]), *(milliseconds(name, step) for name in ("default", *VARIANTS))]
            for step in timed["default"]
        ],
        "prompts": [
            [str(rows[0]["chunk"]), *(f"{row['milliseconds']:.0f}" for row in rows)] for rows in prompts
        ],
        "attended": attended,
        "forms": [[f"`{name}`", *(f"{time:.4f}" for time in times)] for name, times in by_form.items()],
        "right": not report["wrong"],
        "partitioned_is_fastest": all(
            first <= min(times)
            for first, *times in zip(
                by_form["partitioned"], by_form["xla"], by_form["pallas_gpu"], strict=True
            )
        ),
    }


def _of_batch(rows: str, label: str, draft: str) -> list[str]:
    cases = load("tpu_cost_batch.json")["cases"]
    xla, auto = (cases[f"{form}-{label}"][draft]["estimate"] for form in ("xla", "auto"))
    name = "none" if draft == "none" else f"EAGLE-3, chain of {draft.partition('-')[2]}"
    spans = [f"{1e3 * x['low_seconds']:.2f} .. {1e3 * x['high_seconds']:.2f}" for x in (xla, auto)]
    ratio = f"{auto['low_seconds'] / auto['bytes_seconds']:.2f}"
    return [rows, name, *spans, str(xla["ops"]), str(auto["ops"]), ratio]
