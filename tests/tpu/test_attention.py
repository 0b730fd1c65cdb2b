"""The attention kernel compiles for real TPUs within their fast memory, without a copy of the cache."""

import pytest

pytest.importorskip(
    "libtpu", reason="TPU compilation needs libtpu: pip install 'mars-jax[test]' on Linux x86-64"
)

from tests.helpers import slow_but
from tests.tpu import attention_cases

SOME = attention_cases.SOME
CASES = [*((case, "v5e") for case in SOME), *attention_cases.ALL]


@pytest.mark.parametrize(("case", "generation"), slow_but(CASES, *CASES[:2]), ids=str)
def test_the_kernel_compiles_and_copies_no_cache(case, generation):
    report = attention_cases.compile_case(case, generation)
    assert report["mosaic_kernels"] == 1 and not report["collectives"]
    if attention_cases.HEADS[case.heads].kv_heads > 1:
        # A single narrow head is stored with the rows of a batch in one tile as an argument, but not in a loop.
        assert report["arrays_of_logits"] == 0 and report["temporary_bytes"] < report["cache_bytes"] / 2


@pytest.mark.parametrize("case", slow_but([case for case in SOME if case.dtype != "int8"], SOME[0]), ids=str)
def test_new_rows_are_written_in_place(case):
    report = attention_cases.compile_case(case, "v5e", writes=True)
    assert report["mosaic_kernels"] == 1 and not report["collectives"]
    assert report["temporary_bytes"] < report["cache_bytes"] / 2
    assert report["aliased_bytes"] >= report["cache_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "batch"), [("pallas", 8), ("xla", 4), ("xla", 1)])
def test_scales_have_their_slots_in_the_lanes_all_the_time(form, batch):
    """Heads in the lanes would be padded to 128: half as many bytes as the values, copied in every step."""
    assert attention_cases.layouts_of_scales(form, batch, "v5e") == {"1,2,0"}
