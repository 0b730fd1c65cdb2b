"""Weights in 8 and 4 bits: equal to their dequantised matrices, in every family and in heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.int4 import mosaic
from mars_jax import hub
from mars_jax.core.axes import by_rows, parse_mesh
from mars_jax.core.types import Visible
from mars_jax.models import ModelConfig, eagle_head, language_model, layers
from mars_jax.models.config import Delta, Rope
from mars_jax.models.layers import dense, embed
from mars_jax.models.quantize import Int4, Int8, Quantized, bits_of, quantize, quantize_4
from mars_jax.models.weights import Weight
from tests.helpers import normal
from tests.helpers.small_models import random_weights


def is_quantized(x):
    return isinstance(x, Quantized)


@jax.jit
def dequantized(params):
    return jax.tree.map(lambda x: x.astype(x.dtype) if is_quantized(x) else x, params, is_leaf=is_quantized)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_weight_moves_by_more_than_half_a_step_of_its_channel(dtype):
    w = np.array(normal(0, 6, 5, 33, dtype=dtype))
    w[2, 3] = 0
    packed = quantize(w)
    wide = w.astype(np.float32)
    assert packed.values.dtype == np.int8 and packed.scale.shape == (6, 5) and packed.shape == w.shape
    np.testing.assert_allclose(packed.scale, np.abs(wide).max(-1) / 127, rtol=1e-6)
    error = np.abs(packed.values * packed.scale[..., None] - wide)
    assert np.all(error <= packed.scale[..., None] * 0.5001) and not packed.values[2, 3].any()
    on_device = quantize(jnp.asarray(w))
    np.testing.assert_array_equal(on_device.values, packed.values)


def test_a_channel_that_is_no_number_stays_none():
    packed = quantize(np.asarray([[1.0, np.nan], [np.inf, 1.0], [1.0, 2.0]], np.float32))
    assert np.isfinite(packed.scale).tolist() == [False, False, True]


@pytest.mark.parametrize("rows", [1, 5, 12])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 2**-5)])
def test_products_are_those_of_the_dequantised_matrix(rows, dtype, tolerance):
    x, w = normal(0, rows, 7, dtype=dtype), quantize(normal(1, 5, 7, dtype=dtype))
    wide = np.asarray(w.astype("float32"))
    product = jax.jit(dense)(x, w).astype("float32")
    np.testing.assert_allclose(product, np.asarray(x, np.float32) @ wide.T, atol=tolerance)
    ids = jnp.asarray([[4, -1, 9]], jnp.int32)
    assert embed(w, ids).dtype == dtype
    np.testing.assert_allclose(embed(w, ids)[0].astype("float32"), wide[[4, 0, 4]], rtol=2**-8)


@pytest.mark.parametrize("rows", [1, 2, 6, 70])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_of_8_bits_keeps_23_bits_of_its_input_and_does_not_depend_on_other_rows(rows, dtype):
    draw = np.random.default_rng(0)
    x = draw.standard_normal((rows, 96)) * 10.0 ** draw.integers(-3, 4, (rows, 1))
    x[:, 5] *= 1e4  # an outlier, as in the first token of many models
    values = draw.integers(-127, 128, (45, 96)).astype(np.int8)
    values[:, 5] = 0
    x, w = jnp.asarray(x, dtype), Int8(jnp.asarray(values), jnp.ones((45,), jnp.float32), jnp.dtype(dtype))
    product = jax.jit(lambda x: dense(x, w, dtype=jnp.float32))
    actual, exact = np.asarray(product(x)), np.asarray(x, np.float64) @ values.T.astype(np.float64)
    # Rounding moves an input by at most half a step: the largest input over 127 * 254 * 254.
    step = np.abs(np.asarray(x, np.float64)).max(axis=1, keepdims=True) / (127 * 254**2)
    assert np.all(np.abs(actual - exact) <= 1.5 * step * np.abs(values).sum(axis=1, dtype=np.float64))
    for row in range(min(rows, 6)):
        np.testing.assert_array_equal(product(x[row : row + 1])[0], actual[row])


def test_a_sum_that_could_exceed_int32_is_not_one_of_integers():
    count = layers._LONGEST_SUM + 1
    w = Int8(jnp.full((1, count), 127, jnp.int8), jnp.ones((1,), jnp.float32), jnp.dtype("float32"))
    np.testing.assert_allclose(jax.jit(dense)(jnp.ones((1, count)), w), [[127.0 * count]], rtol=1e-5)


def test_a_product_of_8_bits_has_the_gradient_of_its_matrix_and_passes_on_what_is_not_finite():
    w = quantize(normal(0, 5, 16))
    x = jnp.asarray(normal(1, 3, 16))
    gradient = jax.grad(lambda x: jnp.sum(dense(x, w) ** 2) / 2)(x)
    wide = np.asarray(w.astype("float32"))
    np.testing.assert_allclose(gradient, np.asarray(x) @ wide.T @ wide, rtol=1e-5, atol=1e-5)
    x = x.at[0, 3].set(jnp.nan).at[1, 4].set(jnp.inf).at[2].set(0.0)
    product = np.asarray(jax.jit(dense)(x, w))
    assert not np.isfinite(product[:2]).any() and not product[2].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("inputs", "group"), [(96, 32), (192, 64), (256, 128)])
def test_in_4_bits_no_weight_moves_by_more_than_half_a_step_of_its_group(inputs, group, dtype):
    w = np.array(normal(0, 5, inputs, dtype=dtype))
    w[2, :group] = w[2, 0]  # a group of one value
    packed = quantize_4(w)
    assert packed.shape == w.shape and packed.dtype == w.dtype and packed.scale.shape == (inputs // group, 5)
    assert packed.values.min() == -8 and packed.values.max() == 7
    wide = w.astype(np.float32).reshape(5, -1, group)
    step = (wide.max(-1) - wide.min(-1)) / 15
    error = np.abs(np.asarray(packed.astype("float32")).reshape(wide.shape) - wide).max(-1)
    assert np.all(error <= 0.5001 * step + 15 * 2.0**-11 * step + 1e-6)  # float16 scale rounding, 15 times


@pytest.mark.parametrize("rows", [1, 5, 8, 70])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 2**-3)])
@pytest.mark.parametrize("product", [dense, layers._dense_int4], ids=["cpu", "groups"])
def test_products_in_4_bits_are_those_of_the_dequantised_matrix(rows, dtype, tolerance, product):
    x = normal(0, rows, 96, dtype=dtype)
    w = jax.device_put(quantize_4(np.asarray(normal(1, 7, 96, dtype=dtype))))
    expected = np.asarray(x, np.float32) @ np.asarray(w.astype("float32")).T
    np.testing.assert_allclose(jax.jit(product)(x, w).astype("float32"), expected, atol=tolerance)


def test_in_4_bits_some_matrices_have_8():
    def bits(*path, shape):
        return bits_of(Weight(path, "", shape, "normal"), 4)

    assert bits("layers", 0, "up", shape=(7, 64)) == 4 and bits("layers", 0, "up", shape=(7, 40)) == 8
    assert bits("embed", shape=(7, 64)) == bits("layers", 0, "expert_up", shape=(4, 7, 64)) == 8
    assert bits("layers", 0, "router", shape=(4, 64)) is None
    assert bits("layers", 0, "sinks", shape=(64,)) is None


SIZES = {"vocab_size": 29, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4}
MOE = {"num_experts": 4, "experts_per_token": 2, "expert_size": 12, "dense_layers": (1,), "qk_norm": True}
GEMMA2 = {
    "norm_plus_one": True,
    "post_norms": True,
    "embedding_multiplier": 32**0.5,
    "activation": "gelu_tanh",
}
GEMMA2 |= {"query_scalar": 4.0, "logit_cap": 30.0, "eos_token_ids": (1,), "tie_embeddings": True}
DELTA = Delta(layers=(0,), key_heads=2, value_heads=4, key_dim=8, value_dim=8)
RECURRENT = {"delta": DELTA, "attention_gate": True, "norm_plus_one": True}
RECURRENT |= {"rope": Rope(fraction=0.25)}
CONFIGS = {
    "qwen3 moe, a dense layer, untied": ModelConfig(family="qwen3_moe", **MOE, **SIZES),
    "gemma2, tied": ModelConfig(family="gemma2", **GEMMA2, **SIZES),
    "qwen3.5": ModelConfig(family="qwen3_5_text", qk_norm=True, **RECURRENT, **SIZES),
    "qwen3 next": ModelConfig(family="qwen3_next", shared_expert_size=8, **RECURRENT, **MOE, **SIZES),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("qwen3 moe, a dense layer, untied", "int8", marks=pytest.mark.slow),
        pytest.param("qwen3 moe, a dense layer, untied", "int4", marks=pytest.mark.slow),
        pytest.param("gemma2, tied", "int8", marks=pytest.mark.slow),
        ("gemma2, tied", "int4"),
        pytest.param("qwen3.5", "int8", marks=pytest.mark.slow),
        pytest.param("qwen3 next", "int4", marks=pytest.mark.slow),
    ],
)
def test_a_family_loaded_in_few_bits_is_the_model_of_its_dequantised_weights(name, dtype, tmp_path):
    config = CONFIGS[name]
    saved = hub.save(tmp_path / "model", config, random_weights(config, scale=0.3))
    checkpoint = hub.load(saved, dtype=dtype)
    kinds = {type(x) for x in jax.tree.leaves(checkpoint.params["layers"], is_leaf=is_quantized)}
    # Under int4, Qwen's experts have 8 bits.
    expected = {"int8": {Int8}, "int4": {Int4, Int8} if config.num_experts else {Int4}}
    assert kinds & {Int4, Int8} == expected[dtype] and len(kinds) > len(expected[dtype])
    assert isinstance(checkpoint.params["embed"], Int8)
    tokens, start = np.random.default_rng(0).integers(0, 29, (2, 6)), jnp.zeros((2,), jnp.int32)
    model = language_model(config)

    @jax.jit
    def logits(params):
        cache = model.init_cache(2, 8)
        out = model.forward(params, jnp.asarray(tokens, jnp.int32), Visible.causal(start, 6), cache)
        return model.unembed(params, out.hidden)

    actual = logits(checkpoint.params)
    # The scale is applied after the product, in float32.
    np.testing.assert_allclose(actual, logits(dequantized(checkpoint.params)), atol=1e-3)
    assert np.abs(actual - logits(hub.load(saved).params)).max() > 1e-4  # the weights are not the same


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_heads_load_in_int8_beside_a_target_in_few_bits(dtype, tmp_path):
    layer = ModelConfig(family="llama", **SIZES | {"num_layers": 1})
    target = hub.save(tmp_path / "target", layer, random_weights(layer, scale=0.3, seed=1))
    target = hub.load(target, dtype=dtype)
    config = eagle_head.EagleConfig(
        version=1, layer=layer, target_hidden_size=32, draft_vocab_size=29, own_embed=True
    )
    head = eagle_head.init_params(config, jax.random.key(2), scale=0.3)
    exact = hub.load(target.path).params
    tensors = {"embed": exact["embed"], "unembed": exact["unembed"] * 1.5}
    saved = hub.save_eagle(tmp_path / "head", config, head | tensors)
    config, loaded = hub.load_eagle(saved, target.config, target.params, dtype=dtype)
    # The head shares tensors that equal the target's, although the loaded target is rounded.
    assert not config.own_embed and config.own_unembed and isinstance(loaded["unembed"], Int8)
    x = normal(0, 1, 3, 64)
    np.testing.assert_allclose(dense(x, loaded["fc"]), dense(x, dequantized(loaded)["fc"]), atol=5e-4)


@pytest.mark.parametrize(
    "case, kernels",
    [
        ({}, 1),
        ({"rows": 60, "size": 32}, 1),
        ({"rows": 65}, 0),  # as in a prompt
        ({"dtype": "float32"}, 0),
        ({"inputs": 192, "size": 64}, 0),
        ({"platform": "cuda"}, 0),
        ({"differentiated": True}, 0),
    ],
)
def test_on_a_tpu_a_product_in_4_bits_is_a_kernel_where_it_takes_the_shapes(case, kernels):
    def lowered(*, rows=1, inputs=256, size=128, dtype="bfloat16", platform="tpu", differentiated=False):
        groups = inputs // size
        leaves = [((groups, size, 128), "int4"), ((groups, 128), "float16"), ((groups, 128), "float32")]
        values, scale, offset = (jax.ShapeDtypeStruct(*leaf) for leaf in leaves)
        w = Int4(values=values, scale=scale, offset=offset, dtype=dtype)
        product = dense
        if differentiated:
            product = jax.grad(lambda x, w: jnp.sum(dense(x, w, dtype=jnp.float32)))
        x = jax.ShapeDtypeStruct((rows, inputs), dtype)
        return jax.jit(product).trace(x, w).lower(lowering_platforms=(platform,)).as_text()

    assert lowered(**case).count("tpu_custom_call") == kernels


@pytest.fixture
def calls(monkeypatch):
    """Use the TPU's form of a product with an interpreted kernel; list the kernel calls and the dtypes of sums."""
    events = []

    def kernel(*operands, **options):
        events.append("kernel")
        return dense_int4(*operands, **options, interpret=True)

    def psum(x, axes):
        events.append(x.dtype.name)
        return add(x, axes)

    dense_int4, add = mosaic.dense_int4, jax.lax.psum
    monkeypatch.setattr(mosaic, "dense_int4", kernel)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, tpu, **_: tpu(*arrays))
    monkeypatch.setattr(jax.lax, "psum", psum)
    return events


