"""`mars-jax convert`: write a checkpoint in a different dtype, for any mesh."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from mars_jax.cli import signals
from mars_jax.cli.flags import add_flags
from mars_jax.cli.program import Parser, command
from mars_jax.cli.progress import progress
from mars_jax.utils.errors import say
from mars_jax.utils.settings import DTYPES

_DESCRIPTION = """\
Convert a checkpoint once to the dtype to decode with, so that it loads without casting.
On several hosts, each process then reads only the shards of its own devices, for any mesh.
Only one array of weights is in memory at a time. Every load verifies the files' checksums.
"""
_EPILOG = """\
examples:
  mars-jax convert Qwen/Qwen3-235B-A22B /data/qwen3-235b --dtype int8
  python -m mars_jax.generate --target /data/qwen3-235b --mesh expert=8 "Hello"

DST gets its name only when it is complete. After a kill, run the same command again; it
removes the partial files. Figures go to stderr; bad input ends with exit code 2.
"""


def parser() -> Parser:
    """Return the parser."""
    command_parser = Parser(prog="mars-jax convert", description=_DESCRIPTION, epilog=_EPILOG)
    source_help = "checkpoint directory, GGUF file, or owner/name on the Hugging Face hub"
    command_parser.add_argument("source", metavar="SRC", help=source_help)
    command_parser.add_argument("destination", metavar="DST", type=Path, help="directory, new or empty")
    dtype_help = (
        "dtype of the weights (default: that of the checkpoint); int8 and int4 apply to matrices only"
    )
    command_parser.add_argument("--dtype", choices=DTYPES, help=dtype_help)
    add_flags(command_parser, {"--overwrite": "replace a DST that is itself a conversion"})
    return command_parser


def main(argv: Sequence[str]) -> int:
    """Run the command line, and return the exit code."""
    return command(lambda argv: parser().parse_args(argv), _run, argv)


def _run(args: argparse.Namespace, out: IO[str]) -> None:
    # Import jax only here, because parsing the flags does not need it.
    import jax

    from mars_jax import hub
    from mars_jax.hub.durable import staging_path

    jax.config.update("jax_platforms", "cpu")  # leave the accelerator to other processes
    start_time, written_bytes = time.perf_counter(), 0
    # `hub.convert` writes into this folder and renames it at the end, so a killed run leaves nothing else behind.
    folder = staging_path(args.destination)

    def leftover() -> str:
        return f": the same command removes '{folder}' and starts again." if folder.exists() else ""

    with signals.ending(leftover), progress("converting") as show:

        def count(written: int) -> None:
            nonlocal written_bytes
            written_bytes += written
            show(written_bytes, None, f"{written_bytes / 1e9:.2f} GB written")

        destination = hub.convert(
            args.source, args.destination, dtype=args.dtype, overwrite=args.overwrite, progress=count
        )
    seconds = time.perf_counter() - start_time
    say(
        f"{destination}: {written_bytes / 1e9:.3g} GB written in {seconds:.1f} s "
        f"({written_bytes / seconds / 1e6:.0f} MB/s); decode with --target {destination}"
    )
