"""Tests of Flax modules as language models: broken contracts are named, and params convert to nnx and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from mars_jax import drafters, verify
from mars_jax.core import fake
from mars_jax.core.types import ForwardOutput, Params, Visible
from mars_jax.integrations import bridge
from mars_jax.models import ModelConfig, init_params, language_model
from mars_jax.utils.errors import MarsError
from tests.helpers import committed, decode_all, ragged

VOCAB = 13
HASH = fake.hash_model(vocab_size=VOCAB, agree=0.8)


class Hash(nnx.Module):
    """Module around the hash model. Its only weight is a shift of the hidden states."""

    def __init__(self):
        self.shift = nnx.Param(jnp.zeros((), jnp.uint32))

    def __call__(self, tokens, positions, mask, cache, slot):
        visible = Visible(first=slot * 0, positions=positions, slot=slot, seen=mask)
        out = HASH.forward((), tokens, visible, cache)
        return HASH.unembed((), out.hidden + self.shift[...]), out.cache


@pytest.mark.slow
def test_a_module_decodes_as_the_functions_that_it_calls():
    model, params = bridge.from_nnx(Hash(), vocab_size=VOCAB, init_cache=HASH.init_cache)
    bridge.check(model, params)
    prompts, lengths = ragged([1, 6, 12], 40, VOCAB)
    drafter = drafters.language_model(fake.hash_model(vocab_size=VOCAB, seed=5, agree=0.8), tree=(2, 2))
    rule = verify.mars(theta=0.5)
    batch, temperature = (drafter, rule, prompts, lengths), [0.0, 0.9, 1.2]
    actual, _ = decode_all(model, *batch, params=Params(params), temperature=temperature)
    expected, _ = decode_all(HASH, *batch, temperature=temperature)
    assert committed(actual) == committed(expected)
    # Modules that differ only in weights share one model, so that nothing recompiles.
    assert bridge.from_nnx(Hash(), vocab_size=VOCAB, init_cache=HASH.init_cache)[0] is model


def _reads_before_it_writes(params, tokens, visible, cache):
    stale = HASH.forward(params, tokens * 0, visible, cache)
    return ForwardOutput(stale.hidden, (), HASH.forward(params, tokens, visible, cache).cache)


def _positions_of_slots(params, tokens, visible, cache):
    positions = visible.slot[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return HASH.forward(params, tokens, visible.replace(positions=positions), cache)


def _mixes_rows(params, tokens, visible, cache):
    out = HASH.forward(params, tokens, visible, cache)
    return out._replace(hidden=out.hidden + out.hidden[:1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (HASH._replace(forward=_reads_before_it_writes), "two pieces"),
        (HASH._replace(forward=_positions_of_slots), "positions are taken from slots"),
        (HASH._replace(forward=_mixes_rows), "a row depends on the others"),
        (HASH._replace(commit=lambda cache, start, path: cache), "`commit` does not move"),
        (HASH._replace(put=lambda cache, rows, new: cache), "`put` does not replace"),
    ],
    ids=["reads first", "slots as positions", "mixed rows", "commit", "put"],
)
def test_what_breaks_the_contract_is_named(model, sentence):
    with pytest.raises(MarsError, match=sentence):
        bridge.check(model, ())


def test_shapes_of_foreign_code_are_checked():
    class Short(nnx.Module):
        def __call__(self, tokens, positions, mask, cache, slot):
            return jnp.zeros((*tokens.shape, 3)), cache

    class Grows(nnx.Module):
        def __call__(self, tokens, positions, mask, cache, slot):
            return jnp.zeros((*tokens.shape, VOCAB)), jax.tree.map(lambda x: x.astype(jnp.float32), cache)

    for module, sentence in ((Short(), "logits of shape"), (Grows(), "cache of another structure")):
        with pytest.raises(MarsError, match=sentence):
            bridge.check(*bridge.from_nnx(module, vocab_size=VOCAB, init_cache=HASH.init_cache))
    with pytest.raises(MarsError, match=r"takes a flax\.nnx"):
        bridge.from_nnx(linen.Dense(2), vocab_size=VOCAB, init_cache=HASH.init_cache)
    with pytest.raises(MarsError, match=r"takes a flax\.linen"):
        bridge.from_linen(Hash(), vocab_size=VOCAB, init_cache=HASH.init_cache)


def test_our_params_go_to_nnx_and_back():
    config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)
    params, model = init_params(config, jax.random.key(0), scale=0.3), language_model(config)
    module = bridge.to_nnx(model, params)
    state = nnx.state(module, nnx.Param)
    doubled = jax.jit(lambda s: bridge.params_of(module, jax.tree.map(lambda x: 2 * x, s)))(state)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(2 * a, b), params, doubled)
    # The module's gradient equals that of the functions.
    ids = jnp.asarray([[3, 5, 8]], jnp.int32)
    gradient = nnx.grad(lambda m: jnp.sum(jnp.sin(m(ids))))(module)

    def loss(params):
        visible = Visible.causal(jnp.zeros((1,), jnp.int32), 3)
        out = model.forward(params, ids, visible, model.init_cache(1, 3))
        return jnp.sum(jnp.sin(model.unembed(params, out.hidden)))

    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, bridge.params_of(module, gradient), jax.grad(loss)(params))