@pytest.mark.parametrize(
    "axes, shape, divided, expected",
    [
        ("model=4", (512, 256), {"outputs": ("hidden", 512)}, ["kernel"]),
        ("model=4", (128, 512), {"inputs": ("hidden", 512)}, ["bfloat16", "kernel"]),
        pytest.param(
            *("model=2,expert=2", (128, 512), {"inputs": ("heads", 4)}, ["bfloat16", "kernel"]),
            marks=pytest.mark.slow,
        ),
        ("data=2,model=2", (128, 512), {"inputs": ("hidden", 512)}, ["float32", "kernel"]),  # 4 rows each
        ("model=4", (128, 384), {"inputs": ("hidden", 384)}, ["kernel"]),  # three groups do not divide
        ("model=4", (256, 128), {"outputs": ("kv_heads", 2)}, ["kernel"]),  # two heads do not divide
        ("data=8", (128, 256), {"outputs": ("hidden", 128)}, ["kernel"]),
        ("model=4", (256, 128), {"outputs": ("hidden", 256)}, []),  # the kernel does not support 64 outputs
        ("model=4", (128, 128), {}, []),  # the divided dimension is not given
    ],
)
def test_on_a_mesh_the_kernel_multiplies_by_a_devices_part_of_a_matrix_in_4_bits(
    axes, shape, divided, expected, calls
):
    wide, x = quantize_4(np.asarray(normal(0, *shape))), normal(1, 8, shape[1], dtype="bfloat16")
    w = Int4(jnp.asarray(wide.values, "int4"), wide.scale, wide.offset, dtype="bfloat16")
    product = jax.jit(by_rows(lambda w, x: dense(x, w, **divided)))
    with jax.set_mesh(parse_mesh(axes)):
        actual = product(w, x)
    assert calls == expected
    x, wide = np.asarray(x, np.float64), np.asarray(wide.astype("float32"), np.float64).T
    assert np.all(np.abs(np.asarray(actual, np.float64) - x @ wide) <= 2.0**-8 * np.abs(x) @ np.abs(wide))
