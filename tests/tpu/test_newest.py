"""Each kernel for current TPU generations, with the installed libtpu; `.ci/run newest` installs the newest."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "libtpu", reason="TPU compilation needs libtpu: pip install 'mars-jax[test]' on Linux x86-64"
)

from tests.tpu import attention_cases, kernel_cases

pytestmark = pytest.mark.slow
GENERATIONS = ["v5e", "v6e", "tpu7x"]
KERNELS = [
    kernel_cases.Case("margin_stats", 32000, "autoregressive-batch", "float32", True),
    kernel_cases.Case("margin_accept", 151936, "tree-batch", "float32", True),
]


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("case", KERNELS, ids=kernel_cases.name)
def test_the_kernels_of_acceptance_compile(case, generation):
    report = kernel_cases.compile_kernel(case, generation)
    assert report["mosaic_kernels"] == 1 and not report["collectives"]
    assert report["arrays_of_logits"] <= kernel_cases.legal_arrays(report)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_kernel_of_attention_compiles(generation):
    report = attention_cases.compile_case(attention_cases.SOME[0], generation)
    assert report["mosaic_kernels"] == 1 and not report["collectives"]
