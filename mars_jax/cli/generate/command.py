"""`python -m mars_jax.generate`: continue prompts from the command line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Sequence
from typing import IO

from mars_jax.cli import remote, signals
from mars_jax.cli.generate.applies import Choices, check_asked, check_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.prompts import PromptRow, from_texts, read_prompts
from mars_jax.cli.part import part_path
from mars_jax.cli.program import command, keep_compilations
from mars_jax.cli.rule_flags import print_drafters, print_rules
from mars_jax.core.errors import MarsError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    return command(parse, functools.partial(_run, given), given)


def _run(argv: Sequence[str], args: argparse.Namespace, out: IO[str]) -> None:
    if args.list_rules or args.list_drafters:
        _list(args, out)
        return
    if args.prompts and args.prompts_file is not None:
        raise MarsError("there are prompts and a --prompts-file: give one of the two.")
    if not args.prompts and args.prompts_file is None:
        if not (sys.stdin.isatty() and out.isatty()):
            raise MarsError(
                "there are no prompts: give texts, or a --prompts-file; on a terminal they are asked for."
            )
        check_asked(args)
        from mars_jax.cli.generate.repl import talk

        talk(argv, args, out)
        return
    file = args.prompts_file
    rows = from_texts(args.prompts) if file is None else read_prompts(file, args.rule)
    choices = check_flags(args, rows)
    rows = [row for row in rows for _ in range(args.samples or 1)]
    if args.part is not None:
        told = repr([dataclasses.astuple(row) for row in rows])
        args.part = args.part.among(len(rows))._replace(
            prompts=hashlib.sha256(told.encode()).hexdigest()[:16]
        )
        args.output, rows = part_path(args.output, args.part), rows[args.part.share()]

    # From here on jax loads; what is above answers at once.
    from mars_jax.cli.host_flags import joined

    keep_compilations()
    with joined(args, rows, out) as place:
        _decode(args, choices, rows, place)


def _list(args: argparse.Namespace, out: IO[str]) -> None:
    """Print the tables, and nothing else."""
    if args.prompts or args.prompts_file is not None:
        flag = "--list-rules" if args.list_rules else "--list-drafters"
        raise MarsError(f"{flag} prints a table and decodes nothing: leave out the prompts, or the flag.")
    if args.list_rules:
        print_rules(out, as_json=args.json, own=args.verify)
    if args.list_drafters:
        print_drafters(out, as_json=args.json)


def _decode(args: argparse.Namespace, choices: Choices, rows: Sequence[PromptRow], out: IO[str]) -> None:
    from mars_jax.cli.generate import ways
    from mars_jax.cli.generate.job import open_job
    from mars_jax.cli.generate.output_file import OutputFile, Unwritten, fingerprints, recorded
    from mars_jax.cli.generate.uploaded_file import UploadedFile
    from mars_jax.placement import hosts

    with contextlib.ExitStack() as stack:
        file: OutputFile | Unwritten = Unwritten()
        if args.output is not None:
            stack.enter_context(signals.ending(lambda: file.end()))
        if args.output is not None and hosts.is_first():
            made = UploadedFile if remote.is_url(args.output) else OutputFile
            file = made(args.output, recorded(args, choices, rows), resume=args.resume)
            stack.callback(file.close)
        with ways.busy("loading"):
            job = open_job(args, choices, rows)
        if args.output is not None:
            file.check_weights(fingerprints(job.session, choices.draft))
        # A narrow locale must not end a run in the middle of a text; JSON is UTF-8 whatever the locale.
        if (reconfigure := getattr(out, "reconfigure", None)) is not None:
            reconfigure(encoding="utf-8" if args.json else None, errors="strict" if args.json else "replace")
        if args.compare:
            ways.print_comparison(job, out, json=args.json)
        elif args.output is not None:
            ways.write_output(job, file, out, json=args.json)
        elif args.json:
            ways.print_json(job, out)
        elif choices.streams:
            ways.stream_text(job, out, chat=args.chat)
        else:
            ways.print_text(job, out, chat=args.chat)
        job.check_finite()
