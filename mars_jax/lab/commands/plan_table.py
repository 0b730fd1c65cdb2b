"""The table that `mars-jax plan` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

TAUS = (2, 3, 4)
"""Tokens per step for which the table shows the speed."""


def _step_rows(plan: Any, batch: int) -> list[tuple[str, str]]:
    """Return the rows of the estimates."""
    step, alone = plan.step, plan.autoregressive_step
    rows = []
    if step is not None:
        rows.append(("a step, estimated", _milliseconds(step)))
    if alone is not None:
        rows.append(("  without a draft", _milliseconds(alone)))
    if step is not None and alone is not None and step != alone:
        first, last = sorted(step[end] / alone[end] for end in ("low_seconds", "high_seconds"))
        rows.append(("a draft pays above tau", f"{first:.2f} to {last:.2f}"))
        rows += [(f"tokens/s at tau {tau}", _speeds(step, tau * batch)) for tau in TAUS]
    elif alone is not None and step is not None:
        rows.append(("tokens/s", _speeds(alone, batch)))
    return rows


def _milliseconds(step: dict[str, float]) -> str:
    return f"{1e3 * step['low_seconds']:.2f} to {1e3 * step['high_seconds']:.2f} ms"


def _speeds(step: dict[str, float], tokens: int) -> str:
    return f"{tokens / step['high_seconds']:.0f} to {tokens / step['low_seconds']:.0f}"


def print_table(
    inputs: dict[str, Any], plan: Any, attempts: Sequence[Any], drafts: Sequence[Any], out: IO[str]
) -> None:
    """Print a plan (`planning.Plan`) with its attempts (`advice.Attempt`) and drafts (`advice.Draft`)."""
    from rich.console import Console
    from rich.table import Table

    def gib(count: int) -> str:
        return f"{count / 2**30:.2f} GiB"

    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh.items())
    table = Table(
        title=f"{inputs['target']} with {inputs['draft']} on {plan.topology}, {mesh}", show_header=False
    )
    used = f"{gib(plan.held_bytes)} of {gib(plan.hbm_bytes)}"
    table.add_row("fits", "yes" if plan.fits else "no")
    table.add_row("memory of a device", used if plan.held_bytes else "more than there is")
    table.add_row("  weights", gib(plan.weight_bytes))
    table.add_row("  caches and state", gib(plan.cache_bytes))
    table.add_row("read in a step, at least", gib(plan.read_bytes))
    table.add_row("a step, at least", f"{1e3 * plan.floor_seconds:.2f} ms")
    table.add_row("  without a draft", f"{1e3 * plan.autoregressive_floor_seconds:.2f} ms")
    for row in _step_rows(plan, inputs["batch"]):
        table.add_row(*row)
    table.add_row("compiled in", f"{plan.compile_seconds:.0f} s")
    for name, count in plan.collectives.items():
        table.add_row("collective", f"{count} x {name}")
    for draft in drafts:
        name = "draft with" if draft is drafts[0] else "  rather than"
        times = f"{1e3 * draft.low_seconds:.2f} to {1e3 * draft.high_seconds:.2f} ms, pays above tau "
        times += f"{draft.pays_above[0]:.2f} to {draft.pays_above[1]:.2f}, {draft.gain:.2f} x at tau {draft.tau:.2f}"
        table.add_row(name, f"{draft.flags} ({times})")
    for note in plan.notes:
        table.add_row("note", note)
    for attempt in attempts:
        flag = (
            f"--topology {attempt.topology}"
            if attempt.topology != plan.topology
            else f"--dtype {attempt.dtype}"
        )
        memory = (
            f"{gib(attempt.held_bytes)} of {gib(attempt.hbm_bytes)}"
            if attempt.held_bytes
            else "more than there is"
        )
        table.add_row("try" if attempt.fits else "fits neither", f"{flag} ({memory})")
    Console(file=out, soft_wrap=True, highlight=False).print(table)
