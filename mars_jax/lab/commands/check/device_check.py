"""The command: what is checked in which order, what is wrong, and how it is told."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from mars_jax import __version__
from mars_jax.cli.program import Parser, command, keep_compilations
from mars_jax.core import activity
from mars_jax.core.errors import MarsError

_DESCRIPTION = """\
Check this machine's device in a few minutes: every kernel against its reference (the TPU
kernels in their interpreter without a TPU), the tokens of drafts against autoregression, the
time of a step beside its plan, the speed that a draft gains, and on an accelerator the times
of a model of 8 billion weights. It uses the models of the package and weights drawn at random,
so nothing is downloaded.
"""
_EPILOG = """\
examples:
  mars-jax check
  mars-jax check --output check.json

Attach the file of --output to a report: it has versions, device, rows and figures, and no
names of hosts, users or folders. Exit code 1 means that something is wrong; a slow device is not.
"""
RIGHT = ("equal", "equal up to ties")


def parser() -> Parser:
    """The parser."""
    made = Parser(prog="mars-jax check", description=_DESCRIPTION, epilog=_EPILOG)
    made.add_argument("--version", action="version", version=f"mars-jax {__version__}")
    made.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    made.add_argument("--output", type=Path, metavar="FILE", help="write that object into a file as well")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    right = True

    def run(args: argparse.Namespace, out: IO[str]) -> None:
        nonlocal right
        right = _run(args, out)

    return command(lambda argv: parser().parse_args(argv), run, argv) or (0 if right else 1)


def _run(args: argparse.Namespace, out: IO[str]) -> bool:
    # Before minutes of work, not after them.
    if args.output is not None:
        there, folder = os.path.exists(args.output), args.output.absolute().parent
        if (there and not args.output.is_file()) or not folder.is_dir():
            raise MarsError(f"--output is '{args.output}': expected a file in a folder that exists.")
    # From here on jax loads; what is above answers at once.
    if args.output is not None:
        from mars_jax.lab.folder import check_writable

        check_writable(folder if there else args.output)
    keep_compilations()
    report = make_report(lambda so_far: _save(so_far, args.output))
    if args.json:
        print(json.dumps(report), file=out)
    else:
        _print(report, out)
    return not report["wrong"]


def _save(report: dict[str, Any], output: Path | None) -> None:
    if output is None:
        return
    from mars_jax.serve.rows import write_whole

    try:
        write_whole(output, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise MarsError(
            f"--output '{output}' cannot be written ({error.strerror}): name another file."
        ) from None


def make_report(save: Callable[[dict[str, Any]], None] = lambda so_far: None) -> dict[str, Any]:
    """Everything that is checked; "wrong" lists what is wrong, a sentence each.

    Args:
      save: given what is known after each section, the last time the whole report.
    """
    import jax

    from mars_jax.lab import provenance
    from mars_jax.lab.commands.check import kernels, large, machine, speed, tokens

    began = time.perf_counter()
    report: dict[str, Any] = {
        "made": {**provenance.stamp(), **provenance.machine()},
        "versions": machine.versions(),
        "device": machine.device(),
        "settings": machine.settings(),
    }
    sections: dict[str, Callable[[Callable[[str], None]], Any]] = {
        "kernels": lambda tick: kernels.check_kernels(jax.default_backend(), tick),
        "tokens": tokens.check_tokens,
        "speed": speed.check_speed,
        "large": large.check_large,
    }
    failed = []
    for name, check in sections.items():
        started = time.perf_counter()
        with activity.doing(f"checking {name}") as going:
            try:
                report[name] = check(lambda what, going=going: setattr(going, "detail", what))
            except (
                Exception
            ) as error:  # failures on a device are what the report is for; the other checks go on
                report[name] = None
                failed.append(
                    f"{name}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:500]}"
                )
        report["wrong"] = [
            *wrong_kernels(report.get("kernels") or []),
            *wrong_tokens(report.get("tokens") or []),
            *failed,
        ]
        report["seconds_of"] = report.get("seconds_of", {}) | {name: round(time.perf_counter() - started, 1)}
        report["seconds"] = round(time.perf_counter() - began, 1)
        save(report)
    return report


def wrong_kernels(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each row that is required and not equal."""
    return [
        f"{row['operation']} as {row['implementation']}, {row['shape']} {row['dtype']}: "
        f"{row['status']} ({row['detail']})"
        for row in rows
        if row["required"] and row["status"] != "equal"
    ]


