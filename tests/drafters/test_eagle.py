"""The EAGLE drafter: lossless, with the state and the drafts of a freshly run head."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2_contingency

from mars_jax import drafters, verify
from mars_jax.core import decode, fake
from mars_jax.core.types import Params, Visible
from mars_jax.drafters.eagle import FeatureDrafter, eagle
from mars_jax.drafters.tree_shapes import Dynamic
from mars_jax.models import ModelConfig, language_model
from mars_jax.models import eagle_head as head
from mars_jax.models.config import Delta
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.mtp_head import MtpConfig
from mars_jax.models.transformer import init_params
from mars_jax.utils.errors import MarsError
from tests.helpers import begin, committed, decode_all, draft_input, ragged, slow_but

VOCAB = 8  # small, so that a random head is sometimes right
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_kv_heads": 1}
CONFIG = ModelConfig(num_layers=3, **SIZES)
MODEL = language_model(CONFIG)
DELTA = Delta(layers=(0, 2), key_heads=2, value_heads=4, key_dim=8, value_dim=6)
RECURRENT = dataclasses.replace(CONFIG, family="qwen3_5_text", delta=DELTA, attention_gate=True)
LAYER = ModelConfig(num_layers=1, **SIZES)
HEADS = {
    "eagle-3": EagleConfig(
        version=3, layer=LAYER, target_hidden_size=16, draft_vocab_size=6, feature_layers=(0, 1, 2)
    ),
    "eagle-1": EagleConfig(
        version=1, layer=LAYER, target_hidden_size=16, draft_vocab_size=VOCAB, own_unembed=False
    ),
    "mtp": MtpConfig.outline(CONFIG),
    "recurrent mtp": MtpConfig.outline(RECURRENT),
}
SHAPES = {"chain": None, "static tree": (3, 2, 1), "dynamic tree": Dynamic(3, 3, 9)}
CASES = [*itertools.product(list(HEADS)[:3], SHAPES), ("recurrent mtp", "chain")]
LENGTHS = [1, 2, 17]


def config_of(name):
    """Return the config of a head's target."""
    return RECURRENT if name.startswith("recurrent") else CONFIG


@functools.cache
def weights(name):
    params = head.init_params(HEADS[name], jax.random.key(3), scale=0.3)
    if "ids" in params:
        params["ids"] = jnp.asarray([0, 2, 3, 5, 6, 7], jnp.int32)  # neither the first ids nor all
    return Params(target=init_params(config_of(name), jax.random.key(0), scale=0.3), draft=params)


@functools.partial(jax.jit, static_argnums=0)
def run_fresh(name, tokens):
    """Run the head over a whole text i32[1, n] at once, after the target; return hidden states, logits and cache."""
    config, params, n = HEADS[name], weights(name), tokens.shape[1]
    model = language_model(config_of(name), feature_layers=config.feature_layers)
    visible = Visible.causal(jnp.zeros((1,), jnp.int32), n)
    output = model.forward(params.target, tokens, visible, model.init_cache(1, n))
    cache = config.init_cache(1, n, "float32")
    feature = config.fuse(params.draft, output)
    following = jnp.roll(tokens, -1, axis=1)  # the last entry is wrong, and not used
    hidden, cache = config.forward(model, params, feature, following, visible, cache)
    logits = config.widen(params, config.logits(model, params, hidden))
    return hidden[0], logits[0], cache


