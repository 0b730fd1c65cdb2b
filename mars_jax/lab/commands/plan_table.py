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
    asked: dict[str, Any], made: Any, tried: Sequence[Any], drafts: Sequence[Any], out: IO[str]
) -> None:
    """Print a plan (`planning.Plan`) with its attempts (`advice.Attempt`) and drafts (`advice.Draft`)."""
    from rich.console import Console
    from rich.table import Table

    def gib(count: int) -> str:
        return f"{count / 2**30:.2f} GiB"

    mesh = ",".join(f"{name}={size}" for name, size in made.mesh.items())
    table = Table(
        title=f"{asked['target']} with {asked['draft']} on {made.topology}, {mesh}", show_header=False
    )
    used = f"{gib(made.held_bytes)} of {gib(made.hbm_bytes)}"
    table.add_row("fits", "yes" if made.fits else "no")
    table.add_row("memory of a device", used if made.held_bytes else "more than there is")
    table.add_row("  weights", gib(made.weight_bytes))
    table.add_row("  caches and state", gib(made.cache_bytes))
    table.add_row("read in a step, at least", gib(made.read_bytes))
    table.add_row("a step, at least", f"{1e3 * made.floor_seconds:.2f} ms")
    table.add_row("  without a draft", f"{1e3 * made.autoregressive_floor_seconds:.2f} ms")
    for row in _step_rows(made, asked["batch"]):
        table.add_row(*row)
    table.add_row("compiled in", f"{made.compile_seconds:.0f} s")
    for name, count in made.collectives.items():
        table.add_row("collective", f"{count} x {name}")
    for one in drafts:
        name = "draft with" if one is drafts[0] else "  rather than"
        times = f"{1e3 * one.low_seconds:.2f} to {1e3 * one.high_seconds:.2f} ms, pays above tau "
        times += f"{one.pays_above[0]:.2f} to {one.pays_above[1]:.2f}, {one.gain:.2f} x at tau {one.tau:.2f}"
        table.add_row(name, f"{one.flags} ({times})")
    for note in made.notes:
        table.add_row("note", note)
    for one in tried:
        flag = f"--topology {one.topology}" if one.topology != made.topology else f"--dtype {one.dtype}"
        of = f"{gib(one.held_bytes)} of {gib(one.hbm_bytes)}" if one.held_bytes else "more than there is"
        table.add_row("try" if one.fits else "fits neither", f"{flag} ({of})")
    Console(file=out, soft_wrap=True, highlight=False).print(table)
