"""`python -m mars_jax.benchmark`: the evidence for a pair of models, with its controls, from the command line."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from mars_jax.cli import pair
from mars_jax.cli.program import keep_compilations, program
from mars_jax.cli.progress import busy, ticking
from mars_jax.cli.theta import ThetaFile, settings_of, theta_from_text
from mars_jax.core.errors import MarsError

_DESCRIPTION = """\
Measure a pair of models: speed, acceptance and quality of margin-aware verification
against the target alone, the strict rule, the rule at theta = inf, another margin matched
to the same tau, and the target sampling from the same truncated set; all on the same
prompts and seeds, in one run.
"""
_EPILOG = f"""\
examples:
  python -m mars_jax.benchmark --task arithmetic --chat --problems 100 --output evidence
  python -m mars_jax.benchmark --target PATH --draft model:SMALL --chat \\
      --task gsm8k=gsm8k_test.jsonl --task mt_bench=mt_bench.jsonl.xz \\
      --thetas 0.9 0.8 0.95 --temperatures 0 1 --output evidence

{pair.TASKS}
OUTPUT gets rows.jsonl as rows finish, then summary.json, table.md and four plots. Killed
and started again with the same flags, it goes on where it was. The table goes to stdout,
progress to stderr; bad input ends with exit code 2.
"""


def parser() -> argparse.ArgumentParser:
    """The parser; numbers are still texts."""
    made = pair.make_parser("mars_jax.benchmark", _DESCRIPTION, _EPILOG)
    made.add_argument(
        "--thetas",
        nargs="+",
        default=["0.9"],
        metavar="X",
        help="of mars, or files of mars_jax.calibrate; the controls are matched to the first (default: 0.9)",
    )
    made.add_argument(
        "--temperatures", nargs="+", default=["0", "1"], metavar="X", help="0 is greedy (default: 0 1)"
    )
    made.add_argument(
        "--simulated-taus",
        nargs="+",
        default=[],
        metavar="X",
        help="add arms that accept by chance so often that they give X tokens a step, to size hardware; their texts "
        "and scores mean nothing",
    )
    pair.add_code_flags(made)
    made.add_argument("--output", type=Path, metavar="DIR", help="a new folder, or one to go on with")
    return made


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Flags as values, in range and of use.

    Raises:
      MarsError: an unknown flag, a value out of range, a flag that does not apply to what the others choose.
      SystemExit: after --help and --version.
    """
    args = parser().parse_args(argv)
    pair.convert(args)
    args.thetas = [_theta(args, text) for text in args.thetas]
    # Plus zero, so that -0 is 0.
    args.temperatures = [
        pair.value_of("temperatures", "temperature", text) + 0.0 for text in args.temperatures
    ]
    args.simulated_taus = [pair.value_of("simulated-taus", "tau", text) for text in args.simulated_taus]
    _check(args)
    return args


def _theta(args: argparse.Namespace, text: str) -> float:
    """A threshold, or that of a file for this pair and rule. Temperatures are measured here, not relied on."""
    try:
        found = theta_from_text(text)
    except MarsError as error:
        raise MarsError(str(error).replace("--theta is", "--thetas has", 1)) from None
    if not isinstance(found, ThetaFile):
        return found
    found.check(settings_of(args, base=args.base, margin=args.margin))
    return found.theta


def _check(args: argparse.Namespace) -> None:
    pair.check(args, output="name a folder for rows, table and plots")
    for flag in ("thetas", "temperatures", "simulated_taus"):
        values = getattr(args, flag)
        if len({f"{value:g}" for value in values}) < len(values):
            raise MarsError(f"--{flag.replace('_', '-')} has a value twice: give each once.")
    if math.inf in args.thetas:
        raise MarsError("--thetas has inf, an arm of every run: leave it out.")
    if args.margin != "gap" and max(args.thetas) > 1:
        raise MarsError(
            f"--thetas has {max(args.thetas):g}: expected at most 1 for the margin {args.margin}."
        )
    if args.simulated_taus and args.draft == "ngram":
        raise MarsError(
            "--simulated-taus does not apply to --draft ngram, which often drafts nothing: draft with model:PATH, "
            "eagle:PATH or medusa:PATH."
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return program(_run, argv)


def _run(argv: Sequence[str] | None, out: IO[str]) -> None:
    with contextlib.redirect_stdout(out):
        args = parse(argv)

    # From here on jax loads; what is above answers at once.
    from mars_jax.cli.open_pair import open_pair, read_problems
    from mars_jax.evaluate import evaluate
    from mars_jax.evaluate.benchmark import report
    from mars_jax.evaluate.folder import check_folder
    from mars_jax.evaluate.scoring import scores

    keep_compilations()
    check_folder(args.output)
    problems = read_problems(args)
    scores.check_metrics(problems, run_code=args.allow_code_execution, unconfined=args.allow_unconfined_code)
    report.check_installed()
    with busy("loading"):
        target, drafter = open_pair(args, problems)
    shared = ("base", "margin", "thetas", "temperatures", "simulated_taus")
    shared += ("max_new_tokens", "batch_size", "seed", "chat")
    with ticking("rows") as tick:
        summary = evaluate(
            target,
            drafter,
            problems,
            args.output,
            allow_code_execution=args.allow_code_execution,
            allow_unconfined_code=args.allow_unconfined_code,
            names={
                name: getattr(args, name) for name in ("draft", "num_draft_tokens", "tree", "dtype", "mesh")
            },
            progress=tick,
            **{name: getattr(args, name) for name in shared},
        )
    print(report.markdown(summary), file=out, end="")
    print(f"rows, table and plots are in {args.output}", file=sys.stderr)
