"""Mixture of experts as the TPU compiler sees it: the experts are read where they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip(
    "libtpu", reason="TPU compilation needs libtpu: pip install 'mars-jax[test]' on Linux x86-64"
)

from mars_jax.models.moe import dense_by_expert
from mars_jax.models.quantize import Int8
from tests.tpu import aot

EXPERTS, OUTER, INNER = 16, 1536, 4096


@pytest.mark.parametrize("generation", ["v5e", "v5p", "v6e"])
@pytest.mark.parametrize("rows", [8, 488])
def test_no_expert_is_copied(generation, rows):
    report = compiled(jax.ShapeDtypeStruct((EXPERTS, OUTER, INNER), "bfloat16"), rows, generation)
    assert report["mosaic_kernels"] == 1
    # Rows are padded and copied; of 16 matrices not even one is.
    assert report["temporary_bytes"] < OUTER * INNER * 2


def test_in_8_bits_a_v5e_copies_none_either():
    values = jax.ShapeDtypeStruct((EXPERTS, OUTER, INNER), "int8")
    w = Int8(values, jax.ShapeDtypeStruct((EXPERTS, OUTER), "float32"), "bfloat16")
    assert compiled(w, 488, "v5e")["temporary_bytes"] < OUTER * INNER * 2


def compiled(w, rows, generation):
    x, sizes = jax.ShapeDtypeStruct((rows, INNER), "bfloat16"), jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    return aot.compile_for(dense_by_expert, *aot.abstract((x, w, sizes), aot.mesh(generation)))
