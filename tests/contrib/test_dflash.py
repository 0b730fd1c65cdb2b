"""The block drafter is lossless; its context and drafts equal those of a head run without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters, verify
from mars_jax.contrib.drafters.dflash import dflash
from mars_jax.contrib.models import dflash_head as head
from mars_jax.core import decode, fake
from mars_jax.core.controls import make_controls
from mars_jax.core.types import NO_TOKEN, Visible
from mars_jax.drafters.tree_shapes import Dynamic
from mars_jax.models import ModelConfig, language_model
from mars_jax.utils.errors import MarsError
from tests.helpers import begin, committed, decode_all, draft_input, ragged
from tests.helpers.dflash import HEADS, MODEL, SHAPES, SIZES, VOCAB, weights

LENGTHS = [1, 2, 17]


@functools.partial(jax.jit, static_argnums=0)
def fresh_head(name, tokens, length):
    """Run the head after `length` tokens of a text i32[1, n], with one forward of the target over the text.

    Returns the hidden states of the block, its marginals and the context.
    """
    config, params, n = HEADS[name], weights(name), tokens.shape[1]
    model = MODEL.with_features(config.feature_layers)
    zero = jnp.zeros((1,), jnp.int32)
    output = model.forward(params.target, tokens, Visible.causal(zero, n), model.init_cache(1, n))
    cache = config.init_cache(1, n + config.block_size, "float32")
    fused = head.fuse(config, params.draft, output)
    cache = head.absorb(config, params.draft, fused, jnp.arange(n, dtype=jnp.int32)[None], zero, cache)
    first, size = jnp.reshape(length - 1, (1,)), config.block_size
    visible = Visible.causal(first, size).replace(seen=jnp.ones((1, size, size), bool))
    last = jax.lax.dynamic_slice_in_dim(tokens, length - 1, 1, axis=1)
    hidden, _ = head.forward(config, MODEL, params, head.block(config, last), visible, cache)
    hidden = hidden[:, size - config.drafts :]
    return hidden, head.unembed(config, MODEL, params, hidden)[0], cache


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "static tree", "dynamic tree"])
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_it_is_lossless_and_its_context_is_that_of_a_head_run_afresh(name, shape):
    """Run ten rounds of mixed acceptance with greedy rows and a sampled one, then decode the rest of the text."""
    prompts, lengths = ragged(LENGTHS, 64, VOCAB)
    drafter = dflash(HEADS[name], MODEL, 3, tree=SHAPES[shape])
    decoder, state = begin(
        MODEL, drafter, verify.exact(), prompts, lengths, params=weights(name), temperature=[0.0, 0.0, 1.0]
    )
    lengths_emitted = set()
    for _ in range(10):
        state, info = decode.jitted_step(decoder, weights(name), state)
        lengths_emitted |= set(info.num_emitted.tolist())
    assert {1, 2} <= lengths_emitted
    padded = np.asarray(state.tokens)
    tree, _ = jax.jit(drafter.propose)(weights(name), state.draft, draft_input(state))
    for row, tokens in enumerate(committed(state)):
        n = len(tokens)
        _, logits, cache = fresh_head(name, padded[row : row + 1], n)
        for layers, fresh_layers in ((state.draft.k, cache.k), (state.draft.v, cache.v)):
            for actual, expected in zip(layers, fresh_layers, strict=True):
                np.testing.assert_allclose(actual[row, : n - 1], expected[0, : n - 1], atol=2e-5)
        # The next draft must be that of the fresh head.
        z = np.asarray(logits)
        if "ids" in weights(name).draft:
            wide = np.full((len(z), VOCAB), -np.inf)
            wide[:, np.asarray(weights(name).draft["ids"])] = z
            z = wide
        if HEADS[name].markov_rank:
            correction = head.markov(weights(name).draft, jnp.asarray([[tokens[-1]]]))
            z = z[:1] + np.asarray(correction)[0]
        elif shape == "chain":
            np.testing.assert_array_equal(tree.tokens[row, 1:], np.argmax(z, axis=1))
        width = 1 if shape == "chain" else 3
        best = np.argsort(-z[0], kind="stable")[:width]
        children = tree.tokens[row][tree.parents[row] == 0]
        assert set(children.tolist()) <= set(best.tolist()) and best[0] in children

    while not bool(jnp.all(state.done)):
        state, _ = decode.jitted_step(decoder, weights(name), state)
    # The sampled row is equal too, since its draws are keyed by position.
    assert committed(state) == committed(decode_without_draft((0.0, 0.0, 1.0)))


@functools.cache
def decode_without_draft(temperature):
    prompts, lengths = ragged(LENGTHS, 64, VOCAB)
    params = weights("dflash")._replace(draft=())
    return decode_all(
        MODEL, drafters.none(), verify.exact(), prompts, lengths, params=params, temperature=list(temperature)
    )[0]


@functools.cache
def pair_counts(name=None, shape="chain"):
    """Count the pairs of tokens at positions 5 and 6 over 6,000 rows, with a sampled draft or without one."""
    rows = 6000
    prompts, lengths = (jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in ragged([5], 8, VOCAB))
    params, drafter, rule = weights("dflash")._replace(draft=()), drafters.none(), verify.exact()
    if name is not None:
        drafter, rule = dflash(HEADS[name], MODEL, 2, tree=SHAPES[shape], sample=True), verify.rejection()
        params = weights(name)
    seeds = range(rows, 2 * rows) if name is None else None
    state, stats = decode_all(
        MODEL, drafter, rule, prompts, lengths, params=params, seeds=seeds, temperature=0.8, top_k=6
    )
    assert name is None or int(jnp.sum(stats.accepted_exact)) > rows // 4
    tokens = np.asarray(state.tokens)
    return np.bincount(tokens[:, 5] * VOCAB + tokens[:, 6], minlength=VOCAB * VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("dflash", "chain"), ("dspark", "chain"), ("dflash", "dynamic tree")]
)
def test_at_temperature_1_each_token_follows_the_targets_distribution(name, shape):
    drafted, undrafted = pair_counts(name, shape), pair_counts()
    used = drafted + undrafted >= 10
    chi = np.sum((drafted - undrafted)[used] ** 2 / (drafted + undrafted)[used])
    freedom = used.sum() - 1
    assert chi < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_draft_stop_ends_a_draft_by_entropy_or_by_what_the_confidence_head_says(name):
    prompts, lengths = ragged(LENGTHS, 32, VOCAB)
    config = HEADS[name]
    drafter = dflash(config, MODEL)
    _, state = begin(MODEL, drafter, verify.exact(), prompts, lengths, params=weights(name))
    propose = jax.jit(drafter.propose)
    full_draft = np.asarray(propose(weights(name), state.draft, draft_input(state))[0].tokens)
    assert (full_draft != NO_TOKEN).all() and full_draft.shape[1] == 1 + config.drafts
    doubts = []
    for row, n in enumerate(LENGTHS):
        hidden, logits, _ = fresh_head(name, np.asarray(prompts)[row : row + 1], n)
        if config.confidence:
            previous = jnp.asarray(full_draft[row : row + 1, :-1], jnp.int32)
            log_odds = head.confidence(config, weights(name).draft, hidden, previous)
            doubts.append(1 - 1 / (1 + np.exp(-np.asarray(log_odds[0]))))
        else:
            log_q = np.asarray(jax.nn.log_softmax(logits))
            doubts.append(np.sqrt(-np.sum(np.exp(log_q) * log_q, axis=1)))
    limit = float(np.median(doubts))
    stopped = draft_input(state.replace(controls=make_controls(3, limit=32, draft_stop=limit)))
    actual = np.asarray(propose(weights(name), state.draft, stopped)[0].tokens)[:, 1:]
    certain = np.cumprod(np.asarray(doubts) <= limit, axis=1).astype(bool)
    np.testing.assert_array_equal(actual, np.where(certain, full_draft[:, 1:], NO_TOKEN))
    assert 0 < certain.sum() < certain.size


def test_a_head_that_does_not_fit_its_target_or_its_draft_is_refused():
    larger_target = language_model(ModelConfig(num_layers=1, **(SIZES | {"vocab_size": 9})))
    with pytest.raises(MarsError, match="vocabulary of 8 tokens and the target has 9"):
        dflash(HEADS["dflash"], larger_target)
    with pytest.raises(MarsError, match=r"LanguageModel\.embed"):
        dflash(HEADS["dflash"], fake.hash_model(vocab_size=VOCAB))
    with pytest.raises(MarsError, match=r"LanguageModel\.with_features"):
        dflash(HEADS["dflash"], MODEL._replace(with_features=None))
    with pytest.raises(MarsError, match=r"draft of 4 tokens in a row is longer .* drafts 3"):
        dflash(HEADS["dflash"], MODEL, tree=Dynamic(2, 4, 9))
