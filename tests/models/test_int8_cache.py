"""Keys and values in 8 bits, compared with the same numbers as floats, and drafts, compared with autoregression."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import drafters, verify
from mars_jax.core.cache import Int8Rows, commit_path, init_cache, put_rows, write_slots
from mars_jax.core.types import Params, Visible
from mars_jax.models import ModelConfig, attention, init_params, language_model
from mars_jax.utils.errors import MarsError
from tests.helpers import committed, decode_all, normal, ragged, slow_but
from tests.helpers.small_models import SIZES

CONFIG = ModelConfig(num_layers=2, head_dim=16, **SIZES)


def floats(x: Int8Rows) -> jax.Array:
    return x.values.astype(jnp.float32) * x.scale[..., None]


def test_no_number_moves_by_more_than_half_of_its_scale():
    exact = normal(0, 3, 7, 2, 16).at[0, 0].set(0.0)
    rounded = Int8Rows.of(exact)
    assert (jnp.abs(floats(rounded) - exact) <= 0.5001 * rounded.scale[..., None]).all()
    assert jnp.abs(rounded.values.astype(jnp.int32)).max() == 127
    np.testing.assert_array_equal(rounded.scale, jnp.abs(exact).max(-1) / 127)


@pytest.mark.parametrize(
    "form", slow_but(["all", "blocks", "wide blocks", "chosen", "kernel"], "all", "blocks", "chosen")
)
def test_attention_is_that_over_the_rounded_numbers(form):
    batch, n, slots, live = 2, 5, 256, 200
    q = normal(1, batch, n, 4, 3, 16)
    k, v = (Int8Rows.of(normal(seed, batch, slots, 4, 16)) for seed in (2, 3))
    visible = Visible.causal(jnp.asarray([live - n, 90], jnp.int32), n)
    mask = visible.dense(slots)
    expected = attention.attend_all(q, floats(k), floats(v), mask, jnp.int32(live), cap=20.0)

    def node_rows(*caches):
        """Return the rows of the nodes, which are already in the cache."""
        places = np.asarray(visible.slot)[:, None] + np.arange(n)
        return tuple(floats(cache)[np.arange(batch)[:, None], places] for cache in caches)

    forms = {
        "all": functools.partial(attention.attend_all, mask=mask, live=jnp.int32(live), cap=20.0),
        "blocks": lambda q, k, v: attention._attend_blocks(q, k, v, mask, jnp.int32(live), None, None, 20.0),
        "wide blocks": lambda q, k, v: attention._attend_blocks(q, k, v, mask, None, None, None, 20.0, 96),
        "chosen": functools.partial(attention.attend, mask=mask, live=jnp.int32(live), cap=20.0),
        "kernel": lambda q, k, v: attention.attending("interpret", visible, slots, None)(
            q, k, v, node_rows(k, v), scale=16**-0.5, cap=20.0
        )[0],
    }
    np.testing.assert_allclose(forms[form](q, k, v), expected, atol=2e-5)


def test_every_way_to_move_rows_moves_their_scales():
    cache = init_cache(1, (2, 8, 2, 4), "int8")
    new = normal(4, 2, 3, 2, 4)
    start = jnp.asarray([1, 4], jnp.int32)
    written = write_slots(cache.k[0], new, start)
    np.testing.assert_array_equal(floats(written)[0, 1:4], floats(Int8Rows.of(new))[0])
    moved = commit_path(cache.replace(k=(written,)), start, jnp.asarray([[0, 2], [0, 1]], jnp.int32)).k[0]
    np.testing.assert_array_equal(floats(moved)[0, 2], floats(written)[0, 3])
    np.testing.assert_array_equal(floats(moved)[1], floats(written)[1])
    replaced = put_rows(written, jnp.asarray([0]), jax.tree.map(lambda x: x[:1], moved))
    np.testing.assert_array_equal(floats(replaced), np.stack([floats(moved)[0], floats(written)[1]]))


@pytest.mark.slow
@pytest.mark.parametrize("tree", [None, (2, 2, 1), drafters.Dynamic(3, 3, 9)])
def test_drafts_and_autoregression_read_the_same_numbers(tree):
    """Round nodes in flight as well: otherwise a draft would be judged with other keys than the text."""
    target = language_model(CONFIG, cache_dtype="int8")
    prompts, lengths = ragged([3, 11], 40, CONFIG.vocab_size)
    weights = init_params(CONFIG, jax.random.key(0), scale=0.3)
    params = Params(weights, weights)
    oracle, _ = decode_all(target, drafters.none(), verify.exact(), prompts, lengths, params=params)
    drafter = drafters.language_model(language_model(CONFIG), 4, tree=tree)
    drafted, stats = decode_all(target, drafter, verify.exact(), prompts, lengths, params=params)
    assert committed(drafted) == committed(oracle)
    assert stats.steps.max() < 20  # most drafts were accepted


def test_load_takes_it_and_names_what_it_does_not_know():
    target = mj.load(cache_dtype="int8")
    assert isinstance(target.model.init_cache(1, 8).k[0], Int8Rows)
    with pytest.raises(MarsError, match="cache_dtype 'int4' is not supported"):
        mj.load(cache_dtype="int4")
