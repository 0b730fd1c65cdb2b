"""`mars-jax distill KIND`: train a drafter for a target from the command line. Nothing here imports jax."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from mars_jax import __version__, assets, specs
from mars_jax.cli.flags import HOSTS, Present, add_host_flags
from mars_jax.cli.program import Parser, command, keep_compilations
from mars_jax.core.errors import MarsError

_DESCRIPTION = """\
Train a drafter for a target. It is written in the published layout of its kind, where
there is one, and `generate --draft KIND:OUTPUT` drafts with it.
"""
_EPILOG = """\
examples:
  mars-jax distill eagle3 --data stories.txt --output heads/mine
  mars-jax distill model --target PATH --from SMALL --data a.txt b.txt.xz \\
      --write 2000 --loss kl+tv --output drafts/mine

`mars-jax distill KIND --help` explains the flags of a kind. Data are text files, plain, .xz
or .gz, whose documents are separated by lines of <|endoftext|>. Started again after a kill with
the same arguments, it goes on where its last checkpoint was; with other arguments it refuses
the --work of that run. A plot of loss and acceptance is beside the checkpoints, in --work.
"""


def _flag(metavar: str, help: str, kind: type = str, **more: Any) -> dict[str, Any]:
    return {"metavar": metavar, "help": help, "type": kind, **more}


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
    "--tokens": _flag("N", "tokens to train on (default: %(default)g)", float, default=2e6),
    "--step-tokens": _flag("N", "tokens of one step (default: %(default)s)", int, default=2048),
    "--length": _flag("N", "tokens of a row (default: %(default)s)", int, default=256),
    "--learning-rate": _flag("X", "default: %(default)s", float, default=1e-3),
    "--loss": _flag("NAME", "kl, reverse_kl and tv, or a sum such as kl+0.5*tv (default: kl)", default="kl"),
    "--seed": _flag("N", "default: %(default)s", int, default=0),
    "--devices": _flag(
        "N", "devices among which the rows of a step are divided (default: 1)", int, default=1
    ),
    "--mesh": _flag(
        "data=2,model=4",
        "instead of --devices: divide the target over model and the rows of a step over data, to train a head of a "
        "target that does not fit on one device",
    ),
    "--dtype": {
        "choices": ("float32", "bfloat16"),
        "default": "bfloat16",
        "help": "dtype of the result (default: %(default)s)",
    },
    "--intermediate-size": _flag("N", "width of the head's MLPs (default: the target's)", int),
    "--draft-vocab": _flag("W", "draft the W most frequent tokens only (default: all)", int),
    "--layout": _flag("NAME", "layout of the files"),
    "--feature-layers": _flag("I,J,K", "layers of the target to read, 0-based"),
    "--steps-ahead": _flag("N", "steps of training-time test (default: 5)", int),
    "--features": _flag(
        "DIR",
        "train on these features; an epoch begins with the shards that exist by then. --tokens may change until the "
        "learning rate begins to fall. --data is then more text to choose --draft-vocab from",
        Path,
        nargs="+",
    ),
    "--heads": _flag("N", "default: 4", int),
    "--block-size": _flag("N", "tokens of a block, the last committed one included (default: 16)", int),
    "--head-layers": _flag("N", "layers of the head (default: 5)", int),
    "--mask-token": _flag(
        "ID", "token in the place of drafted ones (default: the token that begins a text)", int
    ),
    "--markov-rank": _flag("R", "DSpark: correct each token by the one before (default: no)", int),
    "--confidence": {
        "action": "store_true",
        "default": None,
        "help": "DSpark: learn where a draft should end (--draft-stop)",
    },
    "--from": _flag("PATH", "checkpoint of the model that drafts", dest="first"),
    "--left-out": _flag("SHARE", "share of the target's sublayers to leave out (default: 0.45)", float),
    "--evaluations": _flag("N", "masks to try at most (default: 128)", int),
    "--task": _flag(
        "NAME[=PATH]",
        "task whose answers are rewarded, as for mars-jax benchmark (default: arithmetic, the training part)",
    ),
    "--updates": _flag("N", "updates of the head (default: 40)", int),
    "--chat": {"action": "store_true", "default": None, "help": "the target answers each document"},
    "--temperatures": _flag("T,U", "temperatures of the answers, in turns (default: 0,1)"),
    "--shard": _flag("N", "documents of a shard (default: 128)", int),
}
"""Flags by name. A kind may explain one in words of its own, `Kind.told`."""
_DATA = ("--target", "--data", "--output")
_TEXT = (*_DATA, "--work", "--write")
_TRAINING = (
    *("--tokens", "--step-tokens", "--length", "--learning-rate", "--loss", "--seed"),
    *("--devices", "--mesh", "--dtype"),
)
_SIZES = ("--tokens", "--step-tokens", "--length", "--seed")


class Kind(NamedTuple):
    """A kind of thing that `distill` makes, and its flags, of `_FLAGS`."""

    help: str
    data: Sequence[str]
    training: Sequence[str]
    method: Sequence[str]
    told: Mapping[str, str] = {}


KINDS = {
    "eagle3": Kind(
        "an EAGLE-3 head, by training-time test",
        _TEXT,
        _TRAINING,
        (
            *("--from", "--features", "--feature-layers", "--draft-vocab", "--steps-ahead"),
            *("--intermediate-size", "--layout"),
        ),
        {
            "--from": "EAGLE-3 head to train further (default: a new one)",
            "--layout": "layout of the files: eagle, which SGLang reads, or speculators (default: eagle)",
        },
    ),
    "eagle1": Kind("an EAGLE-1 head, by regression", _TEXT, _TRAINING, ("--intermediate-size",)),
    "medusa": Kind("Medusa heads", _TEXT, _TRAINING, ("--heads",)),
    "dflash": Kind(
        "a DFlash or DSpark head, by masked blocks",
        _TEXT,
        _TRAINING,
        (
            *("--block-size", "--head-layers", "--feature-layers", "--draft-vocab", "--mask-token"),
            *("--markov-rank", "--confidence", "--intermediate-size", "--layout"),
        ),
        {
            "--layout": "layout of the files: dflash, which z-lab's code reads, or speculators (default: dflash)"
        },
    ),
    "model": Kind(
        "a small language model, on the target's distributions",
        _TEXT,
        _TRAINING,
        ("--from",),
        {"--from": "checkpoint of the small model to train"},
    ),
    "sprinter": Kind(
        "SPRINTER's classifier on a small model",
        (*_DATA, "--work"),
        _SIZES,
        ("--from",),
    ),
    "via_sd": Kind(
        "VIA-SD's choice of the target's layers",
        (*_DATA, "--work"),
        _SIZES,
        ("--from", "--left-out", "--evaluations"),
        {"--from": "checkpoint of the model that drafts (default: ngram)"},
    ),
    "diversed": Kind(
        "the head of the rule diversed, by reinforcement",
        ("--target", "--output", "--work"),
        ("--seed",),
        ("--from", "--task", "--updates"),
    ),
    "features": Kind(
        "what a target says of a text, for eagle3 --features",
        _DATA,
        ("--length", "--seed"),
        ("--feature-layers", "--chat", "--temperatures", "--shard"),
    ),
}


def parser() -> Parser:
    """The parser, with one of its own for each kind. Flags that a kind does not have are None."""
    made = Parser(
        prog="mars-jax distill",
        usage="%(prog)s KIND [flags]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    made.add_argument("--version", action="version", version=f"mars-jax {__version__}")
    kinds = made.add_subparsers(title="kinds", dest="kind", required=True, metavar="KIND", prog=made.prog)
    for name, kind in KINDS.items():
        own = kinds.add_parser(
            name,
            help=kind.help,
            usage="%(prog)s --output DIR [flags]",
            description=f"{kind.help[0].upper()}{kind.help[1:]}.",
        )
        own.set_defaults(**dict.fromkeys((*map(_dest, _FLAGS), *HOSTS)))
        for title in ("data", "training", "method"):
            group = own.add_argument_group(title)
            for flag in getattr(kind, title):
                row: dict[str, Any] = _FLAGS[flag] | {"help": kind.told.get(flag, _FLAGS[flag]["help"])}
                group.add_argument(flag, **row)
        if "--mesh" in kind.training:
            add_host_flags(own)
    return made


def _dest(flag: str) -> str:
    return _FLAGS[flag].get("dest") or flag.removeprefix("--").replace("-", "_")


_POSITIVE = (
    *("write", "tokens", "step_tokens", "length", "learning_rate", "devices"),
    *("intermediate_size", "draft_vocab", "steps_ahead", "heads", "head_layers", "markov_rank"),
    *("left_out", "evaluations", "updates", "shard"),
)


def check(args: argparse.Namespace) -> None:
    """Raise MarsError for values out of range, and for flags of a kind that do not go together."""
    if args.data is None and args.features is None and "--data" in KINDS[args.kind].data:
        either = " or --features" if args.kind == "eagle3" else ""
        raise MarsError(f"there is no text to learn from: give --data{either}.")
    if args.data is not None and args.features is not None and args.draft_vocab is None:
        raise MarsError(
            "--data beside --features is the text of a draft vocabulary: give --draft-vocab, or leave it out."
        )
    first = "dflash" if args.kind == "dflash" else "eagle"
    if args.layout not in (None, first, "speculators"):
        raise MarsError(f"--layout is {args.layout}: expected {first} or speculators.")
    if args.block_size is not None and args.block_size < 2:
        raise MarsError(
            f"--block-size is {args.block_size}: expected at least 2, the first being the last token."
        )
    if args.mask_token is not None and args.mask_token < 0:
        raise MarsError(f"--mask-token is {args.mask_token}: expected a token of the target's vocabulary.")
    if args.temperatures is not None and args.chat is None:
        raise MarsError("--temperatures does not apply to documents that are read as they are: give --chat.")
    if args.kind == "eagle3" and args.first is not None:
        own = ("draft_vocab", "intermediate_size", "feature_layers")
        _unused(args, own, "a head of --from, which has its own")
    if args.features is not None:
        _unused(args, ("length", "devices", "mesh", "write"), "--features")
    Present(args).refuse_alone()
    if args.mesh is not None and args.devices != 1:
        raise MarsError(
            "--devices does not apply with --mesh, which names the devices: leave one of them out."
        )
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise MarsError(f"--{name.replace('_', '-')} is {value}: expected a number above 0.")
    for name in ("heads", "steps_ahead"):  # each drafts one more token in a row
        if getattr(args, name) is not None:
            specs.REQUEST["num_draft_tokens"].check(getattr(args, name), shown=f"--{name.replace('_', '-')}")
    specs.REQUEST["seed"].check(args.seed, shown="--seed")
    if args.kind == "model" and args.first is None:
        raise MarsError("a small model needs a checkpoint to start from: name it with --from.")
    if args.kind in ("sprinter", "diversed") and args.first is None:
        raise MarsError(f"{args.kind} needs the small model that drafts: name it with --from.")
    # os.path answers False for paths that the system refuses, of which `free_directory` speaks later.
    if (
        args.kind != "features"
        and os.path.exists(args.output)
        and not (os.path.isdir(args.output) and not os.listdir(args.output))
    ):
        raise MarsError(f"'{args.output}' exists and is not an empty directory: choose another --output.")


def _unused(args: argparse.Namespace, names: Sequence[str], what: str) -> None:
    """Raise MarsError for flags that do not apply, where they are given."""
    defaults = parser().kinds()[args.kind]
    for name in names:
        if getattr(args, name) != defaults.get_default(name):
            raise MarsError(f"--{name.replace('_', '-')} does not apply to {what}: leave it out.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return command(lambda argv: parser().parse_args(argv), _run, argv)


def _run(args: argparse.Namespace, out: IO[str]) -> None:
    check(args)
    # From here on jax loads; what is above answers at once.
    keep_compilations()
    if args.kind == "features":
        from mars_jax.lab.commands.distill_features import write_features

        write_features(args)
    else:
        from mars_jax.lab.commands.distill_run import distill

        distill(args, out)
