"""`python -m mars_jax.generate`: continue prompts from the command line."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import IO

from mars_jax.cli.generate.applies import Plan, check_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.prompts import PromptRow, from_texts, read_prompts
from mars_jax.cli.generate.recorded import recorded
from mars_jax.cli.program import keep_compilations, program
from mars_jax.core.errors import MarsError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return program(_run, argv)


def _run(argv: Sequence[str] | None, out: IO[str]) -> None:
    with contextlib.redirect_stdout(out):
        args = parse(argv)
    if args.prompts and args.prompts_file is not None:
        raise MarsError("there are prompts and a --prompts-file: give one of the two.")
    if not args.prompts and args.prompts_file is None:
        raise MarsError("there are no prompts: give texts, or a --prompts-file.")
    file = args.prompts_file
    rows = from_texts(args.prompts) if file is None else read_prompts(file)
    plan = check_flags(args, rows)

    # From here on jax loads; what is above answers at once.
    from mars_jax.cli.hosts import joined

    keep_compilations()
    with joined(args, rows, out) as place:
        _decode(args, plan, rows, place)


def _decode(args: argparse.Namespace, plan: Plan, rows: Sequence[PromptRow], out: IO[str]) -> None:
    from mars_jax.cli.generate import ways
    from mars_jax.cli.generate.output_file import OutputFile, Unwritten
    from mars_jax.cli.generate.session import open_session
    from mars_jax.placement import hosts

    with contextlib.ExitStack() as stack:
        file: OutputFile | Unwritten = Unwritten()
        if args.output is not None and hosts.is_first():
            file = OutputFile(args.output, recorded(args, plan, rows), resume=args.resume)
            stack.callback(file.close)
        with ways.busy("loading"):
            session = open_session(args, plan, rows)
        # A narrow locale must not end a run in the middle of a text; JSON is UTF-8 whatever the locale.
        if (reconfigure := getattr(out, "reconfigure", None)) is not None:
            reconfigure(encoding="utf-8" if args.json else None, errors="strict" if args.json else "replace")
        if args.compare:
            ways.print_comparison(session, out, json=args.json)
        elif args.output is not None:
            ways.write_output(session, file, out, json=args.json)
        elif args.json:
            ways.print_json(session, out)
        elif plan.streams:
            ways.stream_text(session, out, chat=args.chat, speedup=plan.measures_speedup)
        else:
            ways.print_text(session, out, chat=args.chat, speedup=plan.measures_speedup)
