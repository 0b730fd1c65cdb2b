"""Damaged and hostile input of every kind: success or one sentence, in seconds, with nothing half-written.

A share of the cases, always the same ones, runs with the fast tests; all of them, 20,000 and more, with the slow ones.
MARS_JAX_FUZZ_SEED=7 tries others. A fault that is found gets a test of its own beside the code that was mended.
"""

from __future__ import annotations

import pytest

from tests.fuzz import checkpoints, gguf_files, prompts, settings, texts
from tests.fuzz.harness import run

SURFACES = prompts.SURFACES | settings.SURFACES | checkpoints.SURFACES | gguf_files.SURFACES | texts.SURFACES
SHARE = 12
"""Cases of a surface in the fast suite."""


@pytest.mark.parametrize("name", SURFACES)
def test_a_share_of_the_cases(name, tmp_path):
    run(SURFACES[name], tmp_path, SHARE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SURFACES)
def test_all_cases(name, tmp_path):
    surface = SURFACES[name]
    tally = run(surface, tmp_path, surface.count)
    assert tally.total() >= surface.count
    # Strategies that break everything, or nothing, would find little.
    assert min(tally["accepted"], tally["refused"]) >= surface.count / 100, tally