@pytest.mark.parametrize(("name", "shape"), slow_but(CASES, ("eagle-3", "chain")))
def test_it_is_lossless_and_its_cache_is_that_of_a_head_run_afresh(name, shape):
    """Run ten rounds of mixed acceptance with greedy rows and a sampled one, then decode the rest of the text."""
    prompts, lengths = ragged(LENGTHS, 64, VOCAB)
    target = language_model(config_of(name))
    drafter = FeatureDrafter(HEADS[name], target, 3, tree=SHAPES[shape])
    settings = {"params": weights(name), "temperature": [0.0, 0.0, 1.0]}
    decoder, state = begin(target, drafter, verify.exact(), prompts, lengths, **settings)
    state, stats = decode.run(decoder, weights(name), state, max_steps=10)
    assert np.all(np.asarray(stats.depth_histogram).sum(0)[:2] > 0), "rejected and accepted drafts"
    padded = np.asarray(state.tokens)
    for row, tokens in enumerate(committed(state)):
        n = len(tokens)
        hidden, logits, cache = run_fresh(name, padded[row : row + 1])
        np.testing.assert_allclose(state.draft.feature[row, 0], hidden[n - 2], atol=2e-5)
        for cached, fresh in ((state.draft.cache.k, cache.k), (state.draft.cache.v, cache.v)):
            np.testing.assert_allclose(cached[0][row, : n - 1], fresh[0][0, : n - 1], atol=2e-5)

    # The next draft must be that of the freshly run head.
    tree, _ = jax.jit(drafter.propose)(weights(name), state.draft, draft_input(state))
    width = 1 if shape == "chain" else 3
    for row, n in enumerate(state.length.tolist()):
        _, logits, _ = run_fresh(name, padded[row : row + 1])
        best = np.argsort(-np.asarray(logits[n - 2]), kind="stable")[:width]
        children = tree.tokens[row][tree.parents[row] == 0]
        assert set(children.tolist()) <= set(best.tolist()) and best[0] in children

    # With a limit, because the program with one is already compiled.
    state, _ = decode.run(decoder, weights(name), state, max_steps=1000)
    settings["params"] = settings["params"]._replace(draft=())
    oracle, _ = decode_all(target, drafters.none(), verify.exact(), prompts, lengths, **settings)
    # This includes the sampled row, since its draws are keyed by position.
    assert committed(state) == committed(oracle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tree", "settings"),
    [
        ("eagle-3", None, {"temperature": 0.8, "top_k": 6}),
        ("mtp", None, {"temperature": 1.0}),
        ("mtp", (2, 1), {"temperature": 1.0}),
        ("recurrent mtp", None, {"temperature": 0.8, "top_k": 6}),
    ],
)
def test_rejection_of_a_sampled_draft_leaves_the_targets_distribution(name, tree, settings):
    """Compare the second new token given the first, which a wrong q would change."""
    rows = 6000
    prompts, lengths = (jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in ragged([5], 8, VOCAB))
    target = language_model(config_of(name))
    params, drafter = weights(name), FeatureDrafter(HEADS[name], target, 2, tree=tree, sample=True)
    batch = (prompts, lengths)
    state, stats = decode_all(target, drafter, verify.rejection(), *batch, params=params, **settings)
    params = params._replace(draft=())
    seeds = range(rows, 2 * rows)
    oracle, _ = decode_all(
        target, drafters.none(), verify.exact(), *batch, params=params, seeds=seeds, **settings
    )
    assert int(jnp.sum(stats.accepted_exact)) > rows // 4
    pairs = (np.asarray(run.tokens)[:, 5] * VOCAB + np.asarray(run.tokens)[:, 6] for run in (state, oracle))
    drafted, expected = (np.bincount(pair, minlength=VOCAB * VOCAB) for pair in pairs)
    common = drafted + expected >= 10
    assert chi2_contingency([drafted[common], expected[common]]).pvalue > 1e-4


def test_a_head_that_does_not_fit_its_target_is_refused():
    larger = language_model(ModelConfig(num_layers=1, **(SIZES | {"vocab_size": 9})))
    with pytest.raises(MarsError, match="vocabulary of 8 tokens and the target has 9"):
        eagle(HEADS["eagle-1"], larger)
    with pytest.raises(MarsError, match=r"LanguageModel\.embed"):
        eagle(HEADS["eagle-1"], fake.hash_model(vocab_size=VOCAB))
    with pytest.raises(MarsError, match=r"LanguageModel\.with_features"):
        eagle(HEADS["eagle-3"], MODEL._replace(with_features=None))
