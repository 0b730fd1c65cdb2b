"""`python -m mars_jax.lm_eval`: the command line of lm-evaluation-harness, with `--model mars_jax` in it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mars_jax.cli.program import program


def main() -> int:
    """The harness's own command line; returns the exit code."""

    def run(argv: Sequence[str] | None, out: Any) -> None:
        from lm_eval.__main__ import cli_evaluate

        from mars_jax.cli import harness  # noqa: F401  # enters the model into the harness's registry

        sys.stdout = out  # the harness prints its tables there
        cli_evaluate()

    return program(run, None)
