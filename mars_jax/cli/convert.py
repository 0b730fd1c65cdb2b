"""`mars-jax convert`: a Hugging Face checkpoint into an Orbax checkpoint from the command line."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from mars_jax import __version__, specs
from mars_jax.cli import signals
from mars_jax.cli.program import Parser, command
from mars_jax.cli.progress import Pace, passing_bars
from mars_jax.core.errors import say

_DESCRIPTION = """\
Convert a checkpoint of the Hugging Face layout into one whose weights are an Orbax checkpoint.
On several hosts each process then reads only the parts of its own devices, for any mesh.
One array of weights is in memory at a time. The result is read back and compared, and its
checksums are compared again at every load.
"""
_EPILOG = """\
examples:
  mars-jax convert Qwen/Qwen3-235B-A22B /data/qwen3-235b --dtype int8
  python -m mars_jax.generate --target /data/qwen3-235b --mesh expert=8 "Hello"

DST gets its name only when it is complete. After a kill, start the command again; it removes
what was left. Figures go to stderr; bad input ends with exit code 2.
"""


def parser() -> Parser:
    """Make the parser."""
    made = Parser(prog="mars-jax convert", description=_DESCRIPTION, epilog=_EPILOG)
    made.add_argument("--version", action="version", version=f"mars-jax {__version__}")
    made.add_argument(
        "source", metavar="SRC", help="checkpoint directory, GGUF file, or owner/name on the Hugging Face hub"
    )
    made.add_argument("destination", metavar="DST", type=Path, help="directory, new or empty")
    made.add_argument(
        "--dtype",
        choices=specs.STORED_DTYPES,
        help="dtype of the weights (default: the checkpoint's own); int8: matrices in 8 bits, the rest in its own",
    )
    made.add_argument("--overwrite", action="store_true", help="replace a DST that is itself a conversion")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return command(lambda argv: parser().parse_args(argv), _run, argv)


def _run(args: argparse.Namespace, out: IO[str]) -> None:
    # From here on jax loads; what is above answers at once.
    import jax
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    from mars_jax import hub
    from mars_jax.hub.durable import beside

    jax.config.update("jax_platforms", "cpu")  # it computes nothing, and others may need the accelerator
    began, size = time.perf_counter(), 0
    columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    place = beside(args.destination, "writing")

    def leftover() -> str:
        return f": the same command removes '{place}' and starts again." if place.exists() else ""

    with signals.ending(leftover), passing_bars("converting", *columns) as (going, bars):
        tasks, paces = {}, {}

        def progress(stage: str, done: int, total: int) -> None:
            nonlocal size
            size = total
            if stage not in tasks:
                tasks[stage], paces[stage] = bars.add_task(stage, total=total), Pace(total)
            bars.advance(tasks[stage], done)
            paces[stage].done += done
            going.detail = f"{stage} {paces[stage].describe()} bytes"

        made = hub.convert(
            args.source, args.destination, dtype=args.dtype, overwrite=args.overwrite, progress=progress
        )
    seconds = time.perf_counter() - began
    say(
        f"{made}: {size / 1e9:.2f} GB written, read back and equal, in {seconds:.1f} s "
        f"({size / seconds / 1e6:.0f} MB/s); decode with --target {made}"
    )
