"""`python -m mars_jax.benchmark`: the evidence for a pair of models, with its controls, from the command line."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from mars_jax import __version__, assets
from mars_jax.cli.arguments import DTYPES, MARGINS
from mars_jax.cli.program import keep_compilations, program
from mars_jax.cli.settings import DynamicTree, from_text, tree_from_text
from mars_jax.errors import MarsError

_DESCRIPTION = """\
Measure a pair of models: speed, acceptance and quality of margin-aware verification
against the target alone, the strict rule, the rule at theta = inf, another margin matched
to the same tau, and the target sampling from the same truncated set; all on the same
prompts and seeds, in one run.
"""
_EPILOG = """\
examples:
  python -m mars_jax.benchmark --task arithmetic --chat --problems 100 --output evidence
  python -m mars_jax.benchmark --target PATH --draft model:SMALL --chat \\
      --task gsm8k=gsm8k_test.jsonl --task mt_bench=mt_bench.jsonl.xz \\
      --thetas 0.9 0.8 0.95 --temperatures 0 1 --output evidence

tasks, read from local files (plain, .xz or .gz) but for arithmetic:
  arithmetic            generated word problems; exact match after ####
  gsm8k=PATH            exact match after ####
  humaneval=PATH        pass@1 where the file has the tests, with --allow-code-execution
  mbpp=PATH             pass@1, with --allow-code-execution
  cnn_dm=PATH           ROUGE-L
  wmt19=PATH            BLEU
  spec_bench=PATH       its six parts, each by its own metric
  mt_bench=PATH, alpaca=PATH, stories=PATH (documents between <|endoftext|>)
  jsonl=PATH            `prompt` or `turns`, and `metric` and `reference` where scored

OUTPUT gets rows.jsonl as rows finish, then summary.json, table.md and three plots. Killed
and started again with the same flags, it goes on where it was. The table goes to stdout,
progress to stderr; bad input ends with exit code 2.
"""
_DRAFTS = "ngram, model:PATH, eagle:PATH or medusa:PATH"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MarsError(f"{message.removeprefix('argument ').rstrip('.')}; --help lists the flags.")


def parser() -> argparse.ArgumentParser:
    """The parser; numbers are still texts."""
    made = _Parser(
        prog="python -m mars_jax.benchmark",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"mars-jax {__version__}")
    made.add_argument("--target", default=assets.TARGET, metavar="PATH", help="default: %(default)s")
    made.add_argument(
        "--draft",
        metavar="DRAFT",
        help=f"{_DRAFTS} (default: model:{assets.DRAFT} for {assets.TARGET}, ngram for others)",
    )
    made.add_argument(
        "--num-draft-tokens", metavar="N", help="tokens drafted in a row (default: the drafter's)"
    )
    made.add_argument("--tree", metavar="4-2-2-1", help="draft a tree; as for mars_jax.generate")
    made.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's own)")
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
        "--margin", choices=MARGINS, default="ratio", help="what the thetas bound (default: %(default)s)"
    )
    made.add_argument(
        "--thetas",
        nargs="+",
        default=["0.9"],
        metavar="X",
        help="of mars; the controls are matched to the first (default: 0.9)",
    )
    made.add_argument(
        "--temperatures", nargs="+", default=["0", "1"], metavar="X", help="0 is greedy (default: 0 1)"
    )
    made.add_argument("--seed", default="0", metavar="N", help="problem i draws with seed N + i (default: 0)")
    made.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="run the programs that the target writes, with bounds on time, memory and files; no protection "
        "against malice",
    )
    made.add_argument("--output", type=Path, metavar="DIR", help="a new folder, or one to go on with")
    return made


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Flags as values, in range and of use.

    Raises:
      MarsError: an unknown flag, a value out of range, a flag that does not apply to what the others choose.
      SystemExit: after --help and --version.
    """
    args = parser().parse_args(argv)
    for name in ("num_draft_tokens", "max_new_tokens", "batch_size", "seed"):
        text = getattr(args, name)
        setattr(args, name, None if text is None else from_text(name, text))
    if args.problems is not None:
        args.problems = _from_text("problems", "batch_size", args.problems)
    args.thetas = [_from_text("thetas", "theta", text) for text in args.thetas]
    # Plus zero, so that -0 is 0.
    args.temperatures = [_from_text("temperatures", "temperature", text) + 0.0 for text in args.temperatures]
    args.tree = None if args.tree is None else tree_from_text(args.tree)
    args.draft = args.draft or (f"model:{assets.DRAFT}" if args.target == assets.TARGET else "ngram")
    _check(args)
    return args


