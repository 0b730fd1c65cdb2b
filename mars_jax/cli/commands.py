"""The commands by name. Nothing here imports jax."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from mars_jax import __version__
from mars_jax.cli.program import BAD_INPUT

COMMANDS = {
    "generate": "continue prompts by speculative decoding",
    "benchmark": "measure a pair of models: speed, acceptance and quality, with controls",
    "calibrate": "choose theta from held-out prompts, with a bound on its risk",
    "compounding": "study what relaxed tokens do to the text after them",
    "distill": "train a draft model, or EAGLE or Medusa heads, for a target",
    "convert": "convert a checkpoint into Orbax arrays, cast or quantised once",
    "plan": "compile a decode step for TPU slices ahead of time, without a TPU",
    "lm_eval": "run lm-evaluation-harness with drafts and rules",
}
_HOME = {"generate": "mars_jax.cli.generate.command"}

USAGE = "usage: mars-jax COMMAND [flags]; each command explains its flags with --help"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Without a name, list them."""
    given = list(sys.argv[1:] if argv is None else argv)
    name = given[0] if given else "--help"
    if name in ("-h", "--help"):
        lines = [USAGE, "", *(f"  {command:<12} {does}" for command, does in COMMANDS.items())]
        print("\n".join(lines))
        return 0
    if name == "--version":
        print(f"mars-jax {__version__}")
        return 0
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"error: there is no command '{name}': choose one of {known}.", file=sys.stderr)
        return BAD_INPUT
    module = importlib.import_module(_HOME.get(name, f"mars_jax.cli.{name}"))
    return module.main(given[1:])
