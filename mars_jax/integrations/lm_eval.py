"""`mars-jax lm_eval`: the command line of lm-evaluation-harness, with `--model mars_jax` in it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mars_jax import __version__
from mars_jax.cli.program import program


def main(argv: Sequence[str] | None = None) -> int:
    """The harness's own command line; returns the exit code."""

    def run(argv: Sequence[str] | None, out: Any) -> None:
        given = list(sys.argv[1:] if argv is None else argv)
        if given == ["--version"]:
            print(f"mars-jax {__version__}", file=out)
            return

        from mars_jax.integrations import harness  # noqa: F401  # enters the model into the harness's registry

        from lm_eval.__main__ import cli_evaluate  # isort: skip  # after ours, which says where it is missing

        sys.argv = [sys.argv[0], *given]  # the only place where the harness looks
        sys.stdout = out  # the harness prints its tables there
        cli_evaluate()

    return program(run, argv)
