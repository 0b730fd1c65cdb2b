"""The kernels compile for real TPUs and read the logits once. Nothing is executed; libtpu suffices."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

pytest.importorskip(
    "libtpu", reason="TPU compilation needs libtpu: pip install 'mars-jax[test]' on Linux x86-64"
)

from kernels_pallas import margin_stats, sharded_margin_stats
from tests.helpers import slow_but
from tests.tpu import aot, kernel_cases

ALL = list(kernel_cases.kernel_cases())
FAST = (kernel_cases.Case("margin_accept", 151936, "tree-batch", "float32", True), "v5e")


@pytest.mark.parametrize(("case", "generation"), slow_but(ALL, FAST), ids=str)
def test_a_kernel_compiles_at_every_named_shape_and_reads_the_logits_once(case, generation):
    report = kernel_cases.compile_kernel(case, generation)
    assert report["mosaic_kernels"] == 1 and not report["collectives"]
    assert aot.held_bytes(report) < aot.hbm_bytes(generation)
    assert report["arrays_of_logits"] <= kernel_cases.legal_arrays(report)
    if generation in ("v5e", "v6e") and case.draft.endswith("tree-batch"):
        assert report["added_bytes"] <= kernel_cases.one_read(report)


def logits_of(vocab, on, spec=None):
    """Return the abstract arguments of `unembed`: hidden states and weights."""
    hidden, weight = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 8, 128), (128, vocab)))
    return (aot.abstract(hidden, on), aot.abstract(weight, on, spec))


def unembed(hidden, weight):
    return jnp.einsum("bne,ev->bnv", hidden, weight, preferred_element_type=jnp.float32)


def test_spread_over_four_chips_each_runs_the_kernel_and_one_collective_joins_them():
    on = aot.mesh("v5e", devices=4)
    stats = functools.partial(sharded_margin_stats, mesh=on, axis="model", logsumexp=True)
    report = aot.compile_for(lambda h, w: stats(unembed(h, w)), *logits_of(128256, on, P(None, "model")))
    assert report["mosaic_kernels"] == 1
    assert sum(report["collectives"].values()) == 1


def test_where_xla_partitions_the_default_gathers_a_few_numbers_per_node():
    on = aot.mesh("v5e", devices=4)
    report = aot.compile_for(
        lambda h, w: margin_stats(unembed(h, w)), *logits_of(128256, on, P(None, "model"))
    )
    assert report["mosaic_kernels"] == 0
    sizes = [int(n) for name in report["collectives"] for n in re.findall(r"\d+(?=[,\]])", name)]
    assert max(sizes) <= 8