def _from_text(flag: str, name: str, text: str) -> Any:
    """A value of `flag`, in the range of the setting `name`."""
    try:
        return from_text(name, text)
    except MarsError as error:
        raise MarsError(str(error).replace(f"--{name.replace('_', '-')} is", f"--{flag} has", 1)) from None


def _check(args: argparse.Namespace) -> None:
    kind, _, path = args.draft.partition(":")
    if not (args.draft == "ngram" or (kind in ("model", "eagle", "medusa") and path)):
        raise MarsError(
            f"--draft is {args.draft}: expected {_DRAFTS}; the target alone is an arm of every run."
        )
    if args.output is None:
        raise MarsError("there is no --output: name a folder for rows, table and plots.")
    if not args.task:
        raise MarsError("there is no --task: name one, such as --task arithmetic; --help lists them.")
    names = [task.partition("=")[0] for task in args.task]
    if len(set(names)) < len(names):
        raise MarsError(
            "--task names a task twice: give each once, and evaluate other files of it in a run of their own."
        )
    if args.chat and set(names) == {"stories"}:
        raise MarsError("--chat does not apply to stories, which are continued as they are: leave it out.")
    for flag in ("thetas", "temperatures"):
        values = getattr(args, flag)
        if len({f"{value:g}" for value in values}) < len(values):
            raise MarsError(f"--{flag} has a value twice: give each once.")
    if math.inf in args.thetas:
        raise MarsError("--thetas has inf, an arm of every run: leave it out.")
    if args.margin != "gap" and max(args.thetas) > 1:
        raise MarsError(
            f"--thetas has {max(args.thetas):g}: expected at most 1 for the margin {args.margin}."
        )
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return program(_run, argv)


def _run(argv: Sequence[str] | None, out: IO[str]) -> None:
    with contextlib.redirect_stdout(out):
        args = parse(argv)

    # From here on jax loads; what is above answers at once.
    from mars_jax import drafters, text
    from mars_jax.evaluate import evaluate, read, report, scores
    from mars_jax.evaluate.answers import check_problems
    from mars_jax.evaluate.folder import check_folder

    keep_compilations()
    check_folder(args.output)
    problems = []
    for task in args.task:
        name, _, path = task.partition("=")
        problems += read(name, path or None, chat=args.chat, limit=args.problems)
    scores.check_metrics(problems, run_code=args.allow_code_execution)
    report.check_installed()

    # Prompts and vocabularies are checked on configs and tokenizers alone; only then do weights load.
    sketch = text.outline(args.target)
    if not sketch.has_tokenizer:
        raise MarsError(
            f"'{args.target}' has no tokenizer, and tasks are text: put its files beside the weights."
        )
    check_problems(sketch, problems, chat=args.chat)
    kind, _, path = args.draft.partition(":")
    if kind == "model":
        text.check_same_vocabulary(sketch, text.outline(path))
    target = text.load(args.target, dtype=args.dtype)
    drafter = drafters.load(
        args.draft,
        target,
        num_draft_tokens=args.num_draft_tokens,
        tree=drafters.Dynamic(*args.tree) if isinstance(args.tree, DynamicTree) else args.tree,
        sample=args.base == "rejection" and kind != "ngram",
        dtype=args.dtype,
    )
    shared = ("base", "margin", "thetas", "temperatures", "max_new_tokens", "batch_size", "seed", "chat")
    summary = evaluate(
        target,
        drafter,
        problems,
        args.output,
        allow_code_execution=args.allow_code_execution,
        names={name: getattr(args, name) for name in ("draft", "num_draft_tokens", "tree", "dtype")},
        progress=_Progress(),
        **{name: getattr(args, name) for name in shared},
    )
    print(report.markdown(summary), file=out, end="")
    print(f"rows, table and plots are in {args.output}", file=sys.stderr)


class _Progress:
    """A line on stderr every few seconds."""

    def __init__(self, seconds: float = 5.0):
        self._seconds, self._last = seconds, time.monotonic()

    def __call__(self, what: str, done: int, of: int) -> None:
        if done == of or time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            print(f"{what}: {done} of {of} rows", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
