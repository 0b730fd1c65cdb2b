"""`mars-jax pairs`: list the drafts for a model."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from mars_jax.cli.model_list import print_columns
from mars_jax.cli.program import Parser, command
from mars_jax.hub.gguf_file import is_gguf, read_gguf
from mars_jax.utils.catalogue import LOADS, MODELS, Pair, pairs
from mars_jax.utils.errors import MarsError, did_you_mean

_DESCRIPTION = """\
List the published heads and small models that can draft for a target, best first, and how
well each pair is tested.
"""
_EPILOG = """\
examples:
  mars-jax pairs
  mars-jax pairs llama-3.1-8b
  mars-jax pairs ~/models/Qwen3-8B --json

In the column "loads":
""" + "\n".join(
    textwrap.fill(meaning, 78, initial_indent=f"  {word:<7}", subsequent_indent=" " * 9)
    for word, meaning in LOADS.items()
)


def parser() -> Parser:
    """Return the parser."""
    command_parser = Parser(prog="mars-jax pairs", description=_DESCRIPTION, epilog=_EPILOG)
    target_help = (
        "short name, owner/name on the Hugging Face hub, or a checkpoint that is recognised by the name of its file or "
        "directory, or by the metadata of its GGUF file (default: all targets)"
    )
    command_parser.add_argument("target", metavar="TARGET", nargs="?", help=target_help)
    command_parser.add_argument("--json", action="store_true", help="print one JSON array")
    return command_parser


def main(argv: Sequence[str]) -> int:
    """Run the command line, and return the exit code."""
    return command(lambda argv: parser().parse_args(argv), _run, argv)


def _pairs_of_file(path: Path) -> list[Pair]:
    """Return the pairs of a GGUF file, which is identified by its metadata and may have any file name."""
    if not is_gguf(path):
        return []
    file = read_gguf(path)
    parts = [file.get(f"general.{key}", "") for key in ("basename", "size_label", "finetune")]
    base = "-".join(filter(None, parts[:2]))
    # Some files contain only the full name. The key finetune may be missing, or name a run instead of a checkpoint.
    names = ("-".join(filter(None, parts)), base, f"{base}-Instruct", file.get("general.name", ""))
    pair_lists = (pairs(name.replace(" ", "-")) for name in names if name)
    return next(filter(None, pair_lists), [])


def _run(args: argparse.Namespace, out: IO[str]) -> None:
    matching_pairs = pairs(args.target) or _pairs_of_file(Path(args.target or ""))
    if not matching_pairs:
        suggestion = did_you_mean(args.target, MODELS)
        raise MarsError(
            f"no head and no small model is known for '{args.target}'{suggestion}: draft with ngram, self or a "
            "small model with its tokenizer, or train one with mars-jax distill."
        )
    if args.json:
        print(json.dumps([pair._asdict() for pair in matching_pairs], indent=2), file=out)
    else:
        print_columns([Pair._fields, *matching_pairs], out)
