"""The same prompts three ways: autoregressively, with exact and with mars, timed in one run."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from mars_jax.cli.generate.job import Job
from mars_jax.cli.progress import Show
from mars_jax.core.rule import LoadedRule
from mars_jax.serve.requests import Result
from mars_jax.verify import exact

REPEATS = 5
"""Timed runs of each way; the median counts."""


def compare(job: Job, show: Show) -> dict[str, Any]:
    """Decode everything `REPEATS` times each way, in turns, so that a slow spell strikes all alike.

    Compilation happens before, and is not timed. `show(done, total, "")` is called after every run.

    Raises:
      MarsError: as `Session.decode`.
    """
    pair, requests = job.session, job.requests
    ways = {
        "autoregressive": pair.autoregressive,
        "exact": pair.using(LoadedRule(exact())),
        pair.rule_name: pair,
    }
    for way in ways.values():
        if len(requests) > way.batch_size:
            way.queue(requests)
        else:
            way.compile(requests)
    runs: dict[str, list[Result]] = {name: [] for name in ways}
    for turn in range(REPEATS):
        for place, (name, way) in enumerate(ways.items()):
            runs[name].append(way.decode(requests))
            show(turn * len(ways) + place + 1, REPEATS * len(ways), "")
    rows = [_row(name, results) for name, results in runs.items()]
    for row in rows:
        row["speedup"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    return {
        "prompts": len(requests),
        "batch_size": pair.batch_size,
        "repeats": REPEATS,
        "rules": rows,
    }


def _row(name: str, results: list[Result]) -> dict[str, Any]:
    metrics = results[0].metrics  # every repeat decodes the same tokens
    seconds = statistics.median(result.seconds for result in results)
    return {
        "rule": name,
        "tokens": metrics.emitted,
        "seconds": seconds,
        "tokens_per_second": metrics.emitted / max(seconds, 1e-9),
        "speedup": 1.0,
        "steps": metrics.steps,
        "tau": metrics.tau,
        "relaxed_share": metrics.relaxed_share,
    }


def to_table(comparison: dict[str, Any]) -> Table:
    """Return the comparison as a table for people."""
    prompts, repeats = comparison["prompts"], comparison["repeats"]
    table = Table(
        caption=f"{prompts} prompt{'s' * (prompts != 1)}, batches of {comparison['batch_size']}, median of "
        f"{repeats} runs; relaxed: share of the accepted draft tokens",
        caption_justify="left",
    )
    table.add_column("rule")
    for name in ("tokens/s", "speedup", "tau", "relaxed"):
        table.add_column(name, justify="right")
    for row in comparison["rules"]:
        relaxed = "-" if row["rule"] == "autoregressive" else f"{row['relaxed_share']:.1%}"
        table.add_row(
            row["rule"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['tau']:.2f}",
            relaxed,
        )
    return table
