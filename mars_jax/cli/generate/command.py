"""`python -m mars_jax.generate`: continue prompts from the command line."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from mars_jax.cli import signals
from mars_jax.cli.generate.applies import Choices, check_flags, check_interactive_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.arguments import parser as parser  # for `commands.parser_of`
from mars_jax.cli.generate.prompts import PromptRow, from_texts, read_prompts
from mars_jax.cli.program import command, keep_compilations
from mars_jax.cli.progress import busy
from mars_jax.cli.rule_flags import print_drafters, print_rules
from mars_jax.utils.errors import MarsError

if TYPE_CHECKING:
    from mars_jax.serve.rows import RowFile


def main(argv: Sequence[str]) -> int:
    """Run the command line, and return the exit code."""
    return command(parse, functools.partial(_run, argv), argv)


def _run(argv: Sequence[str], args: argparse.Namespace, out: IO[str]) -> None:
    if args.list_rules or args.list_drafters:
        _list(args, out)
        return
    prompts_path = args.prompts_file
    if args.prompts and prompts_path is not None:
        raise MarsError("there are prompts and a --prompts-file: give one of the two.")
    if not args.prompts and prompts_path is None:
        if not (sys.stdin.isatty() and out.isatty()):
            raise MarsError(
                "there are no prompts: pass arguments or a --prompts-file, or run in a terminal to type them."
            )
        check_interactive_flags(args)
        from mars_jax.cli.generate.repl import talk

        talk(argv, args, out)
        return
    rows = from_texts(args.prompts) if prompts_path is None else read_prompts(prompts_path, args.rule)
    choices = check_flags(args, rows)
    # Each sample is a separate row with a separate seed, next to the other samples of its prompt.
    rows = [row for row in rows for _ in range(args.samples or 1)]
    if args.part is not None and not rows[args.part]:
        raise MarsError(f"--part has none of the {len(rows)} rows: divide them into fewer parts.")

    from mars_jax.cli.open_target import joined_processes

    keep_compilations()
    with joined_processes(args, rows, out) as output_stream:
        _decode(args, choices, rows, output_stream)


def _list(args: argparse.Namespace, out: IO[str]) -> None:
    """Print the tables of rules and drafters."""
    if args.prompts or args.prompts_file is not None:
        raise MarsError("--list-rules and --list-drafters take no prompts: leave out one of the two.")
    if args.list_rules:
        print_rules(out, as_json=args.json, spec=args.verify)
    if args.list_drafters:
        print_drafters(out, as_json=args.json)


def _decode(args: argparse.Namespace, choices: Choices, rows: Sequence[PromptRow], out: IO[str]) -> None:
    from mars_jax.cli.generate import output
    from mars_jax.cli.generate.job import open_job
    from mars_jax.serve.rows import RowFile

    part_rows = rows[args.part or slice(None)]
    with contextlib.ExitStack() as stack:
        row_file = None
        if args.output is not None:
            # Open the file before loading the weights, so that a file from another run is rejected immediately.
            row_file = RowFile(args.output, output.recorded(args, rows), resume=args.resume)
            stack.callback(row_file.close)
            stack.enter_context(signals.ending(functools.partial(_stop, row_file, len(part_rows))))
        with busy("loading"):
            job = open_job(args, choices, part_rows)
        if row_file is not None:
            # Fingerprints are computed from the weights, so only now can they be compared with those of the file.
            row_file.start(output.fingerprints(job.session, choices.draft))
        if (reconfigure := getattr(out, "reconfigure", None)) is not None:
            # JSON is written as UTF-8 in every locale.
            if args.json:
                reconfigure(encoding="utf-8", errors="strict")
            else:
                reconfigure(errors="replace")  # replace characters that the locale cannot encode
        if args.compare:
            output.print_comparison(job, out, json=args.json)
        elif row_file is not None:
            output.write_output(job, row_file, out, json=args.json)
        elif args.json:
            output.print_json(job, out)
        elif choices.streams:
            output.stream_text(job, out, chat=args.chat)
        else:
            output.print_text(job, out, chat=args.chat)
        job.check_finite()


def _stop(file: RowFile, total: int) -> str:
    """Close the file when a signal ends the process. Return a note with the number of rows and how to continue."""
    num_rows = file.stop()
    if num_rows == total:
        return f" with all {total} rows in '{file.path}': nothing is left to do."
    return f" with {num_rows} of {total} rows in '{file.path}': run it again with --resume to continue."
