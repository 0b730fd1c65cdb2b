"""The command `mars-jax check`: check kernels, tokens and the speed of a large model on this device."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mars_jax.cli.flags import add_flags
from mars_jax.cli.program import Parser, command, keep_compilations
from mars_jax.utils import activity
from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject
from mars_jax.utils.version import __version__

if TYPE_CHECKING:
    from rich.table import Table

_DESCRIPTION = """\
Check this machine's device in a few minutes: compare every kernel with its reference (without a
TPU, the TPU kernels run in their interpreter), compare the tokens of drafts with the target's own,
and on an accelerator measure the steps of a model of 8 billion weights. It uses the models of the
package and random weights, so it downloads nothing.
"""
_EPILOG = """\
examples:
  mars-jax check
  mars-jax check --output check.json

Attach the file of --output to a report: it has versions, device, rows and figures, and no
names of hosts, users or folders. Exit code 1 means that something is wrong; a slow device is not.
"""
WIDTH = 150
"""Width of the tables in characters."""
_PACKAGES = ("mars-jax", "jax", "jaxlib", "libtpu", "flax", "numpy", "transformers")
_SETTINGS = (
    "MARS_JAX_PALLAS",
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "JAX_DEFAULT_MATMUL_PRECISION",
)
"""Environment variables that affect compilation."""


def parser() -> Parser:
    """Return the parser of the command."""
    command_parser = Parser(prog="mars-jax check", description=_DESCRIPTION, epilog=_EPILOG)
    command_parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_flags(command_parser, {"--output FILE": "write that object into a file as well"}, type=Path)
    return command_parser


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    return command(lambda argv: parser().parse_args(argv), _run, argv)


def _run(args: argparse.Namespace, out: IO[str]) -> int:
    keep_compilations()
    # Reject an invalid path before the checks, which take minutes.
    _save({}, args.output)
    report = make_report(args.output)
    if args.json:
        print(json.dumps(report), file=out)
    else:
        _print_tables(report, out)
    return int(bool(report["wrong"]))


def _save(report: JsonObject, output: Path | None) -> None:
    if output is None:
        return
    try:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise MarsError(
            f"--output '{output}' cannot be written ({error.strerror}): name a file in a folder that exists."
        ) from None


def make_report(output: Path | None = None) -> JsonObject:
    """Run all checks, write the report to `output` after each of them, and return it.

    Its entry "wrong" lists the failures, one sentence each.
    """
    from mars_jax.lab import provenance
    from mars_jax.lab.commands.check import kernels, large, tokens

    start_time = time.perf_counter()
    report: JsonObject = {
        "made": {**provenance.stamp(), **provenance.machine()},
        "versions": {name: provenance.version(name) for name in _PACKAGES},
        "device": device(),
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "wrong": [],
    }
    checks = {"kernels": kernels.check_kernels, "tokens": tokens.check_tokens, "large": large.check_large}
    for section, check in checks.items():
        with activity.doing(f"checking {section}"):
            # If a check fails, the other checks still run.
            try:
                report[section] = check()
            except Exception as error:
                report[section] = None
                report["wrong"].append(f"{section}: {large.error_summary(error)}")
        # The large model is only timed, and low speed is not a failure.
        if section != "large":
            report["wrong"] += wrong_rows(report[section] or [])
        report["seconds"] = round(time.perf_counter() - start_time, 1)
        _save(report, output)
    return report


def device() -> JsonObject:
    """Describe the first device of this process, which runs all checks."""
    import jax

    first_device = jax.local_devices()[0]
    memory_stats = first_device.memory_stats() or {}
    return {
        "platform": first_device.platform,
        "kind": first_device.device_kind,
        "count": jax.device_count(),
        "memory_bytes": memory_stats.get("bytes_limit"),
        "driver": getattr(first_device.client, "platform_version", None),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }


def wrong_rows(rows: Sequence[JsonObject]) -> list[str]:
    """Return a sentence for each row that failed, or whose results differ for a reason other than ties."""
    sentences = []
    for row in rows:
        if not row["status"].startswith("equal"):
            check_name = row.get("way") or "{operation} as {implementation}, {shape} {dtype}".format_map(row)
            sentences.append(f"{check_name}: {row['status']} ({row['detail']})")
    return sentences


def _print_tables(report: JsonObject, out: IO[str]) -> None:
    from rich.table import Table

    from mars_jax.cli.generate.terminal import console

    screen, device_info = console(out), report["device"]
    screen.width = WIDTH
    screen.print(
        f"mars-jax {__version__}, jax {report['versions']['jax']}, {device_info['count']} x {device_info['kind']}"
    )
    table = Table("kernel", "as", "", "operands", "", "against the reference", "", "ms")
    for row in report["kernels"] or []:
        column_names = ("operation", "implementation", "how", "shape", "dtype", "status", "detail")
        table.add_row(*(row[name] for name in column_names), _number(row["milliseconds"]))
    screen.print(table, soft_wrap=False)
    table = Table("tokens", "against the target's own", "", "tau")
    for row in report["tokens"] or []:
        table.add_row(row["way"], row["status"], row["detail"], _number(row["tau"]))
    screen.print(table, soft_wrap=False)
    large_report = report["large"] or {"missing": "the check failed"}
    if "missing" in large_report:
        screen.print(f"no times of a large model: {large_report['missing']}")
    else:
        screen.print(_large_table(large_report), soft_wrap=False)
    for sentence in report["wrong"]:
        screen.print(f"wrong: {sentence}")
    if not report["wrong"]:
        screen.print(f"nothing is wrong; checked in {report['seconds']:.0f} s")


def _large_table(large: JsonObject) -> Table:
    from rich.table import Table

    copy_rate, product_rate = large["copy_bytes_per_second"], large["product_flops"]
    table = Table(
        f"{large['target']}, {large['dtype']}, {large['context']} tokens",
        *("rows", "ms", "its reads alone", "its products alone", "tau", "tokens/s"),
        title=f"a copy moves {copy_rate / 1e9:.0f} GB/s, a bfloat16 product runs at {product_rate / 1e12:.0f} TFLOP/s",
    )
    for row in [*large["steps"], {"arm": "the prompt", "rows": 1} | large["prompt"]]:
        if "failed" in row:
            table.add_row(row["arm"], str(row["rows"]), row["failed"])
            continue
        product_ms = 1e3 * row["flops"] / product_rate
        cells = ["", _number(product_ms), "", ""]
        # The row for the prompt lacks the fields `bytes` and `tokens_per_second`.
        if "bytes" in row:
            read_ms = 1e3 * row["bytes"] / copy_rate
            cells = [
                _number(read_ms),
                _number(product_ms),
                _number(row["tau"]),
                f"{row['tokens_per_second']:.0f}",
            ]
        table.add_row(row["arm"], str(row["rows"]), _number(row["milliseconds"]), *cells)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
