"""The checkpoints of tests/cli, and its command line."""

from tests.cli.conftest import _no_heartbeat, draft, eagle, run, target  # noqa: F401
