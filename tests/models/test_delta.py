"""Gated DeltaNet: the rule of transformers, and drafts that leave no trace in the state."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, drafters, verify
from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.contrib.teaching import predict
from mars_jax.core import decode, refill
from mars_jax.core.controls import make_controls
from mars_jax.core.drafter import Drafter
from mars_jax.core.metrics import zero_stats
from mars_jax.core.tree import chain, last_token
from mars_jax.core.types import Params, Prompts, Visible, keys_from_seeds
from mars_jax.drafters.sized import sized
from mars_jax.models import init_params, language_model
from mars_jax.models.config import Delta, ModelConfig
from mars_jax.models.delta import delta_rule
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.heads import init_params as init_head
from mars_jax.models.mtp_head import MtpConfig
from mars_jax.utils.errors import MarsError
from tests.helpers import begin, committed, decode_all, fake_drafters, small_models

VOCAB, BUFFER = 256, 40
DELTA = Delta(layers=(0, 2), key_heads=2, value_heads=4, key_dim=8, value_dim=6)
SIZES = small_models.SIZES | {"vocab_size": VOCAB}
CONFIG = ModelConfig(
    family="qwen3_5_text", num_layers=3, delta=DELTA, attention_gate=True, norm_plus_one=True, **SIZES
)
MODEL = language_model(CONFIG)


SMALL = ModelConfig(num_layers=1, **SIZES)
_SHARED = {"target_hidden_size": SIZES["hidden_size"], "draft_vocab_size": VOCAB}
EAGLE_3 = EagleConfig(version=3, layer=SMALL, own_unembed=False, feature_layers=(0, 1, 2), **_SHARED)
DFLASH = DFlashConfig(
    layer=dataclasses.replace(SMALL, family="qwen3"),
    feature_layers=(0, 2),
    mask_token=3,
    block_size=4,
    **_SHARED,
)
HEADS = {
    "eagle-3": drafters.eagle(EAGLE_3, MODEL, 4),
    "mtp": drafters.mtp(MtpConfig.outline(CONFIG), MODEL, 4),
    "dflash": contrib.dflash(DFLASH, MODEL),
}
"""Heads that share the target's unembedding."""


@functools.cache
def weights():
    """Return random weights, with states that decay slowly, and few likely tokens, so that heads are often right."""
    params = init_params(CONFIG, jax.random.key(0), scale=0.3)
    slow = [
        layer | {"delta_log_rate": jnp.full(4, -3.0)} if "delta_q" in layer else layer
        for layer in params["layers"]
    ]
    likely = jnp.arange(VOCAB)[:, None] % 32 == 5
    return params | {"layers": tuple(slow), "unembed": params["unembed"] * jnp.where(likely, 1, 0.1)}


def head_weights(name):
    return init_head(HEADS[name].config, jax.random.key(1), scale=0.3)


@dataclasses.dataclass(frozen=True)
class Guess(Drafter):
    """Drafts each token of a known text, or a random one with probability 0.3.

    A prompt begins with the number of its text.
    """

    max_depth: int = 4

    def propose(self, params, state, inputs):
        def draft(key, text, length):
            use, noise = jax.random.split(key)
            known = jax.lax.dynamic_slice_in_dim(text, length, self.max_depth)
            random = jax.random.randint(noise, known.shape, 0, VOCAB)
            return jnp.where(jax.random.uniform(use, known.shape) < 0.7, known, random)

        tokens = jax.vmap(draft)(inputs.keys, params.draft[inputs.tokens[:, 0]], inputs.length)
        return chain(jnp.concatenate([last_token(inputs), tokens], axis=1)), state


def prompts_of(count):
    tokens = np.random.default_rng(0).integers(0, VOCAB, (count, BUFFER)).astype(np.int32)
    tokens[:, 0] = np.arange(count)
    return jnp.asarray(tokens), jnp.asarray(1 + np.arange(count) * 7 % 19, jnp.int32)


