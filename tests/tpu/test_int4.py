"""4-bit products compiled for TPUs: one kernel reads the matrix in place."""

import functools
import itertools
import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

pytest.importorskip(
    "libtpu", reason="TPU compilation needs libtpu: pip install 'mars-jax[test]' on Linux x86-64"
)

from mars_jax.core.axes import by_rows
from mars_jax.core.types import Visible
from mars_jax.models import ModelConfig, language_model
from mars_jax.models.layers import dense
from mars_jax.models.quantize import Int4
from mars_jax.models.shardings import abstract_params, params_shardings
from tests.helpers import slow_but
from tests.tpu import aot

SHAPES = [(4096, 14336), (13824, 5120)]
"""Inputs and outputs of matrices of Llama-3.1-8B and Vicuna-13B; the latter's inputs are no multiple of 2,048."""


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
    # The rows, their intermediate results, and the prefetched scales.
    assert report["temporary_bytes"] < shape[0] * shape[1] / 4


def test_on_four_chips_each_multiplies_by_its_part_and_no_matrix_travels():
    config = ModelConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_layers=1, num_heads=4, head_dim=128
    )
    rows, on = 8, aot.mesh("v5e", devices=4)
    model = language_model(config, dtype="bfloat16", attention="xla")
    params = abstract_params(config, "bfloat16", bits=4, shardings=params_shardings(config, on))
    tokens, start = (jax.ShapeDtypeStruct(shape, "int32") for shape in ((1, rows), (1,)))
    cache = jax.eval_shape(lambda: model.init_cache(1, 128))

    def forward(params, tokens, start, cache):
        return model.forward(params, tokens, Visible.causal(start, rows), cache).hidden

    with jax.set_mesh(on):
        operands = [aot.abstract(x, on) for x in (tokens, start, cache)]
        report = aot.compile_for(by_rows(forward), params, *operands)
    assert report["mosaic_kernels"] == 7
    # The sums after `o` and after `down`. The other collectives belong to the embeddings, which are in 8 bits.
    collectives = report["collectives"]
    assert collectives.pop("all-reduce bf16[8,512]") == 2
    assert all(re.fullmatch(r"all-reduce (f32\[8\]|u32\[2,512\])", name) for name in collectives)


def test_a_matrix_without_a_named_sharding_is_left_to_xla():
    report = compiled(8, 128, SHAPES[0], aot.mesh("v5e", devices=4), "model")
    assert report["mosaic_kernels"] == 0
