"""Properties of the forward that need no oracle: trees, windows, padding, features, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.core.cache import commit_path
from mars_jax.core.tree import visible
from mars_jax.core.types import NO_TOKEN, DraftTree, Visible
from mars_jax.models import ModelConfig, init_params, language_model
from mars_jax.models.layers import rms_norm
from mars_jax.models.weights import get, weights
from mars_jax.utils.errors import MarsError
from tests.helpers import one_row
from tests.helpers.small_models import SIZES, random_weights

CONFIG = ModelConfig(num_layers=2, windows=(None, 3), qk_norm=True, **SIZES)
MODEL = language_model(CONFIG, feature_layers=(1, 0))
SLOTS = 24
# Two branches of different depth, siblings out of depth-first order, and a padding node.
PARENTS = [-1, 0, 0, 1, 2, 3, 4, 0]
DEPTHS = [0, 1, 1, 2, 2, 3, 3, 1]
PREFIX = 6


@pytest.fixture(scope="module")
def params():
    return random_weights(CONFIG, scale=0.5)


@pytest.fixture(scope="module")
def forward():
    return jax.jit(MODEL.forward)


def random_tokens(batch, n, seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (batch, n))


def run_chain(forward, params, tokens, start=0, cache=None):
    """Run the forward of a chain: tokens [B, N] at `start`."""
    tokens = jnp.asarray(tokens, jnp.int32)
    batch, n = tokens.shape
    start = jnp.full((batch,), start, jnp.int32)
    cache = MODEL.init_cache(batch, SLOTS) if cache is None else cache
    return forward(params, tokens, Visible.causal(start, n), cache)


def make_tree(batch=1):
    tokens = random_tokens(batch, len(PARENTS), seed=1)
    tokens[:, -1] = NO_TOKEN
    tokens, parents, depths = jnp.asarray([tokens, [PARENTS] * batch, [DEPTHS] * batch], jnp.int32)
    return DraftTree(tokens=tokens, parents=parents, depths=depths, max_depth=3, is_chain=False)


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


def test_every_branch_of_a_tree_equals_the_chain_of_its_tokens(params):
    """Include sliding windows, where slot and position of a node differ; a window of 2 reveals every mix-up."""
    config = ModelConfig(**{**vars(CONFIG), "windows": (None, 2)})
    forward = jax.jit(language_model(config).forward)
    prefix = random_tokens(1, PREFIX)
    tree, out = run_tree(forward, params, prefix)
    for node in (5, 6):
        path = branch(node)
        chain = run_chain(forward, params, np.concatenate([prefix, tree.tokens[:, path]], axis=1))
        # 1e-5: the same float32 numbers summed in another order.
        np.testing.assert_allclose(out.hidden[0, path], chain.hidden[0, PREFIX:], atol=1e-5)


def test_a_committed_branch_continues_as_the_chain_would(forward, params):
    prefix = random_tokens(1, PREFIX)
    tree, out = run_tree(forward, params, prefix)
    path = branch(6)
    cache = commit_path(out.cache, jnp.full((1,), PREFIX, jnp.int32), jnp.asarray([path], jnp.int32))
    moved = run_chain(forward, params, [[7]], PREFIX + len(path), cache)
    expected = run_chain(forward, params, np.concatenate([prefix, tree.tokens[:, path], [[7]]], axis=1))
    np.testing.assert_allclose(moved.hidden[0, 0], expected.hidden[0, -1], atol=1e-5)


def test_a_row_alone_equals_the_row_in_a_ragged_batch(forward, params):
    starts = jnp.asarray([0, 5, 9], jnp.int32)
    cache = run_chain(forward, params, random_tokens(3, 9)).cache
    tree = make_tree(3)
    both = forward(params, tree.tokens, visible(tree, starts), cache).hidden
    for b in range(3):
        row = one_row((tree.tokens, visible(tree, starts), cache), b)
        single = forward(params, *row).hidden
        np.testing.assert_allclose(both[b], single[0], atol=1e-5)


def test_unread_slots_do_not_matter(forward, params):
    tokens = random_tokens(2, 5)
    poison = jax.tree.map(lambda x: jnp.full_like(x, 1e30), MODEL.init_cache(2, SLOTS))
    clean, dirty = run_chain(forward, params, tokens), run_chain(forward, params, tokens, cache=poison)
    np.testing.assert_array_equal(clean.hidden, dirty.hidden)


def test_features_are_the_outputs_of_the_layers_asked_for_in_their_order(forward, params):
    out = run_chain(forward, params, [[1, 2, 3]])
    last, first = out.features
    np.testing.assert_allclose(rms_norm(last, params["norm"], CONFIG.norm_eps), out.hidden, atol=1e-5)
    config = ModelConfig(**{**vars(CONFIG), "num_layers": 1, "windows": (None,)})
    shallow = jax.jit(language_model(config, feature_layers=[0]).forward)
    shallow_out = run_chain(shallow, {**params, "layers": params["layers"][:1]}, [[1, 2, 3]])
    np.testing.assert_allclose(shallow_out.features[0], first, atol=1e-5)
    with pytest.raises(MarsError, match="feature layer 2 does not exist: the model has layers 0 to 1"):
        language_model(CONFIG, feature_layers=(2,))


def test_bfloat16_stays_near_float32_and_gives_float32_logits(forward, params):
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    model = language_model(CONFIG, dtype="bfloat16")
    tokens = [[1, 2, 3, 4]]
    out = run_chain(jax.jit(model.forward), low, tokens, cache=model.init_cache(1, SLOTS))
    logits = model.unembed(low, out.hidden)
    exact = MODEL.unembed(params, run_chain(forward, params, tokens).hidden)
    assert out.hidden.dtype == out.cache.k[0].dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    # 5% of the spread of the logits: two layers of 8-bit roundings.
    np.testing.assert_allclose(logits, exact, atol=0.05 * float(jnp.std(exact)) * 3)


def test_the_forward_is_differentiable_through_the_cache(params):
    def loss(params):
        out = run_chain(MODEL.forward, params, [[1, 2, NO_TOKEN]])
        return jnp.mean(jnp.sin(MODEL.unembed(params, out.hidden)))

    direction = random_weights(CONFIG, scale=0.5, seed=1)
    both = jax.jit(lambda p, d: (jax.grad(loss)(p), jax.jvp(loss, (p,), (d,))[1]))
    gradient, slope = both(params, direction)
    total = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, direction)))
    np.testing.assert_allclose(total, slope, rtol=1e-4)
    assert all(float(jnp.max(jnp.abs(g))) > 0 for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize(("batch", "n"), [(1, 1), (3, 8)])
def test_the_cache_is_updated_in_place(n, batch):
    config = ModelConfig(num_layers=3, **SIZES | {"num_kv_heads": 4, "hidden_size": 64})
    model = language_model(config)
    causal = Visible.causal(jnp.zeros((batch,), jnp.int32), n)
    cache = model.init_cache(batch, 2048)
    params = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    operands = (params, jnp.zeros((batch, n), jnp.int32), causal, cache)
    memory = jax.jit(model.forward, donate_argnums=3).lower(*operands).compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes <= 0.2 * size


def test_the_table_names_every_leaf_of_params_once(params):
    table = weights(CONFIG)
    assert len({row.name for row in table}) == len(table) == len(jax.tree.leaves(params))
    assert all(get(params, row.path).shape == row.shape for row in table)


def test_equal_configs_give_the_same_functions():
    """Otherwise every load would recompile everything."""
    copy = ModelConfig(**vars(CONFIG))
    assert copy is not CONFIG and hash(copy) == hash(CONFIG)
    assert language_model(copy, feature_layers=[1, 0]).forward is MODEL.forward


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"num_kv_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"windows": (1,)}, "1 windows for 2 layers"),
        ({"windows": (0, None)}, "a window is 0: expected a whole number from 1"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": 18, "head_dim": 0}, "hidden_size 18 is not divisible by 4 heads"),
        ({"activation": "mish"}, "activation 'mish' is not supported: choose one of silu"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change, expected):
    with pytest.raises(MarsError, match=expected):
        ModelConfig(**{**vars(CONFIG), **change})
