"""The k largest in every form, compared with `jax.lax.top_k`, and parts of a vocabulary, compared with the whole."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kernels_pallas import BlockError, sharded_top_k, top_k
from kernels_pallas.top_k.api import join_top_k, packed_top_k
from tests.helpers import normal, slow_but
from tests.helpers.implementations import IMPLEMENTATIONS, RACES
from tests.helpers.meshes import mesh_of

FORMS = ("default", "reference", "xla", "mosaic", "mosaic_simulated")


def few_values(*shape: int) -> jax.Array:
    """Return many ties and masked tokens, with one row of a single unmasked token and one row without any."""
    z = np.random.default_rng(0).integers(-4, 5, shape).astype(np.float32) / 2
    z[z == -2] = -np.inf
    z.reshape(-1, shape[-1])[0, 1:] = -np.inf
    z.reshape(-1, shape[-1])[-1] = -np.inf
    return jax.device_put(z)


@functools.partial(jax.jit, static_argnums=1)
def by_jax(logits, k):
    logits = logits.astype(jnp.float32)
    return *jax.lax.top_k(logits, k), jax.nn.logsumexp(logits, axis=-1)


def check(form, logits, k):
    actual = jax.jit(functools.partial(top_k, k=k, **IMPLEMENTATIONS[form]))(logits)
    values, ids, logsumexp = by_jax(logits, k)
    np.testing.assert_array_equal(actual.values, values)
    np.testing.assert_array_equal(actual.ids, ids)
    np.testing.assert_allclose(actual.logsumexp, logsumexp, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("lead", "vocab", "k"),
    slow_but(
        [((), 7, 1), ((3,), 130, 4), ((2, 10), 6000, 10), ((3,), 2000, 5), ((9,), 128, 60)],
        ((), 7, 1), ((2, 10), 6000, 10), ((9,), 128, 60),
    ),
)  # fmt: skip
def test_the_largest_and_the_sum(form, lead, vocab, k):
    check(form, few_values(*lead, vocab), k)


@pytest.mark.parametrize("form", ["reference", "xla", "mosaic"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_normal_logits_of_either_dtype(form, dtype):
    check(form, 5 * normal(0, 4, 2100, dtype=dtype), 8)


def check_joined(actual, logits, k):
    values, ids, logsumexp = map(np.asarray, by_jax(logits, k))
    np.testing.assert_array_equal(actual.values, values)
    # Among masked tokens, parts of fewer than k tokens may name one token twice.
    real = values > -np.inf
    np.testing.assert_array_equal(np.asarray(actual.ids)[real], ids[real])
    np.testing.assert_allclose(actual.logsumexp, logsumexp, rtol=1e-6)


@pytest.mark.parametrize(
    ("interpret", "parts", "size"),
    slow_but(
        [(mode, *cut) for mode in (None, True, RACES) for cut in [(1, 300), (4, 200), (8, 5), (2, 2000)]],
        (None, 4, 200), (None, 8, 5), (True, 4, 200),
    ),
)  # fmt: skip
def test_parts_give_what_the_whole_gives(interpret, parts, size):
    """Include parts of fewer than k tokens."""
    k, logits = 7, few_values(3, 6, parts * size)

    @jax.jit
    def joined(logits):
        cut = jnp.stack([packed_top_k(x, k, interpret=interpret) for x in jnp.split(logits, parts, axis=-1)])
        return join_top_k(cut, k, size, interpret=interpret)

    check_joined(joined(logits), logits, k)


@pytest.mark.parametrize("form", ["default", "xla", "mosaic"])
def test_a_vocabulary_that_is_divided_over_devices(form):
    k, logits = 7, few_values(3, 6, 800)
    local = functools.partial(sharded_top_k, k=k, axis="model", **IMPLEMENTATIONS[form])
    mapped = jax.shard_map(
        local, mesh=mesh_of(model=4), in_specs=P(None, None, "model"), out_specs=P(), check_vma=False
    )
    program = jax.jit(mapped).lower(logits).compile()
    check_joined(program(logits), logits, k)
    gathers = re.findall(r" = s32\[([\d,]+)\]\S* all-gather\(", program.as_text())
    lanes = 128 if form == "mosaic" else k + 1
    assert [math.prod(map(int, shape.split(","))) for shape in gathers] == [4 * 2 * 18 * lanes]


@pytest.mark.parametrize("form", ["mosaic", "xla"])
def test_rows_of_nan_still_name_tokens(form):
    largest = top_k(jnp.full((2, 300), jnp.nan), 5, **IMPLEMENTATIONS[form])
    assert ((largest.ids >= 0) & (largest.ids < 300)).all()


def test_a_named_kernel_refuses_a_vocabulary_that_does_not_fit():
    logits = jax.ShapeDtypeStruct((8, 2**18), jnp.float32)
    named = functools.partial(top_k, k=4, implementation="pallas_tpu")
    with pytest.raises(BlockError, match="do not fit"):
        jax.eval_shape(named, logits)
    jax.eval_shape(functools.partial(top_k, k=4), logits)  # without a name, another form runs