def wrong_tokens(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each row whose tokens differ by more than ties."""
    return [f"{row['way']}: {row['status']} ({row['detail']})" for row in rows if row["status"] not in RIGHT]


def _print(report: dict[str, Any], out: IO[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    # Without a window that has a width, as in a notebook, the widest table has room.
    width = None if out.isatty() else 150
    screen = Console(file=out, width=width, soft_wrap=True, highlight=False, markup=False)
    found, device = report["versions"], report["device"]
    screen.print(f"mars-jax {found['mars-jax']}, jax {found['jax']}, {device['count']} x {device['kind']}")
    if report["kernels"] is not None:
        table = Table("kernel", "as", "", "operands", "", "against the reference", "ms")
        for row in report["kernels"]:
            status = row["status"] if row["required"] else f"{row['status']} (not used unasked)"
            if row["detail"]:
                status += f": {row['detail']}"
            taken = "" if row["milliseconds"] is None else f"{row['milliseconds']:.2f}"
            names = (row[key] for key in ("operation", "implementation", "how", "shape", "dtype"))
            table.add_row(*names, status, taken)
        screen.print(table)
    if report["tokens"] is not None:
        table = Table("tokens", "against autoregression", "tau")
        for row in report["tokens"]:
            detail = f" ({row['detail']})" if row["detail"] else ""
            table.add_row(row["way"], row["status"] + detail, f"{row['tau']:.2f}" if "tau" in row else "")
        screen.print(table)
    if report["speed"] is not None:
        _print_speed(report["speed"], Table, screen)
    if report["large"] is not None:
        _print_large(report["large"], Table, screen)
    for sentence in report["wrong"]:
        screen.print(f"wrong: {sentence}")
    if not report["wrong"]:
        screen.print(f"nothing is wrong; checked in {report['seconds']:.0f} s")


def _print_speed(speed: dict[str, Any], table_of: Any, screen: Any) -> None:
    plan = speed["plan"]
    table = table_of("decoding", "ms a step", "planned", "reads alone", "tokens/s", "tau", "speedup")
    for i, row in enumerate(speed["arms"]):
        prefix = "" if i else "autoregressive_"
        step, floor = plan.get(f"{prefix}step"), plan.get(f"{prefix}floor_seconds")
        low, high = row["speedup_range"]
        table.add_row(
            row["arm"],
            f"{row['step_milliseconds']:.3f}",
            "" if step is None else f"{1e3 * step['low_seconds']:.3f} to {1e3 * step['high_seconds']:.3f}",
            "" if floor is None else f"{1e3 * floor:.3f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['tau']:.2f}",
            f"{row['speedup']:.2f} ({low:.2f} to {high:.2f})" if i else "",
        )
    screen.print(table)
    if "missing" in plan:
        screen.print(f"no plan: {plan['missing']}")


def _print_large(large: dict[str, Any], table_of: Any, screen: Any) -> None:
    if "missing" in large:
        screen.print(f"no steps of a large model: {large['missing']}")
        return
    copy, product = large["copy_bytes_per_second"], large["product_flops"]
    screen.print(
        f"a copy moves {copy / 1e9:.0f} GB/s, a product of bfloat16 does {product / 1e12:.0f} TFLOP/s"
    )
    table = table_of(
        f"{large['target']}, {large['dtype']}, {large['context']} tokens",
        *("rows", "ms", "its reads alone", "its products alone", "tau", "tokens/s"),
    )
    for row in [*large["steps"], {"arm": "the prompt", "rows": 1} | large["prompt"]]:
        if "failed" in row:
            table.add_row(row["arm"], str(row["rows"]), row["failed"])
            continue
        figures = [row["milliseconds"], 1e3 * row.get("bytes", 0) / copy, 1e3 * row["flops"] / product]
        said = [f"{row['tau']:.2f}", f"{row['tokens_per_second']:.0f}"] if "tau" in row else []
        table.add_row(
            row["arm"], str(row["rows"]), *(f"{figure:.2f}" if figure else "" for figure in figures), *said
        )
    screen.print(table)
