"""`mars-jax lm_eval`: the command line of lm-evaluation-harness, with the model `mars_jax`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import IO

from mars_jax.cli.flags import PART_HELP
from mars_jax.cli.program import Parser, program
from mars_jax.utils.errors import MarsError
from mars_jax.utils.version import __version__

_DESCRIPTION = """\
Run lm-evaluation-harness with a draft and a rule. With --model mars_jax, --model_args accepts flags of
mars-jax generate by their names, such as target=PATH,draft=model:SMALL,verify=mars,theta=0.9.
"""


def main(argv: Sequence[str]) -> int:
    """Run the harness's command line, and return the exit code."""

    def run(argv: Sequence[str], out: IO[str]) -> None:
        harness_args = list(argv)
        if harness_args == ["--version"]:
            print(f"mars-jax {__version__}", file=out)
            return
        parser = Parser(prog="mars-jax lm_eval", description=_DESCRIPTION, add_help=False)
        rows_help = "keep the answers in this file; a run with the same flags answers only missing requests"
        parser.add_argument("--rows", metavar="FILE", help=rows_help)
        parser.add_argument(
            "--part", metavar="I/N", help=PART_HELP.replace("decode only rows", "answer only requests")
        )
        if "-h" in harness_args or "--help" in harness_args:
            print(f"{parser.format_help()}\nand the flags of lm-evaluation-harness:\n", file=out)
        # The harness parses the remaining arguments.
        settings, harness_args = argparse.ArgumentParser.parse_known_args(parser, harness_args)
        if settings := {name: value for name, value in vars(settings).items() if value is not None}:
            if any(flag in ("-C", "--config") or flag.startswith("--config=") for flag in harness_args):
                raise MarsError(
                    f"--{next(iter(settings))} does not apply with --config: put it among its model_args."
                )
            harness_args += ["--model_args", json.dumps(settings)]  # the harness merges repeated --model_args

        # The import registers the model with the harness.
        from mars_jax.integrations.harness import Answered

        from lm_eval.__main__ import cli_evaluate  # isort: skip  # our module comes first: its error explains the fix

        sys.argv = [sys.argv[0], *harness_args]  # the harness parses its arguments from here
        sys.stdout = out  # the harness prints its tables there
        try:
            cli_evaluate()
        except Answered as part:
            print(part, file=out)

    return program(run, argv)
