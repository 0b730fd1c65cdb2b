"""`mars-jax benchmark`: measure a pair of models, optionally with control arms, from the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mars_jax.cli import signals
from mars_jax.cli.flags import (
    PART_HELP,
    Present,
    add_flags,
    draft_or_default,
    number_parser,
    part_of,
    without,
)
from mars_jax.cli.program import Parser, command
from mars_jax.cli.progress import progress
from mars_jax.drafters.registry import parse_draft
from mars_jax.lab import recipes
from mars_jax.lab.commands import pair
from mars_jax.lab.theta import run_settings, thetas_of
from mars_jax.utils.errors import MarsError, say
from mars_jax.utils.settings import LARGEST_FLOAT, Range, Setting

if TYPE_CHECKING:
    from mars_jax.lab.evaluate.tasks.problems import Problem

_DESCRIPTION = """\
Measure speed, acceptance and quality of a pair of models under a rule (default: mars),
next to the target alone and the strict rule, on the same prompts and seeds. --controls all
adds the target sampling from the tokens that the rule lets a draft choose from.

--tune runs each rule, including the lossless rules, at its best draft length. --recipe NAME
measures a pair as in its paper, and then with tuned lengths.
"""
_SWEPT = ("theta", "tau")
"""Rule settings whose flags accept several values."""
LENGTHS = (2, 3, 5, 8, 12)
"""Lengths that --tune tries by default."""
_COSTS = Range("a number of at least 0, such as 0.1", 0, LARGEST_FLOAT)
DRAFT_COST = Setting(name="--draft-cost", kind=float, help="", ranges=_COSTS)
_EPILOG = f"""\
examples:
  mars-jax benchmark --task arithmetic --chat --problems 100 --output evidence
  mars-jax benchmark --target PATH --draft model:SMALL --chat \\
      --task gsm8k=gsm8k_test.jsonl --task mt_bench=mt_bench.jsonl.xz \\
      --thetas 0.9 0.8 0.95 --temperatures 0 1 --output evidence
  mars-jax benchmark --task arithmetic --chat --problems 100 \\
      --verify gates.py:entropy_gate --rule-option entropy=1.5 --output gate
  mars-jax benchmark --tune --task arithmetic --chat --problems 100 --output t
  mars-jax benchmark --recipe qwen3-8b --output qwen3-8b

{pair.TASKS}
Rows are written to OUTPUT/rows.jsonl as they finish. At the end, OUTPUT also contains
summary.json, table.md, plots as PNG, SVG and PDF, and report.html, one page with all figures
and the completions of two rules side by side. After a kill, run the same command again to
continue. The table goes to stdout, progress to stderr; bad input ends with exit code 2.
"""


def parser() -> Parser:
    """Build the argument parser of `mars-jax benchmark`."""
    command_parser = pair.make_parser("benchmark", _DESCRIPTION, _EPILOG, instead=_SWEPT)
    recipe_help = (
        f"measure a pair as in its paper, and then with tuned lengths: {', '.join(recipes.names())}, or a .toml file; "
        "flags on the command line override the recipe"
    )
    add_flags(command_parser, {"--recipe NAME": recipe_help})
    group = command_parser.add_argument_group("arms")
    thetas_help = (
        "thetas of the rule, an arm for each, or files of calibrate; the controls are matched to the first (default: "
        "the rule's own theta, 0.9 for mars)"
    )
    add_flags(group, {"--thetas X": thetas_help}, nargs="+")
    parse_temperature = number_parser("temperature", shown="--temperatures")
    temperatures_help = {"--temperatures X": "0 is greedy (default: 0 1)"}
    add_flags(group, temperatures_help, nargs="+", default=[0.0, 1.0], type=parse_temperature)
    controls_help = (
        "arms besides the rule and the target without a draft. none: no others; paper: the strict rule, as in the "
        "paper's table; all: also the target sampling from its two best tokens (default: paper)"
    )
    group.add_argument("--controls", choices=("none", "paper", "all"), help=controls_help)
    refine_help = (
        "add an arm: the strict rule with a draft (a model or an EAGLE-3 head) that is trained on its rejected tokens "
        "after every group of problems; FILE as for mars_jax.generate"
    )
    add_flags(group, {"--refine FILE": refine_help})
    tune_help = (
        "run every arm at its best of these draft lengths, chosen on the first quarter of the problems and scored on "
        "the rest; above temperature 0, also run the lossless rules for sampled drafts (default: "
        f"{' '.join(map(str, LENGTHS))})"
    )
    add_flags(
        group, {"--tune K": tune_help}, nargs="*", type=number_parser("num_draft_tokens", shown="--tune")
    )
    cost_help = "with --tune, cost of a drafted token in forwards of the target, used in place of the clock"
    add_flags(group, {"--draft-cost X": cost_help}, type=DRAFT_COST.from_text)
    group = command_parser.add_argument_group("output")
    add_flags(group, {"--output DIR": "a new folder, or one to continue"}, type=Path)
    add_flags(group, {"--part I/N": PART_HELP}, type=part_of)
    return command_parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, and check the flags and their combinations.

    Raises:
      MarsError: a flag is unknown, a value is out of range, or flags are incompatible.
      SystemExit: after --help and --version.
    """
    args = parser().parse_args(argv)
    # A recipe calls `parse` again, once for each of its parts.
    if args.recipe is not None:
        return _parse_recipe(args, list(argv))
    args.draft = draft_or_default(args.draft, args.target)
    args.rule = pair.chosen_rule(args, instead=_SWEPT)
    args.theta_files = []
    if args.thetas:
        args.thetas, args.theta_files = thetas_of(args.rule, args.thetas, run_settings(args))
    # Add zero, so that -0 becomes 0.
    args.temperatures = [temperature + 0.0 for temperature in args.temperatures]
    if args.tune is not None:
        args.tune = sorted(set(args.tune or LENGTHS))
    _check(args)
    return args


