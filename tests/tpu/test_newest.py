"""Each kernel for current TPU generations, with the installed libtpu; `.ci/run newest` installs the newest."""

import pytest

pytest.importorskip(
    "libtpu", reason="TPU compilation needs libtpu: pip install 'mars-jax[test]' on Linux x86-64"
)

from tests.tpu import attention_cases, kernel_cases
from tests.tpu.attention_cases import compile_case
from tests.tpu.kernel_cases import Case, compile_kernel


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize(
    ("compiling", "case"),
    [
        (compile_kernel, Case("margin_stats", 32000, "autoregressive-batch", "float32", True)),
        (compile_kernel, Case("margin_accept", 151936, "tree-batch", "float32", True)),
        (compile_case, attention_cases.SOME[0]),
    ],
)
def test_every_kernel_compiles(compiling, case, generation):
    report = compiling(case, generation)
    assert report["mosaic_kernels"] == 1 and not report["collectives"]
    if compiling is compile_kernel:
        assert report["arrays_of_logits"] <= kernel_cases.legal_arrays(report)
