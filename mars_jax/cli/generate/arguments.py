"""The flags of `python -m mars_jax.generate`. Nothing here imports jax, so `--help` is immediate."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mars_jax import __version__, assets
from mars_jax.cli.program import Parser
from mars_jax.cli.settings import MESH_HELP, NO_CHECK_HELP, SETTINGS, from_text, tree_from_text
from mars_jax.cli.theta import ThetaFile, settings_of, theta_from_text

RULES = ("exact", "rejection", "mars", "simulated")
MARGINS = ("ratio", "gap", "prob_ratio")  # those of verify.MARGINS, whose module imports jax
DTYPES = ("float32", "bfloat16", "int8")

_DESCRIPTION = """\
Continue prompts by speculative decoding: a cheap draft proposes tokens, the target
model scores them in one forward pass, and a rule decides how many of them to keep.
"""
_EPILOG = """\
examples:
  python -m mars_jax.generate "Once upon a time"
  python -m mars_jax.generate --target PATH --draft model:SMALL --verify exact "Hello"
  python -m mars_jax.generate --target PATH --prompts-file in.jsonl --output out.jsonl
  python -m mars_jax.generate --target PATH --draft eagle:HEAD --tree dynamic:8-6-40 "Hello"
  python -m mars_jax.generate --target PATH --compare "Once upon a time"

A prompts file holds one prompt a line. Named *.jsonl, it holds one object a line:
`prompt` or `prompt_tokens`, and where a prompt chooses for itself `id`, temperature,
top_k, top_p, min_p, theta, max_relaxed_run, strict, draft_stop, seed and
max_new_tokens.
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
        help="checkpoint directory, or owner/name on the Hugging Face hub (default: tiny/target, a small model "
        "that comes with the package)",
    )
    group.add_argument(
        "--draft",
        metavar="DRAFT",
        help="none (plain autoregression), ngram (copy from the text so far), model:PATH (a small model with the "
        "target's tokenizer), eagle:PATH (an EAGLE, EAGLE-2 or EAGLE-3 head of the target) or medusa:PATH (Medusa "
        "heads of the target); default: model:tiny/draft for tiny/target, ngram for others",
    )
    group.add_argument(
        "--num-draft-tokens",
        metavar="N",
        help="tokens drafted in a row (default: 5 by a model, 8 by ngram, one by each head of medusa; eagle drafts "
        "a tree, and 5 for rejection)",
    )
    group.add_argument(
        "--tree",
        metavar="4-2-2-1",
        help="draft a tree with a model, eagle or medusa: children per node at each depth; or dynamic, whose shape "
        "follows the draft's confidence (not with medusa), or with its children, depth and nodes, as in "
        "dynamic:8-6-40 (default: dynamic, which is dynamic:10-7-60, for eagle)",
    )
    group.add_argument(
        "--draft-stop",
        metavar="X",
        help="draft nothing behind a token where a model, eagle or medusa is unsure: where the square root of its "
        "entropy in nats is above X (default: inf, which is off)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
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
    group.add_argument(
        "--verify",
        choices=RULES,
        help="exact: lossless, keeps what the target itself would say; rejection: lossless speculative "
        "sampling; mars: also keeps the target's runner-up where its two best tokens are nearly tied; simulated: "
        "accepts by chance, to size hardware, and its text means nothing (default: mars)",
    )
    group.add_argument(
        "--tau", metavar="X", help="tokens per target forward that simulated gives, in the mean over steps"
    )
    group.add_argument("--base", choices=("exact", "rejection"), help="what mars relaxes (default: exact)")
    group.add_argument(
        "--block", action="store_true", default=None, help="rejection by whole blocks, not token by token"
    )
    group.add_argument(
        "--theta",
        metavar="X",
        help="how near a tie must be for mars; inf never relaxes; or a file that python -m mars_jax.calibrate wrote, "
        "whose margin and base go with it (default: 0.9)",
    )
    group.add_argument(
        "--margin",
        choices=MARGINS,
        help="what theta bounds: ratio (second logit / best > theta), gap (nats between them < theta) or "
        "prob_ratio (second probability / best > theta); default: ratio",
    )
    group.add_argument(
        "--max-relaxed-run", metavar="N", help="relaxed tokens in a row that mars allows (default: any)"
    )


def _add_sampling(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("sampling")
    for flag, metavar, text in (
        ("--temperature", "X", "0 is greedy (default: 0)"),
        ("--top-k", "N", "sample among the N best tokens (default: off)"),
        ("--top-p", "X", "sample among the best tokens of total probability X (default: off)"),
        ("--min-p", "X", "drop tokens below X times the best probability (default: off)"),
        ("--seed", "N", "prompt i draws with seed N + i (default: 0)"),
        ("--max-new-tokens", "N", "most tokens per prompt (default: 256)"),
    ):
        group.add_argument(flag, metavar=metavar, help=text)
    group.add_argument("--ignore-eos", action="store_true", help="decode past the model's stop tokens")


def _add_input_and_output(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("input")
    group.add_argument("--prompts-file", metavar="FILE", help="read prompts from a file, or - for stdin")
    group.add_argument("--chat", action="store_true", help="put prompts through the model's chat template")
    group.add_argument(
        "--batch-size", metavar="N", help="prompts decoded side by side (default: 1 for a stream, else 8)"
    )
    group = made.add_argument_group("output")
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print text as it is decided (default), or when a batch is done",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object per prompt, nothing else")
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
        help="decode the prompts autoregressively, with exact and with mars, and print one table of speed "
        "and acceptance",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Flags as values. Numbers are in range; whether a flag applies is for `applies.check_flags`.

    Raises:
      MarsError: an unknown flag, or a value that is not what the flag takes.
      SystemExit: after --help and --version.
    """
    args = parser().parse_args(argv)
    theta = None if args.theta is None else theta_from_text(args.theta)
    args.theta = None
    for name in SETTINGS.keys() & vars(args).keys():
        text = getattr(args, name)
        setattr(args, name, None if text is None else from_text(name, text))
    args.tree = None if args.tree is None else tree_from_text(args.tree)
    args.target = args.target or assets.TARGET
    args.draft = args.draft or (f"model:{assets.DRAFT}" if args.target == assets.TARGET else "ngram")
    args.theta, args.theta_file = theta, None
    if isinstance(theta, ThetaFile):
        args.theta, args.theta_file = theta.theta, theta
        given = {name: getattr(args, name) for name in ("base", "margin") if getattr(args, name) is not None}
        theta.check(settings_of(args, temperature=args.temperature or 0.0, **given))
        args.base, args.margin = theta.settings["base"], theta.settings["margin"]
    return args
