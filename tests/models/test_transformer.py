"""Properties of the forward that need no oracle: trees, windows, padding, features, memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.core.cache import commit
from mars_jax.core.errors import MarsError
from mars_jax.core.tree import visible
from mars_jax.core.types import NO_TOKEN, DraftTree, Visible
from mars_jax.models import ModelConfig, init_params, language_model
from mars_jax.models.weights import get, weights
from tests.helpers import one_row

CONFIG = ModelConfig(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    windows=(None, 3),
    qk_norm=True,
)
MODEL = language_model(CONFIG, feature_layers=(1, 0))
SLOTS = 24
# Two branches of different depth, siblings out of depth-first order, and a padding node.
PARENTS = [-1, 0, 0, 1, 2, 3, 4, 0]
DEPTHS = [0, 1, 1, 2, 2, 3, 3, 1]
PREFIX = 6


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0), scale=0.5)


@pytest.fixture(scope="module")
def forward():
    return jax.jit(MODEL.forward)


def run_chain(forward, params, tokens, start=0, cache=None):
    """Run the forward of a chain: tokens [B, N] at `start`."""
    tokens = jnp.asarray(tokens, jnp.int32)
    batch, n = tokens.shape
    start = jnp.full((batch,), start, jnp.int32)
    cache = MODEL.init_cache(batch, SLOTS) if cache is None else cache
    return forward(params, tokens, Visible.causal(start, n), cache)


def make_tree(batch=1):
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (batch, len(PARENTS)))
    tokens[:, -1] = NO_TOKEN
    return DraftTree(
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.asarray([PARENTS] * batch, jnp.int32),
        depths=jnp.asarray([DEPTHS] * batch, jnp.int32),
        max_depth=3,
        is_chain=False,
    )


def run_tree(forward, params, prefix):
    tree = make_tree()
    start = jnp.full((1,), PREFIX, jnp.int32)
    cache = run_chain(forward, params, prefix).cache
    return tree, forward(params, tree.tokens, visible(tree, start), cache)


def branch(node):
    path = [node]
    while PARENTS[path[0]] >= 0:
        path.insert(0, PARENTS[path[0]])
    return path


@pytest.mark.parametrize("window", [2, 3])
def test_every_branch_of_a_tree_equals_the_chain_of_its_tokens(params, window):
    """Include sliding windows, where slot and position of a node differ; a window of 2 reveals every mix-up."""
    config = ModelConfig(**{**vars(CONFIG), "windows": (None, window)})
    forward = jax.jit(language_model(config).forward)
    prefix = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, PREFIX))
    tree, out = run_tree(forward, params, prefix)
    for node in (5, 6):
        path = branch(node)
        chain = run_chain(forward, params, np.concatenate([prefix, tree.tokens[:, path]], axis=1))
        # 1e-5: the same float32 numbers summed in another order.
        np.testing.assert_allclose(out.hidden[0, path], chain.hidden[0, PREFIX:], atol=1e-5)


def test_a_committed_branch_continues_as_the_chain_would(forward, params):
    prefix = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, PREFIX))
    tree, out = run_tree(forward, params, prefix)
    path = branch(6)
    cache = commit(out.cache, jnp.full((1,), PREFIX, jnp.int32), jnp.asarray([path], jnp.int32))
    moved = run_chain(forward, params, [[7]], PREFIX + len(path), cache)
    whole = run_chain(forward, params, np.concatenate([prefix, tree.tokens[:, path], [[7]]], axis=1))
    np.testing.assert_allclose(moved.hidden[0, 0], whole.hidden[0, -1], atol=1e-5)


def test_a_row_alone_equals_the_row_in_a_ragged_batch(forward, params):
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (3, 9))
    starts = jnp.asarray([0, 5, 9], jnp.int32)
    cache = run_chain(forward, params, tokens).cache
    tree = make_tree(3)
    both = forward(params, tree.tokens, visible(tree, starts), cache).hidden
    for b in range(3):
        row = one_row((tree.tokens, visible(tree, starts), cache), b)
        alone = forward(params, *row).hidden
        np.testing.assert_allclose(both[b], alone[0], atol=1e-5)


def test_unread_slots_do_not_matter(forward, params):
    tokens = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (2, 5))
    poison = jax.tree.map(lambda x: jnp.full_like(x, 1e30), MODEL.init_cache(2, SLOTS))
    clean, dirty = run_chain(forward, params, tokens), run_chain(forward, params, tokens, cache=poison)
    np.testing.assert_array_equal(clean.hidden, dirty.hidden)


def test_features_are_the_outputs_of_the_layers_asked_for_in_their_order(forward, params):
    out = run_chain(forward, params, [[1, 2, 3]])
    last, first = out.features
    norm = last * jax.lax.rsqrt(jnp.mean(last**2, axis=-1, keepdims=True) + CONFIG.norm_eps)
    np.testing.assert_allclose(norm * params["norm"][None, None], out.hidden, atol=1e-5)
    config = ModelConfig(**{**vars(CONFIG), "num_layers": 1, "windows": (None,)})
    shallow = language_model(config, feature_layers=[0])
    one = {**params, "layers": params["layers"][:1]}
    tokens, start = jnp.asarray([[1, 2, 3]], jnp.int32), jnp.zeros((1,), jnp.int32)
    alone = jax.jit(shallow.forward)(one, tokens, Visible.causal(start, 3), shallow.init_cache(1, SLOTS))
    np.testing.assert_allclose(alone.features[0], first, atol=1e-5)
    with pytest.raises(MarsError, match="feature layer 2 does not exist: the model has layers 0 to 1"):
        language_model(CONFIG, feature_layers=(2,))


def test_bfloat16_stays_near_float32_and_gives_float32_logits(forward, params):
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    model = language_model(CONFIG, dtype="bfloat16")
    tokens, start = jnp.asarray([[1, 2, 3, 4]], jnp.int32), jnp.zeros((1,), jnp.int32)
    forward_low = jax.jit(model.forward)
    out = forward_low(low, tokens, Visible.causal(start, 4), model.init_cache(1, SLOTS))
    logits = model.unembed(low, out.hidden)
    exact = MODEL.unembed(params, run_chain(forward, params, tokens).hidden)
    assert out.hidden.dtype == out.cache.k[0].dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    # 5% of the spread of the logits: two layers of 8-bit roundings.
    np.testing.assert_allclose(logits, exact, atol=0.05 * float(jnp.std(exact)) * 3)


def test_the_forward_is_differentiable_through_the_cache(params):
    tokens, start = jnp.asarray([[1, 2, NO_TOKEN]], jnp.int32), jnp.zeros((1,), jnp.int32)

    def loss(params):
        out = MODEL.forward(params, tokens, Visible.causal(start, 3), MODEL.init_cache(1, 8))
        return jnp.mean(jnp.sin(MODEL.unembed(params, out.hidden)))

    gradient = jax.jit(jax.grad(loss))(params)
    direction = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), params
    )
    slope = jax.jit(lambda p, d: jax.jvp(loss, (p,), (d,))[1])(params, direction)
    total = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, direction)))
    np.testing.assert_allclose(total, slope, rtol=1e-4)
    assert all(float(jnp.max(jnp.abs(g))) > 0 for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_cache_is_updated_in_place(n, batch):
    config = ModelConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=4
    )
    model, slots = language_model(config), 2048
    seen = Visible.causal(jnp.zeros((batch,), jnp.int32), n)
    cache = model.init_cache(batch, slots)
    given = (init_params(config, jax.random.key(0)), jnp.zeros((batch, n), jnp.int32), seen, cache)
    memory = jax.jit(model.forward, donate_argnums=3).lower(*given).compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes <= 0.2 * size


def test_the_table_names_every_leaf_of_params_once(params):
    table = weights(CONFIG)
    assert len({row.name for row in table}) == len(table) == len(jax.tree.leaves(params))
    assert all(get(params, row.path).shape == row.shape for row in table)


def test_equal_configs_give_the_same_functions():
    """Otherwise every load would recompile everything."""
    again = ModelConfig(**vars(CONFIG))
    assert again is not CONFIG and hash(again) == hash(CONFIG)
    assert language_model(again, feature_layers=[1, 0]).forward is MODEL.forward


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"num_kv_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"windows": (1,)}, "1 windows for 2 layers"),
        ({"windows": (0, None)}, "a window is 0: expected a whole number of at least 1"),
        ({"activation": "mish"}, "activation 'mish' is not supported: choose one of silu"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": 18, "head_dim": 0}, "hidden_size 18 is not divisible by 4 heads"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change, expected):
    with pytest.raises(MarsError, match=expected):
        ModelConfig(**{**vars(CONFIG), **change})
