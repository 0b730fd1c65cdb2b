"""Every operation under `jax.disable_jit`, as in a debugger: the compiled results, without recursion."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kernels
import mars_jax as mj
from kernels_pallas.int4.mosaic import dense_int4
from mars_jax.models.layers import dense
from mars_jax.models.moe import dense_by_expert
from mars_jax.models.quantize import quantize_4
from tests.helpers import slow_but

RNG = np.random.default_rng(0)


def array(*shape):
    return jax.device_put(RNG.normal(size=shape).astype(np.float32))


LOGITS = array(2, 3, 300)
TOKENS = jax.device_put(np.argsort(-np.asarray(LOGITS), axis=-1)[..., 1].astype(np.int32))
CONTROLS = kernels.AcceptControls(
    *jax.device_put((np.float32([0.1, 0.9]), np.zeros(2, bool), np.int32([9, 9]), np.int32([[-1], [-1]])))
)
FIRST = jax.device_put(np.int32([2, 5]))
QUERIES, KEYS = array(2, 3, 2, 2, 128), array(2, 16, 2, 128)
NEW = kernels.NewRows(array(2, 3, 2, 128), array(2, 3, 2, 128), FIRST)
MATRIX = RNG.normal(size=(128, 256)).astype(np.float32)
INT4 = jax.device_put(quantize_4(MATRIX))
OPERATIONS = {
    "margin_stats": (functools.partial(kernels.margin_stats, logsumexp=True), LOGITS),
    "margin_accept": (
        functools.partial(kernels.margin_accept, max_depth=2),
        *(LOGITS, TOKENS, jax.device_put(np.int32([[-1, 0, 1]] * 2)), None, CONTROLS),
    ),
    "top_k": (functools.partial(kernels.top_k, k=2), LOGITS),
    "tree_attention": (kernels.tree_attention, QUERIES, KEYS, KEYS, FIRST),
    "write_and_attend": (kernels.write_and_attend, QUERIES, KEYS, KEYS, NEW, FIRST),
    "the kernel of int4": (
        functools.partial(dense_int4, chip="TPU v5 lite", interpret=True),
        *(array(4, 256).astype(jnp.bfloat16), INT4.values.astype(jnp.int4), INT4.scale, INT4.offset),
    ),
    "a product in int4": (dense, array(4, 256), INT4),
    "products by expert": (
        dense_by_expert,
        *(array(4, 256), array(3, 128, 256), jax.device_put(np.int32([1, 0, 3]))),
    ),
}


@pytest.mark.parametrize(
    "operation", slow_but(OPERATIONS, "margin_stats", "margin_accept", "top_k", "tree_attention")
)
def test_an_operation_computes_the_same_without_jit(operation):
    function, *arguments = OPERATIONS[operation]
    compiled = jax.jit(function)(*arguments)
    with jax.disable_jit():
        eager = function(*arguments)
    assert jax.tree.structure(eager) == jax.tree.structure(compiled)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), atol=1e-4)


@pytest.mark.slow
def test_mars_decodes_the_same_tokens_without_jit():
    target = mj.load("tiny/target")
    rule = mj.verify.mars(theta=0.5)
    prompts = ["Once upon a time"]
    compiled = mj.generate(target, "ngram", prompts, verify=rule, max_new_tokens=4)
    with jax.disable_jit():
        eager = mj.generate(target, "ngram", prompts, verify=rule, max_new_tokens=4)
    assert eager.completions[0].tokens == compiled.completions[0].tokens
