"""`mars-jax lm_eval`: the command line of lm-evaluation-harness, with `--model mars_jax` in it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from mars_jax import __version__
from mars_jax.cli.program import program

_HELP = """\
usage: mars-jax lm_eval --model mars_jax --model_args NAME=VALUE,... [flags]

Run lm-evaluation-harness with a draft and a rule. The flags are the harness's:
install mars-jax[lm-eval], and --help lists them. --model_args takes flags of
mars-jax generate by their names: target, draft, verify, theta and others.

example:
  mars-jax lm_eval --model mars_jax --tasks gsm8k --limit 100 \\
      --model_args target=PATH,draft=model:SMALL,verify=mars,theta=0.9
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The harness's own command line; returns the exit code."""

    def run(argv: Sequence[str] | None, out: Any) -> None:
        given = list(sys.argv[1:] if argv is None else argv)
        if given == ["--version"]:
            print(f"mars-jax {__version__}", file=out)
            return
        if given in (["--help"], ["-h"]) and importlib.util.find_spec("lm_eval") is None:
            print(_HELP, end="", file=out)
            return

        from mars_jax.integrations import harness  # noqa: F401  # enters the model into the harness's registry

        from lm_eval.__main__ import cli_evaluate  # isort: skip  # after ours, which says where it is missing

        sys.argv = [sys.argv[0], *given]  # the only place where the harness looks
        sys.stdout = out  # the harness prints its tables there
        cli_evaluate()

    return program(run, argv)
