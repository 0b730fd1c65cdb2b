"""The checkpoints and the command line of tests/cli."""

from tests.cli.conftest import _no_heartbeat, draft, eagle, run, target  # noqa: F401
