"""Loader of the problems, target and drafter that the flags of `commands.pair` select. Cheap checks come first."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from mars_jax import drafters, hub, verify
from mars_jax.cli.open_target import check_draft, open_target
from mars_jax.cli.program import keep_compilations
from mars_jax.cli.progress import busy
from mars_jax.drafters.registry import parse_draft
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate.answers import check_problems
from mars_jax.lab.evaluate.tasks.catalogue import read_problems
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import check_folder
from mars_jax.mesh import hosts
from mars_jax.utils.errors import MarsError

ARITHMETIC_PROBLEMS = 200
"""Default number of problems of the task arithmetic."""


def open_study(
    args: argparse.Namespace,
    folder: Path,
    check: Callable[[list[Problem]], None],
    *,
    arithmetic: int = ARITHMETIC_PROBLEMS,
) -> tuple[list[Problem], Pretrained, drafters.LoadedDrafter]:
    """Open problems, target and drafter for a command that measures a pair on tasks.

    Prompts, rule and vocabularies are checked against configs and tokenizers before any weights are loaded.

    Args:
      args: from a parser of `pair.make_parser`, after `pair.check_pair_flags`.
      folder: output folder of the rows.
      check: raises MarsError for problems that the command cannot use.
      arithmetic: number of problems of the task arithmetic if --problems is not given.

    Raises:
      MarsError: the folder holds unrelated files, `check` failed, or problems or checkpoints are invalid.
    """
    keep_compilations()
    if hosts.is_first():
        check_folder(folder)
    problems = []
    for task in args.task:
        name, _, path = task.partition("=")
        # Only the task arithmetic has a default number of problems.
        limit = arithmetic if name == "arithmetic" and args.problems is None else args.problems
        problems += read_problems(name, path or None, chat=args.chat, limit=limit)
    check(problems)
    draft = parse_draft(args.draft, shown="--draft")
    with busy("loading"):
        outline = hub.outline(args.target)
        if not outline.has_tokenizer:
            raise MarsError(
                f"'{args.target}' has no tokenizer, and tasks are text: put its files next to the weights."
            )
        check_problems(outline, problems, chat=args.chat)
        check_draft(outline, draft)
        loaded_rule = verify.load(args.rule.spec, outline, **args.rule.settings)
        target = open_target(args, outline)
        drafter = drafters.load(
            args.draft,
            target,
            num_draft_tokens=args.num_draft_tokens,
            tree=args.tree,
            sample=draft.definition.samples and verify.needs_q(loaded_rule.rule),
            dtype=args.dtype,
            draft_size=args.draft_size or "fixed",
            any_rule=bool(args.any_rule),
            head_embed=args.head_embed or "own",
        )
        for file in args.theta_files:
            file.check_weights(target, drafter, loaded_rule)
    return problems, target, drafter
