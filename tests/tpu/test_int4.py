"""Products in 4 bits as the TPU compiler sees them: one kernel that reads the matrix where it is stored."""

from __future__ import annotations

import functools
import itertools

import jax
import pytest
from jax.sharding import PartitionSpec as P

pytest.importorskip(
    "libtpu", reason="TPU compilation needs libtpu: pip install 'mars-jax[test]' on Linux x86-64"
)

from mars_jax.models.layers import dense
from mars_jax.models.quantize import Int4
from tests.helpers import slow_but
from tests.tpu import aot

SHAPES = [(4096, 14336), (13824, 5120)]
"""Inputs and outputs: of Llama-3.1-8B, and of Vicuna-13B, whose inputs are no multiple of 2,048."""


def compiled(rows, size, shape, on, spec=None):
    inputs, outputs = shape
    groups = inputs // size
    placed = functools.partial(aot.abstract, on=on)
    values = placed(jax.ShapeDtypeStruct((groups, size, outputs), "int4"), spec=P(None, None, spec))
    scale, offset = (
        placed(jax.ShapeDtypeStruct((groups, outputs), dtype), spec=P(None, spec))
        for dtype in ("float16", "float32")
    )
    w = Int4(values=values, scale=scale, offset=offset, dtype="bfloat16")
    x = aot.abstract(jax.ShapeDtypeStruct((rows, inputs), "bfloat16"), on)
    with jax.set_mesh(on):
        return aot.compile_for(dense, x, w)


@pytest.mark.parametrize(
    ("shape", "rows", "size", "generation"),
    slow_but(
        list(itertools.product(SHAPES, [1, 60], [128, 64, 32], aot.TOPOLOGIES)),
        (SHAPES[0], 60, 32, "v5e"), (SHAPES[1], 1, 128, "v6e"),
    ),
)  # fmt: skip
def test_a_product_is_one_kernel_and_copies_no_matrix(shape, rows, size, generation):
    report = compiled(rows, size, shape, aot.mesh(generation))
    assert report["mosaic_kernels"] == 1
    # Rows, what is made of them, and scales, which are moved ahead.
    assert report["temporary_bytes"] < shape[0] * shape[1] / 4


def test_a_matrix_that_a_mesh_divides_is_left_to_xla():
    report = compiled(8, 128, SHAPES[0], aot.mesh("v5e", devices=4), "model")
    assert report["mosaic_kernels"] == 0
