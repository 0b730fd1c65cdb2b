"""The whole decode loop compiles for real TPUs, alone and over four chips."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "libtpu", reason="TPU compilation needs libtpu: pip install 'mars-jax[test]' on Linux x86-64"
)

from tests.tpu import decode_cases

PLACES = pytest.mark.parametrize(("generation", "chips"), [("v6e", 1), ("v5e", 4)])


@PLACES
def test_the_autoregressive_loop_of_two_layers_compiles(generation, chips):
    report = decode_cases.compile_step(decode_cases.CASES[0], generation, chips, layers=2)
    assert report["hbm_share"] < 1
    assert bool(report["collectives"]) == (chips > 1)


@pytest.mark.slow
@PLACES
@pytest.mark.parametrize("case", decode_cases.CASES[1:], ids=lambda case: case.name)
def test_the_loop_with_a_draft_of_two_layers_compiles(case, generation, chips):
    report = decode_cases.compile_step(case, generation, chips, layers=2)
    assert report["hbm_share"] < 1
    # The verifier runs the kernel, over four chips each on its part of the vocabulary.
    assert report["mosaic_kernels"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", decode_cases.EAGLE_CASES, ids=lambda case: case.name)
def test_the_loop_with_an_eagle_head_and_a_dynamic_tree_compiles(case):
    report = decode_cases.compile_eagle(case, layers=4)
    assert report["hbm_share"] < 1
    assert report["collectives"]
