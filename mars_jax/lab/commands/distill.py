"""`mars-jax distill KIND`: train a drafter for a target from the command line."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from mars_jax.cli.flags import HOSTS, Present, add_host_flags, flag_of
from mars_jax.cli.program import Parser, command, keep_compilations
from mars_jax.utils import assets
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import BATCH, REQUEST

_DESCRIPTION = """\
Train a drafter for a target. It is written in the published layout of its kind, if there
is one. The last line says how to draft with it.
"""
_EPILOG = """\
examples:
  mars-jax distill eagle3 --data stories.txt --output heads/mine
  mars-jax distill model --target PATH --from SMALL --data a.txt b.txt.xz \\
      --write 2000 --loss kl+tv --output drafts/mine

`mars-jax distill KIND --help` explains the flags of a kind. Data are text files, plain, .xz
or .gz, whose documents are separated by lines of <|endoftext|>. After a kill the same command
continues from its last checkpoint. A command with other settings needs another --work, which
also has the losses and acceptance of every step (log.jsonl).
"""


def _flag(metavar: str, help: str, kind: type = str, **options: Any) -> dict[str, Any]:
    return {"metavar": metavar, "help": help, "type": kind, **options}


def _switch(help: str) -> dict[str, Any]:
    # The default is None rather than False, because None is also the value of a flag that the kind does not have.
    return {"action": "store_true", "default": None, "help": help}


_FLAGS: dict[str, dict[str, Any]] = {
    "--target": _flag("PATH", "default: %(default)s", default=assets.TARGET),
    "--data": _flag("FILE", "text to learn from", Path, nargs="+"),
    "--output": _flag("DIR", "new directory for the result", Path, required=True),
    "--work": _flag("DIR", "directory of the checkpoints (default: OUTPUT-training)", Path),
    "--write": _flag(
        "N",
        "train on N texts that the target itself writes at temperature 1, from the first 16 tokens of the documents "
        "(default: on the documents)",
        int,
    ),
    "--from": _flag(
        "PATH",
        "checkpoint to start from: for eagle3 a head to train further (default: a new one), for model the small model, "
        "otherwise the model that drafts (default of via_sd: ngram)",
        dest="first",
    ),
    "--tokens": _flag("N", "tokens to train on (default: %(default)g)", float, default=2e6),
    "--minutes": _flag("M", "end training after M minutes, and write the result as it is then", float),
    "--step-tokens": _flag("N", "tokens of one step (default: %(default)s)", int, default=2048),
    "--length": _flag("N", "tokens of a row (default: %(default)s)", int, default=256),
    "--learning-rate": _flag("X", "default: %(default)s", float, default=1e-3),
    "--loss": _flag("NAME", "kl, reverse_kl and tv, or a sum such as kl+0.5*tv (default: kl)", default="kl"),
    "--seed": _flag("N", "default: %(default)s", int, default=0),
    "--mesh": _flag(
        "data=2,model=4",
        "divide the rows of a step over data, and a target that does not fit on one device over model",
    ),
    "--dtype": {
        "choices": ("float32", "bfloat16"),
        "default": "bfloat16",
        "help": "dtype of the result (default: %(default)s)",
    },
    "--intermediate-size": _flag("N", "width of the head's MLPs (default: the target's)", int),
    "--draft-vocab": _flag("W", "draft only the W most frequent tokens (default: all)", int),
    "--layout": _flag("NAME", "layout of the files: speculators, or that of the authors (default)"),
    "--feature-layers": _flag("I,J,K", "layers of the target to read, 0-based"),
    "--steps-ahead": _flag("N", "steps of training-time test (default: %(default)s)", int, default=5),
    "--features": _flag(
        "DIR",
        "train on these features; --data is then more text to choose --draft-vocab from",
        Path,
        nargs="+",
    ),
    "--heads": _flag("N", "default: %(default)s", int, default=4),
    "--block-size": _flag(
        "N", "tokens of a block, including the last committed one (default: %(default)s)", int, default=16
    ),
    "--head-layers": _flag("N", "layers of the head (default: %(default)s)", int, default=5),
    "--markov-rank": _flag("R", "DSpark: correct each token by the one before (default: no)", int),
    "--confidence": _switch("DSpark: learn where a draft should end (--draft-stop)"),
    "--left-out": _flag(
        "SHARE", "share of the target's sublayers to leave out (default: %(default)s)", float, default=0.45
    ),
    "--task": _flag(
        "NAME[=PATH]",
        "task whose answers are rewarded, as for mars-jax benchmark (default: arithmetic, the training part)",
    ),
    "--chat": _switch("the target answers each document, at temperatures 0 and 1 in turn"),
}
_DATA = ("--target", "--data", "--output")
_GROUPS = {
    "data": (*_DATA, "--work", "--write"),
    "training": (
        *("--tokens", "--minutes", "--step-tokens", "--length", "--learning-rate", "--loss", "--seed"),
        *("--mesh", "--dtype"),
    ),
}
"""Flags, keyed by help group. All other flags are in the group `method`."""
_TRAINING = (*_GROUPS["data"], *_GROUPS["training"])
_SYSTEM = (*_DATA, "--work", "--tokens", "--step-tokens", "--length", "--seed", "--from")
_HEAD = (*_TRAINING, "--feature-layers", "--draft-vocab", "--intermediate-size", "--layout")


class Kind(NamedTuple):
    """A kind of result that `distill` produces, with its flags, which are keys of `_FLAGS`."""

    help: str
    flags: Sequence[str]


KINDS = {
    "eagle3": Kind(
        "an EAGLE-3 head, by training-time test", (*_HEAD, "--from", "--features", "--steps-ahead")
    ),
    "eagle1": Kind("an EAGLE-1 head, by regression", (*_TRAINING, "--intermediate-size")),
    "mtp": Kind("an MTP module, by training-time test", (*_TRAINING, "--steps-ahead")),
    "medusa": Kind("Medusa heads", (*_TRAINING, "--heads")),
    "dflash": Kind(
        "a DFlash or DSpark head, by masked blocks",
        (*_HEAD, "--block-size", "--head-layers", "--markov-rank", "--confidence"),
    ),
    "model": Kind("a small language model, on the target's distributions", (*_TRAINING, "--from")),
    "sprinter": Kind("SPRINTER's classifier on a small model", _SYSTEM),
    "via_sd": Kind("VIA-SD's choice of the target's layers", (*_SYSTEM, "--left-out")),
    "diversed": Kind(
        "the head of the rule diversed, by reinforcement",
        ("--target", "--output", "--work", "--seed", "--from", "--task"),
    ),
    "features": Kind(
        "features of a text by a target, for eagle3 --features",
        (*_DATA, "--length", "--seed", "--feature-layers", "--chat"),
    ),
}


def parser() -> Parser:
    """Return the parser, with a subparser for each kind. Flags that do not apply to a kind are None."""
    command_parser = Parser(
        prog="mars-jax distill", usage="%(prog)s KIND [flags]", description=_DESCRIPTION, epilog=_EPILOG
    )
    kind_parsers = command_parser.add_subparsers(
        title="kinds", dest="kind", required=True, metavar="KIND", prog=command_parser.prog
    )
    flag_names = [_FLAGS[flag].get("dest") or flag[2:].replace("-", "_") for flag in _FLAGS]
    for name, kind in KINDS.items():
        subparser = kind_parsers.add_parser(
            name,
            help=kind.help,
            usage="%(prog)s --output DIR [flags]",
            description=f"{kind.help[0].upper()}{kind.help[1:]}.",
        )
        # Set every name for every kind, so that the checks need not test which flags a kind has.
        subparser.set_defaults(**dict.fromkeys((*flag_names, *HOSTS)))
        group_by_title = {}
        for flag in kind.flags:
            title = next((title for title, flags in _GROUPS.items() if flag in flags), "method")
            if title not in group_by_title:
                group_by_title[title] = subparser.add_argument_group(title)
            group_by_title[title].add_argument(flag, **_FLAGS[flag])
        if "--mesh" in kind.flags:
            add_host_flags(subparser)
    return command_parser


def check_distill_flags(args: argparse.Namespace) -> None:
    """Raise MarsError if a value is out of range, or if flags conflict for the chosen kind of drafter."""
    source_flags = [flag for flag in ("--data", "--features") if flag in KINDS[args.kind].flags]
    if source_flags and args.data is None and args.features is None:
        raise MarsError(f"there is no text to learn from: give {' or '.join(source_flags)}.")
    if args.data is not None and args.features is not None and args.draft_vocab is None:
        raise MarsError(
            "--data with --features is the text of a draft vocabulary: give --draft-vocab, or leave out --data."
        )
    # The authors' layout is named after the drafter that reads it: for both eagle1 and eagle3, this is eagle.
    authors_layout = args.kind.rstrip("13")
    if args.layout not in (None, authors_layout, "speculators"):
        raise MarsError(f"--layout is {args.layout}: expected {authors_layout} or speculators.")
    if args.block_size is not None and args.block_size < 2:
        raise MarsError(f"--block-size is {args.block_size}: expected at least 2, with the last token.")
    if args.kind == "eagle3" and args.first is not None:
        head_flags = ("draft_vocab", "intermediate_size", "feature_layers")
        _refuse(args, head_flags, "a head of --from, which has its own")
    if args.features is not None:
        _refuse(args, ("length", "mesh", "write"), "--features")
    Present(args).refuse_alone()
    # Every number except the seed must be positive. Flags that the kind does not have are None.
    for flag, options in _FLAGS.items():
        if options.get("type") in (int, float) and flag != "--seed":
            value = getattr(args, flag[2:].replace("-", "_"))
            if value is not None and not 0 < value < math.inf:
                raise MarsError(f"{flag} is {value}: expected a number above 0.")
    # Both flags specify a number of consecutive drafted tokens.
    for name in ("heads", "steps_ahead"):
        if getattr(args, name) is not None:
            BATCH["num_draft_tokens"].check(getattr(args, name), shown=flag_of(name))
    REQUEST["seed"].check(args.seed, shown="--seed")
    if args.kind in ("model", "sprinter", "diversed") and args.first is None:
        raise MarsError(f"distill {args.kind} needs a checkpoint to start from: name it with --from.")
    # `distill features` can add shards to a folder that already contains some.
    if args.kind == "features":
        return
    # The os.path functions return False for paths that the system rejects; `free_directory` reports those later.
    is_free = not os.path.exists(args.output) or (os.path.isdir(args.output) and not os.listdir(args.output))
    if not is_free:
        raise MarsError(f"'{args.output}' exists and is not an empty directory: choose another --output.")


def _refuse(args: argparse.Namespace, names: Sequence[str], alternative: str) -> None:
    """Raise MarsError if a flag that does not apply is set."""
    kind_parser = parser().kinds()[args.kind]
    for name in names:
        if getattr(args, name) != kind_parser.get_default(name):
            raise MarsError(f"{flag_of(name)} does not apply to {alternative}: leave it out.")


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    return command(lambda argv: parser().parse_args(argv), _run, argv)


def _run(args: argparse.Namespace, out: IO[str]) -> None:
    check_distill_flags(args)
    # Import the training code only after the checks, so that wrong flags are refused immediately.
    keep_compilations()
    from mars_jax.lab.commands.distill_run import distill

    distill(args, out)
