"""The text that `mars-jax plan` prints for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

TAUS = (2, 3, 4)
"""Tokens a step, for which the table says the speed."""


def _step_rows(made: Any, batch: int) -> list[tuple[str, str]]:
    """The estimates by the compiler's schedule, where there is one."""
    step, alone = made.step, made.autoregressive_step
    if step is None or alone is None:
        return []

    def between(low: float, high: float, unit: str, digits: int) -> str:
        return f"{low:.{digits}f} to {high:.{digits}f}{unit}"

    low, high = step["low_seconds"], step["high_seconds"]
    rows = [
        ("a step by the schedule", between(1e3 * low, 1e3 * high, " ms", 2)),
        ("  without a draft", between(1e3 * alone["low_seconds"], 1e3 * alone["high_seconds"], " ms", 2)),
        ("  executed", f"{step['ops']} instructions, {step['collectives']} collectives"),
    ]
    if step is alone:
        return [*rows[::2], ("tokens/s", between(batch / high, batch / low, "", 0))]
    ratios = sorted(step[key] / alone[key] for key in ("low_seconds", "high_seconds"))
    rows.append(("a draft pays above tau", between(ratios[0], ratios[1], "", 2)))
    rows += [
        (f"tokens/s at tau {tau}", between(tau * batch / high, tau * batch / low, "", 0)) for tau in TAUS
    ]
    return rows


def print_table(
    asked: dict[str, Any], made: Any, tried: Sequence[Any], drafts: Sequence[Any], out: IO[str]
) -> None:
    """The table of a plan (`planning.Plan`), with what was tried (`advice.Attempt`, `advice.Draft`)."""
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
    table.add_row("that over the bandwidth", f"{1e3 * made.floor_seconds:.2f} ms")
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
