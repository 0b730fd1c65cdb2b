"""Experts multiply their own rows in every form. Oracles are formulas in NumPy; test_families has PyTorch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.experts import mosaic as kernels
from kernels_pallas.experts import xla as experts_xla
from mars_jax.models import ModelConfig, moe
from mars_jax.models.quantize import Int8, Mxfp4, quantize
from mars_jax.utils.errors import MarsError
from tests.helpers import normal, slow_but
from tests.helpers.small_models import SIZES as SMALL


def by_definition(x, w, sizes):
    """Multiply row r by the matrix of the expert whose rows include r, in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return np.asarray([w[e] @ row for row, e in zip(x, owners, strict=True)]).reshape(-1, w.shape[1])


def megablox(*args):
    with pltpu.force_tpu_interpret_mode():
        return moe._gmm(*args)


FORMS = {"blocks": moe._blocks, "ragged": experts_xla.ragged_product, "megablox": megablox}
SIZES = {
    "one row": (0, 1, 0, 0, 0),
    "one expert has all": (0, 0, 9, 0, 0),
    "an expert without rows at each end": (0, 3, 1, 5, 0),
    "blocks of 2, part filled": (3, 1, 0, 0, 4),
    "blocks of 32, part filled": (70, 0, 33, 5, 100),
}
BLOCKS_OF_32 = "blocks of 32, part filled"
WIDER = {"no row": ((0, 0), 5, 6, 7), "rest in each direction": ((100, 0, 60), 180, 1030, 1040)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], "float32"))
def test_every_form_multiplies_rows_by_the_matrix_of_their_expert(form, case, dtype):
    sizes = SIZES[case]
    x, w = normal(0, sum(sizes), 7, dtype=dtype), normal(1, len(sizes), 6, 7, dtype=dtype)
    out = jax.jit(FORMS[form])(x, w, jnp.asarray(sizes, jnp.int32))
    # 1e-5: float32 sums of 7 products; products of bfloat16 factors are exact.
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, by_definition(x, w, sizes), atol=1e-5)


@pytest.mark.parametrize("case", WIDER)
def test_a_tpu_multiplies_in_tiles_rows_that_may_be_of_experts_elsewhere(case):
    sizes, rows, outer, inner = WIDER[case]
    x, w = normal(0, rows, inner), normal(1, len(sizes), outer, inner)
    out = jax.jit(megablox)(x, w, jnp.asarray(sizes, jnp.int32))
    assert out.shape == (rows, outer)
    count = sum(sizes)
    # 3e-4: float32 sums of 1,040 products, of standard deviation 32.
    np.testing.assert_allclose(out[:count], by_definition(x[:count], w, sizes), atol=3e-4)


@pytest.mark.parametrize("case", slow_but([*SIZES, *WIDER, "by columns"], BLOCKS_OF_32, *WIDER, "by columns"))
@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], "bfloat16"))
def test_the_kernel_of_8_bits_multiplies_what_it_dequantises(case, dtype, monkeypatch):
    wider = WIDER | {"by columns": ((20, 0, 30), 50, 384, 40)}
    sizes, rows, outer, inner = wider.get(case) or (SIZES[case], sum(SIZES[case]), 300, 40)
    # Several blocks of outputs, and tiles of rows that begin inside an expert's rows.
    monkeypatch.setattr(kernels, "WEIGHT_BYTES", 128 * inner)
    monkeypatch.setattr(kernels, "ROWS", 32)
    w, x = quantize(np.asarray(normal(1, len(sizes), outer, inner))), normal(0, rows, inner, dtype=dtype)
    operands = (x, jnp.asarray(w.values), jnp.asarray(w.scale), jnp.asarray(sizes, jnp.int32))
    out = jax.jit(functools.partial(kernels.dense_by_expert_int8, interpret=True))(*operands)
    assert out.shape == (rows, outer) and out.dtype == jnp.float32
    count = sum(sizes)
    wide = by_definition(x[:count], w.values.astype("float64") * w.scale[..., None], sizes)
    np.testing.assert_allclose(out[:count], wide, atol=5e-4)  # as in the test above


