"""Commands that are killed at random and rerun: same result as an uninterrupted run (scripts/checks/kills.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


# distill gets no interrupt: tests/cli/test_signals.py has that.
SIGNALS = {"generate": "KILL INT", "benchmark": "KILL INT", "convert": "KILL INT", "distill": "KILL"}


@pytest.mark.slow
@pytest.mark.parametrize("command", SIGNALS)
def test_a_command_killed_twice_at_random_ends_as_one_that_was_not(command, tmp_path):
    pytest.importorskip("matplotlib")
    results = tmp_path / "kills.json"
    flags = f"--times 2 --only {command} --signals {SIGNALS[command]} --work {tmp_path / 'work'}"
    argv = [sys.executable, "-m", "scripts.checks.kills", *flags.split(), "--results", str(results)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stderr
    [report] = json.loads(results.read_text())
    assert report["command"] == command and report["kills"] == 2 and report["equal"] == report["runs"] >= 1