def _parse_recipe(args: argparse.Namespace, argv: list[str]) -> argparse.Namespace:
    """Return the flags, with `parts` added: the flags of each part of the recipe, with its own output folder."""
    if args.output is None:
        raise MarsError("there is no --output: name a folder for rows, tables and plots.")
    Present(args).refuse(["--part"], "with --recipe: leave one of them out")
    args.recipe = recipes.read_recipe(args.recipe)
    user_flags = without(argv, ("--recipe", "--output"))
    args.parts = {
        part: parse([*args.recipe.argv(part, user_flags), "--output", str(args.output / part)])
        for part in recipes.PARTS
    }
    # The table of a recipe compares its rule with the strict one.
    for part in args.parts.values():
        if part.controls == "none" or part.rule.definition.lossless:
            raise MarsError(
                "--recipe needs a lossy rule and the strict one: leave out --controls none and --verify."
            )
    return args


def _check(args: argparse.Namespace) -> None:
    pair.check_pair_flags(args, args.rule, output="name a folder for rows, table and plots")
    args.controls = args.controls or "paper"
    for flag in ("thetas", "temperatures"):
        values = getattr(args, flag) or []
        # The names of arms and tables contain the values in this format, so the formatted values must differ.
        if len({f"{value:g}" for value in values}) < len(values):
            raise MarsError(f"--{flag} has a value twice: give each once.")
    if args.thetas and math.inf in args.thetas:
        raise MarsError("--thetas has inf, which is the strict rule: leave it out.")
    if args.refine is not None and args.draft_size is not None:
        raise MarsError("--refine does not apply with --draft-size: leave one of them out.")


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    return command(parse, _run, argv)


def _run(args: argparse.Namespace, out: IO[str]) -> None:
    from mars_jax.cli.open_target import joined_processes

    if args.recipe is not None:
        _follow(args, out)
        return
    notice = f": '{args.output}' has the finished rows; run the same command again to continue."
    with signals.ending(lambda: notice), joined_processes(args, (), out) as stream:
        measure = _study if args.tune is None else _tune
        measure(args, stream)


def _follow(args: argparse.Namespace, out: IO[str]) -> None:
    from mars_jax.hub.durable import write_whole
    from mars_jax.lab.folder import check_folder
    from mars_jax.lab.recipes.needs import check_memory

    # Check the folders and the memory for both parts before the first part begins.
    for part in args.parts.values():
        check_folder(part.output)
    memory_note = check_memory(args.parts["tuned"], args.recipe.name, args.recipe.slice.get("topology", ""))
    say(f"recipe {args.recipe.name}: {memory_note}")
    args.output.mkdir(parents=True, exist_ok=True)
    for part in args.parts.values():
        _run(part, out)
    table_markdown = recipes.table(args.recipe, args.output)
    write_whole(args.output / "recipe.md", table_markdown)
    print(table_markdown, file=out, end="")


def _study(args: argparse.Namespace, out: IO[str]) -> None:
    from mars_jax.cli.open_target import check_file
    from mars_jax.lab.evaluate import scoring
    from mars_jax.lab.evaluate.benchmark import report
    from mars_jax.lab.evaluate.benchmark.study import evaluate
    from mars_jax.lab.pictures import check_installed
    from mars_jax.lab.training.online import open_refiner

    def check(problems: list[Problem]) -> None:
        scoring.check_metric_packages(problems)
        check_installed()
        if args.refine is not None:
            check_file(args.refine, f"--refine is {args.refine}")
        if args.part is not None and not problems[args.part]:
            raise MarsError(f"--part has none of the {len(problems)} problems: divide them into fewer parts.")

    problems, target, drafter = pair.open_study(args, args.output, check)
    study = pair.make_study(args, target, problems, ("draft", "num_draft_tokens", "tree", "dtype", "mesh"))
    refiner = None
    if args.refine is not None:
        refiner = open_refiner(
            args.refine, target, args.draft, drafter, dtype=args.dtype, samples=max(args.temperatures) > 0
        )
    with progress("decodes") as show:
        summary = evaluate(study, drafter, refiner=refiner, progress=show)
    if args.part is not None:
        say(f"the rows of this part are in {args.output}")
        return
    print(report.markdown(summary), file=out, end="")
    say(f"rows, table, plots and report are in {args.output}")


def _tune(args: argparse.Namespace, out: IO[str]) -> None:
    from mars_jax.cli.open_target import open_drafter
    from mars_jax.lab.evaluate import scoring
    from mars_jax.lab.evaluate.benchmark import tuned

    # Load the drafter with the longest chain. Shorter chains reuse its weights.
    args.num_draft_tokens = args.tune[-1]
    problems, target, drafter = pair.open_study(args, args.output, scoring.check_metric_packages)
    can_sample = parse_draft(args.draft).definition.samples
    is_sampled = can_sample and "q" in args.rule.needs
    drafter_by_sampling = {is_sampled: drafter}
    # Some arms verify the other kind of draft (sampled or deterministic), so load that drafter too.
    if (can_sample and max(args.temperatures) > 0) or is_sampled:
        other_drafter = open_drafter(args, target, samples=not is_sampled)
        drafter_by_sampling[not is_sampled] = other_drafter._replace(params=drafter.params)
    study = pair.make_study(args, target, problems, ("draft", "dtype", "mesh"))
    with progress("decodes") as show:
        report = tuned.tuned(study, drafter_by_sampling, progress=show)
    print(tuned.tuned_markdown(report), file=out, end="")
    say(f"rows and tables are in {args.output}")