def decoded(drafter, count=6, draft=(), **settings):
    settings = {"temperature": [0.0, 0.8] * (count // 2), "params": Params(weights(), draft), **settings}
    return decode_all(settings.pop("model", MODEL), drafter, verify.exact(), *prompts_of(count), **settings)


def texts_of(state):
    """Return the tokens of the texts, padded, which `Guess` drafts from."""
    return jnp.pad(state.tokens, ((0, 0), (0, 8)))


@pytest.mark.parametrize("length", [1, 5, 70])
def test_the_rule_is_that_of_transformers(length):
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_next import modeling_qwen3_next as oracle

    rng = np.random.default_rng(length)
    q, k, v = (rng.normal(size=(2, length, heads, width)) for heads, width in ((2, 8), (2, 8), (4, 6)))
    log_decay, rate = -rng.uniform(size=(2, length, 4)), rng.uniform(size=(2, length, 4))
    state = rng.normal(size=(2, 4, 8, 6))
    expected, expected_state = oracle.torch_recurrent_gated_delta_rule(
        *(torch.tensor(x, dtype=torch.float32) for x in (q, k, v, log_decay, rate, state)),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )

    def grouped(x):
        return x.astype(np.float32).reshape(2, length, 2, 2, -1).transpose(0, 2, 3, 1, 4)

    def normed(x):
        x = x.astype(np.float32).swapaxes(1, 2)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    new_state, outputs = jax.jit(delta_rule)(
        state.astype(np.float32).reshape(2, 2, 2, 8, 6),
        normed(q) * np.float32(8**-0.5), normed(k), grouped(v), grouped(log_decay)[..., 0], grouped(rate)[..., 0],
    )  # fmt: skip
    outputs = np.asarray(outputs).transpose(0, 3, 1, 2, 4).reshape(2, length, 4, 6)
    np.testing.assert_allclose(outputs, expected, atol=2e-5)
    np.testing.assert_allclose(new_state.reshape(2, 4, 8, 6), expected_state, atol=2e-5)


def test_drafts_change_no_token():
    plain, _ = decoded(drafters.none())
    drafted, stats = decoded(Guess(), draft=texts_of(plain))
    assert committed(drafted) == committed(plain)
    accepted, steps = np.asarray(stats.accepted_exact), np.asarray(stats.steps)
    assert (accepted > 0).all() and (accepted < 4 * steps).all()


@pytest.mark.slow
def test_drafts_change_no_token_of_200_prompts():
    # A draw of seed 131 is within rounding, 1e-6 in a logit, of the edge between two tokens.
    seeds = list(range(1000, 1200))
    plain, _ = decoded(drafters.none(), 200, seeds=seeds)
    drafted, _ = decoded(Guess(), 200, texts_of(plain), seeds=seeds)
    assert committed(drafted) == committed(plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "model", *HEADS, "sized ngram", "sized eagle-3"])
def test_other_drafts_change_no_token(name):
    """N-grams often draft nothing, and a forward of the root only follows one of a whole chain."""
    plain, _ = decoded(drafters.none())
    kind, draft = name.removeprefix("sized "), ()
    if kind in HEADS:
        drafter, draft = HEADS[kind], head_weights(kind)
    elif kind == "model":
        drafter, draft = (
            drafters.language_model(language_model(SMALL), 3),
            init_params(SMALL, jax.random.key(1)),
        )
    else:
        drafter = drafters.ngram(4, min_ngram=1)
    if kind == name:
        drafted, stats = decoded(drafter, draft=draft)
        assert np.sum(stats.accepted_exact) > 0
    else:
        adaptive = sized(drafters.LoadedDrafter(drafter, draft), [0, 2, 4])
        decoder = dataclasses.replace(adaptive.decoder(MODEL, verify.exact()), prefill_chunk=16)
        params = Params(weights(), adaptive.params)
        drafted, _ = decode.run(decoder, params, decode.start(decoder, params, batch_of(*prompts_of(6))))
    assert committed(drafted) == committed(plain)


@pytest.mark.slow
def test_drafts_change_no_token_with_a_cache_of_8_bits():
    model = language_model(CONFIG, cache_dtype="int8")
    plain, _ = decoded(drafters.none(), model=model)
    drafted, _ = decoded(Guess(), draft=texts_of(plain), model=model)
    assert committed(drafted) == committed(plain)


def batch_of(tokens, lengths):
    count = len(lengths)
    controls = make_controls(count, limit=BUFFER, temperature=[0.0, 0.8, 0.0, 0.8, 0.0, 0.8][:count])
    return Prompts(
        tokens, lengths, controls, verify.exact(), keys_from_seeds(jnp.arange(count, dtype=jnp.uint32))
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["guess", *HEADS])
def test_refilled_and_extended_rows_decode_like_fresh_ones(name):
    tokens, _ = prompts_of(4)
    drafter = HEADS.get(name, Guess())
    decoder = decode.speculative_decoder(MODEL, drafter, verify.exact(), prefill_chunk=16)
    fresh = batch_of(tokens, jnp.asarray([30, 22, 9, 4], jnp.int32))
    plain, _ = decode_all(
        MODEL, drafters.none(), verify.exact(), fresh.tokens, fresh.length, temperature=[0.0, 0.8, 0.0, 0.8],
        params=Params(weights()),
    )  # fmt: skip
    params = Params(weights(), texts_of(plain) if name == "guess" else head_weights(name))
    # Rows stop in the middle of a text: right after a draft, many tokens ago, and not at all.
    short = batch_of(tokens, jnp.asarray([5, 22, 9, 1], jnp.int32))
    state, _ = decode.run(decoder, params, decode.start(decoder, params, short), max_steps=3)
    # Row 2 continues where it is. The others read more tokens, from the start or from the last common one.
    length = jnp.asarray([30, 22, int(state.length[2]), 4], jnp.int32)
    continued = dataclasses.replace(
        fresh, tokens=jnp.where(jnp.arange(4)[:, None] == 2, state.tokens, tokens), length=length
    )
    state, num_read = decode.extend(decoder, params, state, continued)
    # A head reads the last common token again, for the embedding of the token after it.
    assert int(num_read[2]) == int(drafter.reads is not None) and int(num_read[0]) > 0
    state, _ = decode.run(decoder, params, state, max_steps=2)
    # Row 1 starts again in the running batch.
    row = jax.tree.map(lambda x: x[1:2], fresh)
    stats = zero_stats(4, decoder.max_depth)
    state, _ = refill.refill(decoder, params, state, stats, jnp.asarray([1]), row)
    state, _ = decode.run(decoder, params, state)
    assert committed(state) == committed(plain)


@pytest.mark.slow
def test_the_state_after_50_rounds_is_that_of_the_text():
    tokens, lengths = (jnp.pad(prompts_of(2)[0], ((0, 0), (0, 200))), jnp.asarray([9, 30], jnp.int32))
    settings = {"temperature": [0.0, 0.8], "params": Params(weights(), jnp.pad(tokens, ((0, 0), (0, 8))))}
    decoder, state = begin(MODEL, Guess(), verify.exact(), tokens, lengths, **settings)
    params = settings["params"]
    state, _ = decode.run(decoder, params, state, max_steps=50)
    assert (np.asarray(state.length) >= lengths + 50).all()
    _, fresh = begin(MODEL, Guess(), verify.exact(), state.tokens, state.length, **settings)

    @jax.jit
    def states(cache):
        """Return the states before the last token."""
        start = state.length - 1
        root = jnp.take_along_axis(state.tokens, start[:, None], axis=1)
        output = decoder.target.forward(params.target, root, Visible.causal(start, 1), cache)
        return [rows.state for rows in output.cache.delta.values()]

    for actual, expected in zip(states(state.cache), states(fresh.cache), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@jax.jit
def predictions(tokens, segments):
    return predict(MODEL, weights(), tokens, segments)


@pytest.mark.parametrize("lengths", [(5, 70, 1, 54), (64, 3, 61, 2), (20, 106, 2, 2)])
def test_documents_in_one_row_do_not_read_each_other(lengths):
    """Documents begin and end inside chunks of 64 tokens and at their boundaries."""
    packed = jax.random.randint(jax.random.key(3), (sum(lengths),), 0, VOCAB, dtype=jnp.int32)
    starts = np.cumsum([0, *lengths[:-1]])
    # The first row has all documents. Each other row begins with one of them.
    tokens = jnp.stack([jnp.roll(packed, -start) for start in (0, *starts)])
    segments = jnp.zeros_like(tokens).at[0].set(np.repeat(np.arange(4), lengths))
    together, *separate = predictions(tokens, segments)
    for start, length, alone in zip(starts, lengths, separate, strict=True):
        np.testing.assert_allclose(together[start : start + length], alone[:length], rtol=1e-4, atol=1e-4)


def test_a_row_whose_state_is_past_its_start_fails():
    model = MODEL.for_chains(4, 16)
    zero = jnp.zeros((1,), jnp.int32)
    cache = model.init_cache(1, 16)
    tokens = jnp.ones((1, 6), jnp.int32)
    output = jax.jit(model.forward)(weights(), tokens, Visible.causal(zero, 6), cache)
    for start, finite in ((5, False), (6, True), (0, True)):
        again = jax.jit(model.forward)(
            weights(), tokens[:, :1], Visible.causal(zero + start, 1), output.cache
        )
        assert bool(jnp.isfinite(again.hidden).all()) == finite
    kept = [int(model.keep(output.cache, zero + count)[0]) for count in (5, 6)]
    assert kept == [0, 6]


def test_a_rejected_node_that_is_not_finite_does_no_harm():
    model, forward = MODEL.for_chains(4, 16), jax.jit(MODEL.forward)
    zero, tokens = jnp.zeros((1,), jnp.int32), jnp.ones((1, 4), jnp.int32)
    cache = forward(weights(), tokens, Visible.causal(zero, 4), model.init_cache(1, 16)).cache
    # Two of four nodes are accepted: the others are behind the three inputs before the first one.
    broken = {
        i: dataclasses.replace(rows, inputs=rows.inputs.at[:, :, 5:].set(jnp.nan))
        for i, rows in cache.delta.items()
    }
    after = [
        forward(
            weights(), tokens[:, :1], Visible.causal(zero + 2, 1), dataclasses.replace(cache, delta=delta)
        ).hidden
        for delta in (cache.delta, broken)
    ]
    np.testing.assert_array_equal(*after)


def test_trees_and_recurrent_draft_models_are_refused():
    tree = drafters.language_model(fake_drafters.SMALL, tree=(2, 2))
    with pytest.raises(MarsError, match="verify only chains: set num_draft_tokens"):
        decode.speculative_decoder(MODEL, dataclasses.replace(tree, vocab_size=VOCAB), verify.exact())
    with pytest.raises(MarsError, match="verify only chains: set num_draft_tokens"):
        head_tree = drafters.eagle(EAGLE_3, MODEL, tree=(2, 2))
        decode.speculative_decoder(MODEL, head_tree, verify.exact())
    for draft in (drafters.language_model, contrib.self_draft):
        with pytest.raises(MarsError, match="the draft model has recurrent layers"):
            draft(MODEL, 3)
    seen = dataclasses.replace(Visible.causal(jnp.zeros((1,), jnp.int32), 2), seen=jnp.ones((1, 2, 2), bool))
    with pytest.raises(MarsError, match="draft chains, without --tree"):
        MODEL.forward(weights(), jnp.ones((1, 2), jnp.int32), seen, MODEL.init_cache(1, 8))


@pytest.mark.parametrize(
    ("change", "message"), [({"value_heads": 3}, "cannot share"), ({"layers": (0, 1, 2)}, "in at least one")]
)
def test_impossible_recurrent_layers_are_refused(change, message):
    with pytest.raises(MarsError, match=message):
        dataclasses.replace(CONFIG, delta=dataclasses.replace(DELTA, **change))
