"""Flags that commands share which evaluate a pair of models on tasks. Nothing here imports jax."""

from __future__ import annotations

import argparse
from typing import Any

from mars_jax import __version__, assets
from mars_jax.cli.generate.arguments import DTYPES, MARGINS
from mars_jax.cli.program import Parser
from mars_jax.cli.settings import MESH_HELP, NO_CHECK_HELP, DynamicTree, from_text, tree_from_text
from mars_jax.core.errors import MarsError

TASKS = """\
tasks; PATH is a local file (plain, .xz or .gz) or a dataset of the Hub (OWNER/NAME[:CONFIG[:SPLIT]])
  arithmetic            generated word problems; exact match after ####
  gsm8k=PATH            exact match after ####
  humaneval=PATH        pass@1 where the file has the tests, with --allow-code-execution
  mbpp=PATH             pass@1, with --allow-code-execution
  cnn_dm=PATH           ROUGE-L
  wmt19=PATH            BLEU
  spec_bench=PATH       its six parts, each by its own metric
  mt_bench=PATH, alpaca=PATH, stories=FILE (local: documents between <|endoftext|>)
                        likelihood under the target
  jsonl=PATH            `prompt` or `turns`, and `metric` and `reference` where scored
"""
DRAFTS = "ngram, model:PATH, eagle:PATH or medusa:PATH"


def make_parser(prog: str, description: str, epilog: str) -> Parser:
    """A parser with the flags of the pair and of its tasks; numbers are still texts."""
    made = Parser(
        prog=f"python -m {prog}",
        description=description,
        epilog=epilog,
    )
    made.add_argument("--version", action="version", version=f"mars-jax {__version__}")
    made.add_argument("--target", default=assets.TARGET, metavar="PATH", help="default: %(default)s")
    made.add_argument(
        "--draft",
        metavar="DRAFT",
        help=f"{DRAFTS} (default: model:{assets.DRAFT} for {assets.TARGET}, ngram for others)",
    )
    made.add_argument(
        "--num-draft-tokens", metavar="N", help="tokens drafted in a row (default: the drafter's)"
    )
    made.add_argument("--tree", metavar="4-2-2-1", help="draft a tree; as for mars_jax.generate")
    made.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's own)")
    made.add_argument("--no-check", action="store_true", help=NO_CHECK_HELP)
    made.add_argument("--mesh", metavar="data=2,model=4", help=MESH_HELP)
    made.add_argument(
        "--task", action="append", default=[], metavar="NAME[=PATH]", help="what to measure; once or more"
    )
    made.add_argument(
        "--problems", metavar="N", help="the first N of each task (default: all; arithmetic 200)"
    )
    made.add_argument(
        "--chat", action="store_true", help="put questions through the chat template (never stories)"
    )
    made.add_argument(
        "--max-new-tokens", default="256", metavar="N", help="of an answer (default: %(default)s)"
    )
    made.add_argument(
        "--batch-size", default="1", metavar="N", help="problems decoded side by side (default: %(default)s)"
    )
    made.add_argument(
        "--base",
        choices=("exact", "rejection"),
        default="exact",
        help="the strict rule (default: %(default)s)",
    )
    made.add_argument(
        "--margin", choices=MARGINS, default="ratio", help="what theta bounds (default: %(default)s)"
    )
    made.add_argument("--seed", default="0", metavar="N", help="problem i draws with seed N + i (default: 0)")
    return made


def add_code_flags(parser: Parser) -> None:
    """The flags that let generated programs run."""
    parser.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="run the programs that the target writes, inside bubblewrap or unshare: no network, no files but "
        "Python's, read-only, and a temporary folder, bounds on time, memory, processes and files; refused where "
        "neither works",
    )
    parser.add_argument(
        "--allow-unconfined-code",
        action="store_true",
        help="with it, where neither works: run them with your rights under Python's audit hook and the same bounds, "
        "a guard against accidents and not against malice",
    )


def convert(args: argparse.Namespace) -> None:
    """Texts of the shared flags into values.

    Raises:
      MarsError: a value out of range.
    """
    for name in ("num_draft_tokens", "max_new_tokens", "batch_size", "seed"):
        text = getattr(args, name)
        setattr(args, name, None if text is None else from_text(name, text))
    if args.problems is not None:
        args.problems = value_of("problems", "batch_size", args.problems)
    args.tree = None if args.tree is None else tree_from_text(args.tree)
    args.draft = args.draft or (f"model:{assets.DRAFT}" if args.target == assets.TARGET else "ngram")


def value_of(flag: str, name: str, text: str) -> Any:
    """A value of `flag`, in the range of the setting `name`."""
    try:
        return from_text(name, text)
    except MarsError as error:
        raise MarsError(str(error).replace(f"--{name.replace('_', '-')} is", f"--{flag} has", 1)) from None


def check(args: argparse.Namespace, *, output: str) -> None:
    """Raise MarsError for shared flags that contradict each other, or that name nothing to do.

    Args:
      args: after `convert`.
      output: what to do where there is no --output.
    """
    kind, _, path = args.draft.partition(":")
    if not (args.draft == "ngram" or (kind in ("model", "eagle", "medusa") and path)):
        raise MarsError(
            f"--draft is {args.draft}: expected {DRAFTS}; the target alone is an arm of every run."
        )
    if args.output is None:
        raise MarsError(f"there is no --output: {output}.")
    if not args.task:
        raise MarsError("there is no --task: name one, such as --task arithmetic; --help lists them.")
    names = [task.partition("=")[0] for task in args.task]
    if len(set(names)) < len(names):
        raise MarsError(
            "--task names a task twice: give each once, and evaluate other files of it in a run of their own."
        )
    if args.chat and set(names) == {"stories"}:
        raise MarsError("--chat does not apply to stories, which are continued as they are: leave it out.")
    if args.tree is not None:
        if args.num_draft_tokens is not None:
            raise MarsError(
                "--num-draft-tokens does not apply with --tree, whose depth is its own: leave one out."
            )
        if kind == "ngram":
            raise MarsError("--tree does not apply to --draft ngram, which drafts no trees: leave it out.")
        if args.base == "rejection" and (isinstance(args.tree, DynamicTree) or max(args.tree) > 1):
            raise MarsError(
                "--tree does not apply to --base rejection, which verifies chains: leave one out."
            )
