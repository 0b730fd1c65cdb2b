"""The flags of `python -m mars_jax.generate`. Nothing here imports jax, so `--help` is immediate."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence

from mars_jax import __version__, assets, specs
from mars_jax.cli.flags import MESH_HELP, NO_CHECK_HELP, draft_of, numbers_of
from mars_jax.cli.program import Parser
from mars_jax.cli.rule import OWN, add_rule_flags, given_settings
from mars_jax.cli.theta import rule_and_file, settings_of

_DESCRIPTION = """\
Continue prompts by speculative decoding: a cheap draft proposes tokens, the target
model scores them in one forward pass, and a rule decides how many of them to keep.
"""
_ROWS = textwrap.fill(
    "A prompts file holds one prompt a line. Named *.jsonl, it holds one object a line: prompt or prompt_tokens, and "
    "where a prompt chooses for itself id, "
    + ", ".join(name for name, row in specs.REQUEST.items() if row.per_row)
    + ", and the numbers of the rule, such as theta.",
    width=88,
)
_EPILOG = f"""\
examples:
  python -m mars_jax.generate "Once upon a time"
  python -m mars_jax.generate --target PATH --draft model:SMALL --verify exact "Hello"
  python -m mars_jax.generate --target PATH --prompts-file in.jsonl --output out.jsonl
  python -m mars_jax.generate --target PATH --draft eagle:HEAD --tree dynamic:8-6-40 "Hello"
  python -m mars_jax.generate --target PATH --verify gates.py:entropy_gate \\
      --rule-option entropy=1.5 "Hello"
  python -m mars_jax.generate --target PATH --compare "Once upon a time"

{_ROWS}
A rule of your own, {OWN}, is a function that makes a
rule, and its arguments are the settings; naming it runs its file. --list-rules prints
the table of rules.
Text goes to stdout, statistics and progress to stderr; bad input ends with exit code 2.
"""


def parser() -> argparse.ArgumentParser:
    """The parser. Flags default to None, so that what was given can be told from what was not."""
    made = Parser(
        prog="python -m mars_jax.generate",
        usage="%(prog)s [flags] [PROMPT ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    made.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue")
    made.add_argument("--version", action="version", version=f"mars-jax {__version__}")
    _add_models(made)
    _add_rule(made)
    _add_sampling(made)
    _add_input_and_output(made)
    return made


def _add_models(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("models")
    group.add_argument(
        "--target",
        metavar="PATH",
        help="checkpoint directory, GGUF file, or owner/name on the Hugging Face hub (default: tiny/target, a small "
        "model that comes with the package)",
    )
    drafts = [f"{row.spec} ({row.help})" for row in specs.DRAFTERS.values()]
    group.add_argument(
        "--draft",
        metavar="DRAFT",
        help=f"{', '.join(drafts[:-1])} or {drafts[-1]}; default: model:tiny/draft for tiny/target, ngram for others",
    )
    group.add_argument(
        "--num-draft-tokens",
        metavar="N",
        help="tokens drafted in a row (default: 5 by a model, 8 by ngram, one by each head of medusa; eagle drafts "
        "a tree, and 5 for rejection)",
    )
    made_of = specs.Dynamic()
    sizes = f"{made_of.top_k}-{made_of.depth}-{made_of.nodes}"
    group.add_argument(
        "--tree",
        metavar="4-2-2-1",
        help=f"draft a tree with {specs.drafters_that('trees')}: children per node at each depth; or dynamic, whose "
        f"shape follows the draft's confidence ({specs.drafters_that('dynamic')}), or with its children, depth and "
        f"nodes, as in dynamic:8-6-40 (default: dynamic, which is dynamic:{sizes}, for eagle)",
    )
    stop = specs.REQUEST["draft_stop"]
    group.add_argument("--draft-stop", metavar=stop.metavar, help=stop.help)
    group.add_argument(
        "--dtype",
        choices=specs.DTYPES,
        help="of the weights (default: the checkpoint's own; of eagle and medusa heads, the target's); int8: matrices "
        "in 8 bits per weight, and the rest in the checkpoint's own",
    )
    group.add_argument("--no-check", action="store_true", default=None, help=NO_CHECK_HELP)
    group.add_argument("--mesh", metavar="data=2,model=4", help=MESH_HELP)
    group = made.add_argument_group(
        "several hosts, with --mesh (on Cloud TPU and Slurm they find each other)"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where it is to listen")
    group.add_argument(
        "--num-processes", type=int, metavar="N", help="started with the same flags; 1: look for no others"
    )
    group.add_argument(
        "--process-id", type=int, metavar="I", help="which of them this is; 0 prints and writes"
    )


def _add_rule(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("rule")
    add_rule_flags(group, default="mars; exact for --draft none")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--list-rules", action="store_true", help="print the table of rules, and nothing else")
    one.add_argument(
        "--list-drafters", action="store_true", help="print the table of drafters, and nothing else"
    )


def _add_sampling(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("sampling")
    for name in ("temperature", *specs.FILTERS, "seed", "max_new_tokens"):
        row = specs.REQUEST[name]
        group.add_argument("--" + name.replace("_", "-"), metavar=row.metavar, help=row.help)
    group.add_argument("--ignore-eos", action="store_true", help="decode past the model's stop tokens")


def _add_input_and_output(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("input")
    group.add_argument("--prompts-file", metavar="FILE", help="read prompts from a file, or - for stdin")
    group.add_argument("--chat", action="store_true", help="put prompts through the model's chat template")
    group.add_argument("--batch-size", metavar="N", help=specs.REQUEST["batch_size"].help)
    group = made.add_argument_group("output")
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print text as it is decided (default), or when a batch is done",
    )
    group.add_argument(
        "--log-probs",
        action="store_true",
        help="with --json or --output: three log-probabilities, the regret and the kind of every token",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per prompt, nothing else; with --list-rules the table",
    )
    group.add_argument(
        "--output", metavar="FILE", help="append those objects to a new file, each as soon as it is finished"
    )
    group.add_argument("--resume", action="store_true", help="continue the --output of an interrupted run")
    group.add_argument(
        "--speedup",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="decode once more autoregressively, and say how much faster the draft made it (default: with "
        "tiny/target)",
    )
    group.add_argument(
        "--compare",
        action="store_true",
        help="decode the prompts autoregressively, with exact and with the rule, and print one table of speed "
        "and acceptance",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Flags as values, and `rule`, what those of the rule choose. Whether a flag applies is for `check_flags`.

    Raises:
      MarsError: an unknown flag, or a value that is not what the flag takes.
      SystemExit: after --help and --version.
    """
    args = parser().parse_args(argv)
    numbers_of(args, specs.REQUEST)
    args.tree = None if args.tree is None else specs.parse_tree(args.tree)
    args.target = args.target or assets.TARGET
    args.draft = draft_of(args.draft, args.target)
    drafts = specs.parse_draft(args.draft, shown="--draft").kind != "none"
    args.rule, args.theta_file = rule_and_file(
        args.verify, given_settings(args), "mars" if drafts else "exact"
    )
    if args.theta_file is not None:
        args.theta_file.check(settings_of(args, temperature=args.temperature or 0.0))
    return args
