"""Flags of commands that evaluate a pair of models on tasks, and loading of the selected problems and models."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mars_jax.cli import flags
from mars_jax.cli.flags import add_flags
from mars_jax.cli.program import Parser, keep_compilations
from mars_jax.cli.progress import busy
from mars_jax.cli.rule_flags import add_rule_flags, choose_with_weights, given_settings
from mars_jax.drafters.registry import definitions, draft_words, parse_draft
from mars_jax.drafters.tree_shapes import parse_tree
from mars_jax.lab.theta import json_restored
from mars_jax.utils import assets
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import DTYPES
from mars_jax.utils.types import JsonObject
from mars_jax.verify import RuleChoice

if TYPE_CHECKING:
    from mars_jax.drafters import LoadedDrafter
    from mars_jax.hub.pretrained import Pretrained
    from mars_jax.lab.evaluate.benchmark.study import Study
    from mars_jax.lab.evaluate.tasks.problems import Problem

ARITHMETIC_PROBLEMS = 200
"""Default number of problems for the arithmetic task."""
TASKS = """\
tasks, where PATH is a local file (plain, .xz or .gz) or, of a dataset of the
hub, OWNER/NAME[:CONFIG[:SPLIT]]:
  arithmetic            1,300 word problems; exact match after ####
  gsm8k=PATH            exact match after ####
  humaneval=PATH        pass@1, by HumanEval's evaluator; needs tests
  mbpp=PATH             pass@1, by HumanEval's evaluator
  cnn_dm=PATH           ROUGE-L
  wmt19=PATH            BLEU
  spec_bench=PATH       its six parts, each by its own metric
  mt_bench=PATH         likelihood under the target
  alpaca=PATH           likelihood under the target
  stories=FILE          likelihood; local, documents between <|endoftext|>
  jsonl=PATH            `prompt` or `turns`; to score, `metric` and `reference`
