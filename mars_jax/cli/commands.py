"""The commands, keyed by name, and functions that run a command or return its parser."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import IO

from mars_jax.cli.program import Parser, program
from mars_jax.utils.errors import MarsError, did_you_mean
from mars_jax.utils.version import __version__

COMMANDS = {
    "generate": "continue prompts by speculative decoding",
    "benchmark": "measure a pair of models: speed, acceptance and quality, with controls",
    "calibrate": "choose theta from held-out prompts, with a bound on its risk",
    "distill": "train a draft model, or EAGLE or Medusa heads, for a target",
    "models": "list the models that have a short name, and which of them are on this machine",
    "pairs": "list the drafts that can be used with a model",
    "convert": "convert a checkpoint to another dtype, such as int8 or int4",
    "plan": "compile a decode step for TPU slices ahead of time, without a TPU",
    "check": "check kernels, tokens and speed on the device of this machine",
    "lm_eval": "run lm-evaluation-harness with drafts and rules",
}
_HOME = {
    "generate": "mars_jax.cli.generate.command",
    "convert": "mars_jax.cli.convert",
    "models": "mars_jax.cli.model_list",
    "pairs": "mars_jax.cli.pairs",
    "check": "mars_jax.lab.commands.check.device_check",
    "lm_eval": "mars_jax.integrations.lm_eval",
    **{name: f"mars_jax.lab.commands.{name}" for name in ("benchmark", "calibrate", "distill", "plan")},
}
"""Module of each command, as a string, so that the library does not import `lab`."""


def parser_of(name: str) -> Parser | None:
    """Return the parser of a command; None for lm_eval, whose flags belong to the harness.

    >>> parser_of("plan").prog
    'mars-jax plan'
    """
    if name == "lm_eval":
        return None
    return importlib.import_module(_HOME[name]).parser()


def main(argv: Sequence[str]) -> int:
    """Run one command, and return its exit code. Without a name, list the commands."""
    if not argv or argv[0] not in COMMANDS:
        return program(_answer, argv)
    return importlib.import_module(_HOME[argv[0]]).main(argv[1:])


def _answer(argv: Sequence[str], out: IO[str]) -> None:
    """Print the help or the version of `mars-jax`, or raise MarsError for an unknown command."""
    name, *_ = argv or ["--help"]
    if name in ("-h", "--help"):
        print("usage: mars-jax COMMAND [flags]; each command explains its flags with --help\n", file=out)
        for command, summary in COMMANDS.items():
            print(f"  {command:<12} {summary}", file=out)
    elif name == "--version":
        print(f"mars-jax {__version__}", file=out)
    else:
        suggestion = did_you_mean(name, COMMANDS)
        raise MarsError(f"there is no command '{name}'{suggestion}: choose one of {', '.join(COMMANDS)}.")
