"""Mixture of experts compiled for TPUs: the kernel reads the experts in place."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

pytest.importorskip(
    "libtpu", reason="TPU compilation needs libtpu: pip install 'mars-jax[test]' on Linux x86-64"
)

from mars_jax.models.moe import dense_by_expert
from mars_jax.models.quantize import Int8, Mxfp4
from tests.helpers import slow_but
from tests.tpu import aot

EXPERTS, OUTER, INNER = 16, 1536, 4096


GENERATIONS = ("v5e", "v5p", "v6e")


@pytest.mark.parametrize(
    ("rows", "generation"), slow_but(itertools.product([8, 488], GENERATIONS), (8, "v5e"), (488, "v6e"))
)
def test_no_expert_is_copied(generation, rows):
    report = compiled(jax.ShapeDtypeStruct((EXPERTS, OUTER, INNER), "bfloat16"), rows, generation)
    assert report["mosaic_kernels"] == 1
    # Only rows are padded and copied, and not even one of the 16 matrices.
    assert report["temporary_bytes"] < OUTER * INNER * 2


@pytest.mark.parametrize(
    ("rows", "outer", "inner", "generation"),
    slow_but(
        [(*shape, g) for shape in [(24, OUTER, INNER), (488, OUTER, INNER), (488, INNER, 192)] for g in GENERATIONS],
        (24, OUTER, INNER, "v5e"), (488, INNER, 192, "v6e"),
    ),
)  # fmt: skip
def test_in_8_bits_no_expert_is_copied_either(rows, outer, inner, generation):
    """The last case has the experts of Qwen3-235B on four chips, with their hidden units divided."""
    values = jax.ShapeDtypeStruct((64, outer, inner), "int8")
    w = Int8(values, jax.ShapeDtypeStruct((64, outer), "float32"), "bfloat16")
    report = compiled(w, rows, generation)
    assert report["mosaic_kernels"] == 1
    # The padded rows and their products in float32.
    assert report["temporary_bytes"] < 2 * 512 * (2 * inner + 4 * outer) < values.size


@pytest.mark.parametrize(
    ("rows", "generation"), slow_but(itertools.product([16, 488], GENERATIONS), (16, "v5e"), (488, "v6e"))
)
def test_in_mxfp4_only_scales_are_copied(rows, generation):
    """The shapes are those of gpt-oss."""
    w = Mxfp4(
        jax.ShapeDtypeStruct((16, 2880, 1440), "uint8"),
        jax.ShapeDtypeStruct((16, 2880, 90), "uint8"),
        "bfloat16",
    )
    report = compiled(w, rows, generation)
    assert report["mosaic_kernels"] == 1
    assert report["temporary_bytes"] < 2 * 512 * (2 * 2880 + 4 * 2880) + 2 * w.scale.size < w.values.size


def test_where_xla_divides_the_work_it_gets_the_ragged_product():
    on = aot.mesh("v5e", devices=4)
    w = aot.abstract(jax.ShapeDtypeStruct((EXPERTS, OUTER, INNER), "bfloat16"), on, P(None, "model"))
    x = aot.abstract(jax.ShapeDtypeStruct((8, INNER), "bfloat16"), on)
    sizes = aot.abstract(jax.ShapeDtypeStruct((EXPERTS,), "int32"), on)
    report = aot.compile_for(dense_by_expert, x, w, sizes)
    assert report["argument_bytes"] < EXPERTS * OUTER * INNER  # 2 bytes each, over 4 chips


def compiled(w, rows, generation):
    x = jax.ShapeDtypeStruct((rows, w.shape[-1]), "bfloat16")
    sizes = jax.ShapeDtypeStruct(w.shape[:1], jnp.int32)
    return aot.compile_for(dense_by_expert, *aot.abstract((x, w, sizes), aot.mesh(generation)))