def mxfp4(seed, *shape):
    """Return random matrices [X, out, in] in MXFP4."""
    draw, (*rows, inner) = np.random.default_rng(seed), shape
    values = draw.integers(0, 256, (*rows, inner // 2), np.uint8)
    scale = draw.integers(124, 129, (*rows, inner // 32), np.uint8)
    return Mxfp4(*jax.device_put((values, scale)), dtype=jnp.dtype("bfloat16"))


@jax.jit
def dequantised(w):
    return w.astype("float32")


@pytest.mark.parametrize("case", slow_but(SIZES, BLOCKS_OF_32))
@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("form", ["blocks", "ragged", "kernel"])
def test_experts_in_mxfp4_multiply_as_their_dequantised_matrices(form, case, dtype, monkeypatch):
    # Several blocks of outputs, and tiles of rows that begin inside an expert's rows.
    monkeypatch.setattr(kernels, "MXFP4_WIDTH", 128)
    monkeypatch.setattr(kernels, "ROWS", 32)
    sizes = SIZES[case]
    x, w = normal(0, sum(sizes), 96, dtype=dtype), mxfp4(1, len(sizes), 150, 96)
    operands = (x, w.values, w.scale, jnp.asarray(sizes, jnp.int32))
    if form == "blocks":
        out = jax.jit(moe.dense_by_expert)(x, w, operands[-1])
    elif form == "ragged":
        out = jax.jit(experts_xla.dense_by_expert_mxfp4)(*operands)
    else:
        out = jax.jit(functools.partial(kernels.dense_by_expert_mxfp4, interpret=True))(*operands)
    # 1e-3: float32 sums of 96 products of numbers up to 24.
    np.testing.assert_allclose(out, by_definition(x, dequantised(w), sizes), atol=1e-3)


def test_gradients_are_those_of_the_definition():
    sizes = jnp.asarray([2, 0, 3], jnp.int32)
    x, w, owner = normal(0, 5, 7), normal(1, 3, 6, 7), jnp.asarray([0, 0, 2, 2, 2])

    def loss(form):
        return lambda x, w: jnp.sum(jnp.sin(form(x, w)))

    definition = loss(lambda x, w: jnp.einsum("ri,roi->ro", x, w[owner]))
    expected = jax.jit(jax.grad(definition, argnums=(0, 1)))(x, w)
    for form in (moe.dense_by_expert, experts_xla.ragged_product, moe._megablox):
        actual = jax.jit(jax.grad(loss(functools.partial(form, sizes=sizes)), argnums=(0, 1)))(x, w)
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_gradient_of_rows_of_experts_in_mxfp4_is_that_of_the_dequantised_matrices():
    sizes, x, w = jnp.asarray([2, 0, 3], jnp.int32), normal(0, 5, 32), mxfp4(1, 3, 6, 32)

    @jax.jit
    def gradient(w):
        return jax.grad(lambda x: jnp.sum(jnp.sin(moe.dense_by_expert(x, w, sizes))))(x)

    np.testing.assert_allclose(gradient(w), gradient(dequantised(w)), atol=1e-4)


def layer(experts=5, hidden=8, inner=6):
    shapes = {"router": (experts, hidden), "expert_gate": (experts, inner, hidden)}
    shapes |= {"expert_up": (experts, inner, hidden), "expert_down": (experts, hidden, inner)}
    return {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_token_gets_its_likeliest_experts_by_their_probabilities(count, normalize):
    p, x = layer(), normal(9, 2, 3, 8)
    wide = {name: np.asarray(value, np.float64) for name, value in p.items()}
    expected = np.zeros(x.shape)
    for b, n in np.ndindex(2, 3):
        token = np.asarray(x[b, n], np.float64)
        probability = np.exp(wide["router"] @ token)
        probability /= probability.sum()
        top = np.argsort(-probability)[:count]
        share = probability[top] / (probability[top].sum() if normalize else 1.0)
        for e, weight in zip(top, share, strict=True):
            gate, up = wide["expert_gate"][e] @ token, wide["expert_up"][e] @ token
            expected[b, n] += weight * (wide["expert_down"][e] @ (gate / (1 + np.exp(-gate)) * up))
    actual = jax.jit(lambda p, x: moe.experts_mlp(p, x, "silu", count=count, normalize=normalize))(p, x)
    # 1e-4: products of four random numbers each, of size up to a hundred.
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_a_broken_row_breaks_no_other():
    x = normal(9, 1, 6, 8)
    mlp = jax.jit(functools.partial(moe.experts_mlp, activation="silu", count=2, normalize=True))
    clean, broken = mlp(layer(), x), mlp(layer(), x.at[0, 2].set(jnp.nan))
    intact = np.asarray([0, 1, 3, 4, 5])
    np.testing.assert_allclose(broken[0, intact], clean[0, intact], atol=1e-6)
    assert np.isnan(broken[0, 2]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mxfp4"])
def test_on_cpu_the_weights_are_read_where_they_are(dtype):
    if dtype == "mxfp4":
        w, dtype = jax.eval_shape(lambda: mxfp4(0, 16, 256, 256)), "bfloat16"
    else:
        w = jax.ShapeDtypeStruct((16, 256, 256), dtype)
    x, sizes = jax.ShapeDtypeStruct((4, 256), dtype), jax.ShapeDtypeStruct((16,), jnp.int32)
    memory = jax.jit(moe.dense_by_expert).lower(x, w, sizes).compile().memory_analysis()
    # At most one expert's matrix is copied or widened to float32, not all 16.
    assert memory.temp_size_in_bytes < 2 * 256 * 256 * 4


def lowered(platform, experts):
    operands = (jax.ShapeDtypeStruct((4, 32), "float32"), experts, jax.ShapeDtypeStruct((3,), "int32"))
    return jax.jit(moe.dense_by_expert).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def test_elsewhere_the_compiler_gets_one_ragged_product_and_on_a_tpu_one_kernel():
    of_8_bits = (jax.ShapeDtypeStruct((3, 8, 32), "int8"), jax.ShapeDtypeStruct((3, 8), "float32"), "float32")
    of_4_bits = (
        jax.ShapeDtypeStruct((3, 8, 16), "uint8"),
        jax.ShapeDtypeStruct((3, 8, 1), "uint8"),
        "float32",
    )
    for matrices in (jax.ShapeDtypeStruct((3, 8, 32), "float32"), Int8(*of_8_bits), Mxfp4(*of_4_bits)):
        text = lowered("cuda", matrices)
        assert text.count("ragged_dot") and "while" not in text
        text = lowered("tpu", matrices)
        assert text.count("tpu_custom_call") == 1 and "ragged_dot" not in text


@pytest.mark.parametrize("count", [0, 6])
def test_more_experts_for_a_token_than_there_are_is_refused(count):
    with pytest.raises(MarsError, match=f"experts_per_token is {count}: a token takes at least 1 of the 5"):
        ModelConfig(num_layers=2, num_experts=5, experts_per_token=count, **SMALL)
