"""Open the problems, target and drafter that the flags of `commands.pair` name. The cheap checks come first."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mars_jax import drafters, hub, specs, verify
from mars_jax.cli.open_target import check_draft, open_target
from mars_jax.cli.program import keep_compilations
from mars_jax.cli.progress import busy
from mars_jax.core.errors import MarsError
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate.answers import check_problems
from mars_jax.lab.evaluate.tasks.catalogue import read
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import check_folder
from mars_jax.placement import hosts
from mars_jax.specs import RuleChoice


def read_problems(args: argparse.Namespace) -> list[Problem]:
    """The problems of all tasks.

    Raises:
      MarsError: as `tasks.read`.
    """
    problems = []
    for task in args.task:
        name, _, path = task.partition("=")
        problems += read(name, path or None, chat=args.chat, limit=args.problems)
    return problems


class Opened(NamedTuple):
    """The input of a study."""

    problems: list[Problem]
    target: Pretrained
    drafter: drafters.LoadedDrafter


def open_study(args: argparse.Namespace, folder: Path, check: Callable[[list[Problem]], None]) -> Opened:
    """Open folder, problems and models, in that order, for a command that measures a pair on tasks.

    Args:
      args: of a parser of `pair.make_parser`, after `pair.check`.
      folder: that the rows go to.
      check: raises MarsError for problems that the command cannot use.

    Raises:
      MarsError: a folder of something else, problems that are not there, as `check`, or as `open_pair`.
    """
    keep_compilations()
    if hosts.is_first():
        check_folder(folder)
    problems = read_problems(args)
    check(problems)
    with busy("loading"):
        return Opened(problems, *open_pair(args, args.rule, problems))


def open_pair(
    args: argparse.Namespace, rule: RuleChoice, problems: list[Problem]
) -> tuple[Pretrained, drafters.LoadedDrafter]:
    """Check prompts, rule and vocabularies on configs and tokenizers alone, and only then load weights.

    Raises:
      MarsError: anything wrong with the checkpoints or the prompts.
    """
    sketch = _sketch(args, problems)
    made = verify.load(rule.spec, sketch, **rule.settings)
    target = open_target(args, sketch)
    draft = specs.parse_draft(args.draft, shown="--draft")
    drafter = drafters.load(
        args.draft,
        target,
        num_draft_tokens=args.num_draft_tokens,
        tree=args.tree,
        sample=draft.row.samples and verify.needs_q(made.rule),
        dtype=args.dtype,
        draft_size=args.draft_size or "fixed",
        any_rule=bool(args.any_rule),
        head_embed=args.head_embed or "own",
    )
    for file in args.theta_files:
        file.check_weights(target, drafter, made)
    return target, drafter


def _sketch(args: argparse.Namespace, problems: list[Problem]) -> Pretrained:
    """The outline of a target that prompts and draft fit."""
    sketch = hub.outline(args.target)
    if not sketch.has_tokenizer:
        raise MarsError(
            f"'{args.target}' has no tokenizer, and tasks are text: put its files beside the weights."
        )
    check_problems(sketch, problems, chat=args.chat)
    check_draft(sketch, specs.parse_draft(args.draft, shown="--draft"))
    return sketch
