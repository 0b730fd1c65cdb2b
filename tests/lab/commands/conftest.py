"""Checkpoint and command-line fixtures of tests/cli."""

from tests.cli.conftest import _no_heartbeat, draft, eagle, run, target  # noqa: F401
