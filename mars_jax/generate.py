"""`python -m mars_jax.generate`: continue prompts from the command line.

This module has the name of the function `mars_jax.generate`, and whoever imports it puts it in the function's
place on the package. So it can be called, and then is that function.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import types
from collections.abc import Sequence
from typing import IO, Any

from mars_jax.cli.applies import Plan, check_flags
from mars_jax.cli.arguments import parse
from mars_jax.cli.program import keep_compilations, program
from mars_jax.cli.prompts import PromptRow, from_texts, read_prompts
from mars_jax.errors import MarsError


class _CallableModule(types.ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `mars_jax.api.generate`."""
        from mars_jax import api

        return api.generate(*args, **options)


sys.modules[__name__].__class__ = _CallableModule


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
    from mars_jax import hosts
    from mars_jax.cli import decode
    from mars_jax.cli.output_file import check_output
    from mars_jax.cli.session import open_session

    if args.output is not None and hosts.is_first():
        check_output(args.output, resume=args.resume)
    with decode.busy("loading"):
        session = open_session(args, plan, rows)
    # A narrow locale must not end a run in the middle of a text; JSON is UTF-8 whatever the locale.
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(encoding="utf-8" if args.json else None, errors="strict" if args.json else "replace")
    if args.compare:
        decode.print_comparison(session, out, json=args.json)
    elif args.output is not None:
        decode.write_output(session, args.output, out, json=args.json)
    elif args.json:
        decode.print_json(session, out)
    elif plan.streams:
        decode.stream_text(session, out, chat=args.chat, speedup=plan.measures_speedup)
    else:
        decode.print_text(session, out, chat=args.chat, speedup=plan.measures_speedup)


if __name__ == "__main__":
    sys.exit(main())
