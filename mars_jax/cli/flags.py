"""What flags of several commands share: their values by the tables of `specs`. Nothing here imports jax."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from mars_jax import assets, specs
from mars_jax.core.errors import MarsError

MESH_HELP = (
    "divide the work over devices: data (rows of the batch), model (heads, hidden units and vocabulary) and expert, as "
    "in data=2,model=4 (default: one device)"
)
CACHE_DTYPE_HELP = (
    "of the target's keys and values (default: the weights', on a CPU float32); int8: 8 bits a number, and a scale for "
    "each token and head"
)
ATTENTION_HELP = (
    "of the target (default: xla); pallas: on TPU a kernel that reads of each row only its own slots, which no chip "
    "has run yet, and xla elsewhere"
)
NO_CHECK_HELP = (
    "do not compare the checksums of a --target that mars-jax convert wrote with what is read of it"
)


def add_settings(group: Any, *names: str) -> None:
    """Flags of settings of a request, as texts; `numbers_of` makes them values."""
    for name in names:
        row = specs.REQUEST[name]
        group.add_argument("--" + name.replace("_", "-"), metavar=row.metavar, help=row.help)


def number_of(name: str, text: str, shown: str | None = None) -> Any:
    """The value of a flag in the range of the request setting `name`.

    Raises:
      MarsError: not a number, or out of range.

    >>> number_of("temperature", "0.5")
    0.5
    """
    return specs.REQUEST[name].from_text(text, shown=shown or "--" + name.replace("_", "-"))


def numbers_of(args: argparse.Namespace, names: Iterable[str]) -> None:
    """Turn the texts of flags into values, where they are given.

    Raises:
      MarsError: not a number, or out of range.
    """
    for name in names:
        text = getattr(args, name, None)
        if text is not None:
            setattr(args, name, number_of(name, text))


def draft_of(draft: str | None, target: str) -> str:
    """The draft of a pair: the one that is given, or the target's own.

    >>> draft_of(None, "owner/model")
    'ngram'
    """
    return draft or (f"model:{assets.DRAFT}" if target == assets.TARGET else "ngram")


def add_size_flags(group: Any) -> None:
    """The flags of drafts that are as long as pays, for a group of a parser."""
    group.add_argument(
        "--draft-size",
        choices=["fixed", "auto"],
        help="auto: each step drafts the whole chain, half of it or nothing, as pays then by what steps cost and by "
        f"how much was accepted lately; with {specs.drafters_that('resizes')} and lossless rules (default: fixed)",
    )
    group.add_argument(
        "--any-rule",
        action="store_true",
        default=None,
        help="with --draft-size auto, and where drafts learn as they decode: lossy rules too, although a text then "
        "depends on what else is decoded",
    )


def check_size_flags(args: argparse.Namespace, rule: Any) -> None:
    """Raise MarsError where drafts cannot be as long as pays, or would tie a text to its batch.

    Args:
      args: with `draft`, `tree` and the flags of `add_size_flags`; "fixed" becomes None, which it is.
      rule: a `RuleChoice`.
    """
    refines = getattr(args, "refine", None) is not None
    if args.any_rule and args.draft_size != "auto" and not refines:
        raise MarsError(
            "--any-rule does not apply to drafts of a fixed size, on which no text depends: leave it out, or add "
            "--draft-size auto."
        )
    if args.draft_size != "auto":
        args.draft_size = None
        return
    draft = specs.parse_draft(args.draft, shown="--draft")
    if not draft.row.resizes:
        raise MarsError(
            f"--draft-size auto does not apply to --draft {draft.kind}, which has no chains of several lengths: leave "
            f"it out, or draft with {specs.drafters_that('resizes')}."
        )
    if args.tree is not None:
        raise MarsError(
            "--draft-size auto does not apply with --tree, whose shape is its own: leave one out."
        )
    if not rule.row.lossless and not args.any_rule:
        raise MarsError(
            f"--draft-size auto does not apply to the rule {rule.name}, which is lossy, so that a text would depend on "
            "what else is in its batch: add --verify exact or rejection, or --any-rule."
        )
    if rule.row.lossless and args.any_rule:
        raise MarsError(
            f"--any-rule does not apply to the rule {rule.name}, which is lossless: leave it out."
        )


HOSTS = ("coordinator", "num_processes", "process_id")
"""The flags of `add_host_flags`."""


def add_host_flags(made: Any) -> None:
    """The flags of several processes that decode as one, for a parser."""
    group = made.add_argument_group(
        "hosts", description="Several, with --mesh; on Cloud TPU and Slurm they find each other."
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where it is to listen")
    group.add_argument(
        "--num-processes", type=int, metavar="N", help="started with the same flags; 1: look for no others"
    )
    group.add_argument(
        "--process-id", type=int, metavar="I", help="which of them this is; 0 prints and writes"
    )


def check_host_flags(args: Any) -> None:
    """Raise MarsError for several processes and no mesh that divides the work."""
    for name in HOSTS if args.mesh is None else ():
        if getattr(args, name) is not None:
            raise MarsError(
                f"--{name.replace('_', '-')} does not apply without --mesh, over which several processes divide the "
                "work: add it."
            )