"""
DRAFTS = tuple(name for name in definitions() if name != "none")


def make_parser(
    prog: str, description: str, epilog: str, *, instead: Collection[str] = (), arithmetic: str = "200"
) -> Parser:
    """Return a parser with the flags of the pair, its rule and its tasks.

    Args:
      prog, description, epilog: parts of the command's help text.
      instead: settings of the rule for which the command has its own flags; see `add_rule_flags`.
      arithmetic: number of problems for the arithmetic task if --problems is not given.
    """
    parser = Parser(prog=f"mars-jax {prog}", description=description, epilog=epilog)
    group = parser.add_argument_group("models")
    add_flags(group, {"--target PATH": "default: %(default)s"}, default=assets.TARGET)
    draft_help = f"{draft_words(DRAFTS)} (default: the target's best that needs no download, else ngram)"
    add_flags(group, {"--draft DRAFT": draft_help})
    length_help = {"--num-draft-tokens N": "tokens drafted in a row (default: the drafter's)"}
    add_flags(group, length_help, type=flags.number_parser("num_draft_tokens"))
    add_flags(group, {"--tree 4-2-2-1": "draft a tree; as for mars_jax.generate"}, type=parse_tree)
    flags.add_draft_flags(group)
    group.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: the checkpoint's own)")
    flags.add_target_flags(group)
    flags.add_host_flags(parser)
    group = parser.add_argument_group("tasks")
    add_flags(group, {"--task NAME[=PATH] ...": "task to measure; once or more"}, default=[])
    problems_help = {"--problems N": f"first N of each task (default: all; arithmetic {arithmetic})"}
    add_flags(group, problems_help, type=flags.number_parser("batch_size", shown="--problems"))
    add_flags(group, {"--chat": "format questions with the chat template (never stories)"})
    group = parser.add_argument_group("decoding")
    decoding_flags = {
        "max_new_tokens": (256, "maximum number of tokens of an answer"),
        "batch_size": (1, "number of problems decoded at once"),
        "seed": (0, "problem i is sampled with seed N + i"),
    }
    for name, (default, help_text) in decoding_flags.items():
        helps = {f"{flags.flag_of(name)} N": f"{help_text} (default: {default})"}
        add_flags(group, helps, default=default, type=flags.number_parser(name))
    add_rule_flags(parser.add_argument_group("rule"), instead=instead)
    return parser


def chosen_rule(args: argparse.Namespace, *, instead: Collection[str] = ()) -> RuleChoice:
    """Return the rule that the flags select (by default mars), with validated settings.

    Args:
      args: from a parser with `add_rule_flags`.
      instead: as for `add_rule_flags`.

    Raises:
      MarsError: a setting is set twice, or weights are missing; see also `choose`.
    """
    settings = given_settings(args)
    for name in settings.keys() & set(instead):
        raise MarsError(f"{settings[name].shown} does not apply here: give {flags.flag_of(name)}s instead.")
    return choose_with_weights(args.verify or "mars", settings)


def non_default_flags(args: argparse.Namespace) -> JsonObject:
    """Return the flags that change how the target or the drafter computes and whose values are not the defaults."""
    flag_names = ("attention", "cache_dtype", "draft_size", "any_rule", "head_embed", "refine")
    return {name: value for name, value in vars(args).items() if name in flag_names and value is not None}


def check_pair_flags(args: argparse.Namespace, rule: RuleChoice, *, output: str) -> None:
    """Raise MarsError if shared flags contradict each other or a required one is missing.

    Args:
      args: from a parser of `make_parser`, with a draft.
      rule: the rule that the flags choose.
      output: the fix to suggest if --output is missing.
    """
    try:
        draft = parse_draft(args.draft, shown="--draft", among=DRAFTS)
    except MarsError as error:
        # Remove the period at the end of the message, to append a clause.
        raise MarsError(f"{str(error)[:-1]}; without a draft there is nothing to verify.") from None
    if args.output is None:
        raise MarsError(f"there is no --output: {output}.")
    if not args.task:
        raise MarsError("there is no --task: name one, such as --task arithmetic; --help lists them.")
    flags.Present(args).refuse_alone()
    task_names = [task.partition("=")[0] for task in args.task]
    if len(set(task_names)) < len(task_names):
        raise MarsError(
            "--task names a task twice: name each task once, and measure its other files in a separate run."
        )
    if args.chat and set(task_names) == {"stories"}:
        raise MarsError("--chat does not apply to stories, which are continued as they are: leave it out.")
    if "long" in rule.needs:
        raise MarsError(
            f"--verify {rule.name} does not apply here, as its text is meaningless: choose another rule."
        )
    flags.Present(args).refuse_for(draft, rule)
    # The default must not appear among `non_default_flags`.
    if args.draft_size == "fixed":
        args.draft_size = None


def open_study(
    args: argparse.Namespace,
    folder: Path,
    check: Callable[[list[Problem]], None],
    *,
    arithmetic: int = ARITHMETIC_PROBLEMS,
) -> tuple[list[Problem], Pretrained, LoadedDrafter]:
    """Load the problems, the target and the drafter for a command that measures a pair on tasks.

    Prompts, rule and vocabularies are checked against configs and tokenizers before any weights are loaded.

    Args:
      args: from a parser of `make_parser`, after `check_pair_flags`.
      folder: output folder for the rows.
      check: function that raises MarsError for problems that the command cannot use.
      arithmetic: number of problems for the arithmetic task if --problems is not given.

    Raises:
      MarsError: the folder holds unrelated files, `check` failed, or problems or checkpoints are invalid.
    """
    from mars_jax import hub, verify
    from mars_jax.cli.open_target import check_draft, open_drafter, open_target
    from mars_jax.lab.evaluate.answers import check_problems
    from mars_jax.lab.evaluate.tasks.catalogue import read_problems
    from mars_jax.lab.folder import check_folder
    from mars_jax.utils import hosts

    keep_compilations()
    if hosts.is_first():
        check_folder(folder)
    problems = []
    for task in args.task:
        name, _, path = task.partition("=")
        # Only the arithmetic task has a default number of problems.
        limit = arithmetic if name == "arithmetic" and args.problems is None else args.problems
        problems += read_problems(name, path or None, chat=args.chat, limit=limit)
    check(problems)
    draft = parse_draft(args.draft, shown="--draft")
    with busy("loading"):
        outline = hub.outline(args.target)
        if not outline.has_tokenizer:
            raise MarsError(f"'{args.target}' has no tokenizer: put its files next to the weights.")
        check_problems(outline, problems, chat=args.chat)
        check_draft(outline, draft)
        loaded_rule = verify.load(args.rule.spec, outline, **args.rule.settings)
        target = open_target(args, outline)
        samples = draft.definition.samples and verify.needs_q(loaded_rule.rule)
        drafter = open_drafter(args, target, samples=samples)
        for file in args.theta_files:
            file.check_weights(target, drafter, loaded_rule)
    return problems, target, drafter


def make_study(
    args: argparse.Namespace, target: Pretrained, problems: list[Problem], flag_names: Sequence[str]
) -> Study:
    """Return the `Study` that the flags describe.

    The flags in `flag_names` and `non_default_flags` identify the run.
    """
    from mars_jax.lab.evaluate.benchmark.study import Study

    settings = {name: json_restored(getattr(args, name)) for name in flag_names}
    return Study(args=args, target=target, problems=problems, names=settings | non_default_flags(args))
