"""Damaged and hostile input of every kind: calls succeed or fail with one sentence, in seconds, without partial output.

MARS_JAX_FUZZ_SEED=7 tries other cases. Each fault that fuzzing finds gets its own test next to the fixed code.
"""

import pytest

from tests.fuzz import checkpoints, gguf_files, prompts, settings, texts
from tests.fuzz.harness import run

SURFACES = prompts.SURFACES | settings.SURFACES | checkpoints.SURFACES | gguf_files.SURFACES | texts.SURFACES
SHARE = 12
"""Cases of each surface in the fast suite."""


@pytest.mark.parametrize("name", SURFACES)
def test_a_share_of_the_cases(name, tmp_path):
    run(SURFACES[name], tmp_path, SHARE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SURFACES)
def test_all_cases(name, tmp_path):
    surface = SURFACES[name]
    tally = run(surface, tmp_path, surface.count)
    assert tally.total() >= surface.count
    # A strategy that produces only broken or only valid input would find little.
    assert min(tally["accepted"], tally["refused"]) >= surface.count / 100, tally
