"""Test of `MarsRollout` in a real RLCluster: GRPO has the losses of Tunix's rollout on the same tokens."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_grpo_in_a_real_cluster_has_the_losses_of_tunix(tmp_path):
    # Not `importorskip`: the import takes seconds and emits warnings.
    if importlib.util.find_spec("tunix") is None:
        pytest.skip("could not import 'tunix': pip install google-tunix")
    file = tmp_path / "comparison.json"
    argv = [sys.executable, "-m", "tests.integrations.grpo", "2", str(file)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    run = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    comparison = json.loads(file.read_text())
    assert len(comparison["losses with MarsRollout"]) >= 3
    assert comparison["largest difference of losses"] < 1e-4
    assert comparison["largest difference of trained weights"] < 1e-3
    assert comparison["largest difference of per-token log-probabilities"] < 1e-2
    assert comparison["log-probabilities of samples are numbers"]
