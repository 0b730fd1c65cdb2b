"""Phrases and equivalents: every edge of chains and trees, compared with decisions per path in Python."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, drafters, fake, hub, verify
from mars_jax.contrib.rules.equivalent import _key
from mars_jax.core.rule import evidence, for_rows
from mars_jax.core.tree import chain, static_topology
from mars_jax.core.types import DraftTree
from mars_jax.utils.errors import MarsError

BATCH, VOCAB = 3, 7


def drafted(is_chain, rng):
    if is_chain:
        return chain(jnp.asarray(rng.integers(0, VOCAB, (BATCH, 6)), jnp.int32))
    parents, depths = static_topology((2, 2, 1))
    tokens = rng.integers(0, VOCAB, (BATCH, len(parents)))
    tokens[1, 4] = -1
    columns = (tokens, [parents] * BATCH, [depths] * BATCH)
    tokens, parents, depths = (jnp.asarray(column, jnp.int32) for column in columns)
    return DraftTree(tokens=tokens, parents=parents, depths=depths, max_depth=3, is_chain=False)


@pytest.mark.parametrize("is_chain", [True, False])
@pytest.mark.parametrize("window", [0, 1, 2])
def test_a_phrase_is_what_its_tokens_cost_together(is_chain, window):
    rng = np.random.default_rng(window)
    tree = drafted(is_chain, rng)
    logits = rng.normal(size=(*tree.tokens.shape, VOCAB)).astype(np.float32)
    rule = for_rows(contrib.phrase(bound=[0.8, 2.0, 4.0], window=window), BATCH)
    relaxable = np.asarray(rule.relaxable(evidence(tree, jnp.asarray(logits))))
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)

    def cost(b, i):
        z = logits[b, parents[b, i]]
        return np.inf if tokens[b, i] < 0 or i == 0 else z.max() - z[tokens[b, i]]

    def cheapest(b, i, length):
        if length == 0:
            return cost(b, i)
        costs = [cheapest(b, j, length - 1) for j in range(1, tokens.shape[1]) if parents[b, j] == i]
        return cost(b, i) + min(costs, default=np.inf)

    bounds, edges = (0.8, 2.0, 4.0), range(tokens.shape[1])
    expected = [[cheapest(b, i, window) < bounds[b] for i in edges] for b in range(BATCH)]
    np.testing.assert_array_equal(relaxable, expected)
    assert 0 < relaxable.sum() < relaxable.size


def test_a_phrase_asks_for_drafts_that_hold_it():
    model = fake.hash_model(vocab_size=VOCAB)
    contrib.phrase(window=[9, 3]).check_drafter(drafters.language_model(model, 4))
    with pytest.raises(MarsError, match="window is 6, and this draft is 6 tokens deep"):
        contrib.phrase(window=6).check_drafter(drafters.language_model(model, 6))


@pytest.mark.parametrize("is_chain", [True, False])
def test_equivalents_stand_for_the_targets_token(is_chain):
    rng = np.random.default_rng(3)
    tree = drafted(is_chain, rng)
    logits = rng.normal(size=(*tree.tokens.shape, VOCAB)).astype(np.float32)
    groups = np.asarray([0, 1, 1, 1, 2, 2, 0], np.int32)
    rule = for_rows(contrib.equivalent(gap=[np.inf, 1.0, 0.0]), BATCH)
    relaxable = np.asarray(rule.relaxable(evidence(tree, jnp.asarray(logits), params=jnp.asarray(groups))))
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
    for b, i in itertools.product(range(BATCH), range(tokens.shape[1])):
        z, x = logits[b, parents[b, i]], tokens[b, i]
        grouped = i > 0 and x >= 0 and groups[x] == groups[z.argmax()] > 0
        same = grouped and z.max() - z[x] < (np.inf, 1.0, 0.0)[b]
        assert relaxable[b, i] == same
    assert relaxable[:2].any() and not relaxable[2].any()


def test_case_is_that_of_letters_and_changes_no_word():
    """Treat the capital sharp s as a sharp s; neither equals two letters."""
    assert _key("STRA\u1e9eE", ("case",)) == _key("straße", ("case",)) != _key("strasse", ("case",))
    assert _key("Two", ("numbers",)) == "Two" and _key(" Two", ("case", "numbers")) == " 2"


def test_groups_are_of_texts_that_are_alike(tmp_path):
    target = hub.outline("tiny/target")
    encode = target.tokenizer.encode
    words = {}
    for text in (" the", " The", "a", " a", " two", " big", " little"):
        [words[text]] = encode(text, add_special_tokens=False)
    both = np.asarray(contrib.token_groups(target, ["case", "space"]))
    assert both[words[" the"]] == both[words[" The"]] > 0 and both[words["a"]] == both[words[" a"]] > 0
    assert both[words[" the"]] != both[words["a"]] != both[words[" big"]]
    cased = np.asarray(contrib.token_groups(target, ["case"]))
    assert cased[words[" the"]] == cased[words[" The"]] > 0 and cased[words["a"]] != cased[words[" a"]]
    file = tmp_path / "same.json"
    file.write_text(json.dumps({"groups": [[" big", " little"]]}))
    loaded = verify.load(f"equivalent:{file}", target, gap=1.0)
    groups = np.asarray(loaded.params)
    assert groups[words[" big"]] == groups[words[" little"]] > 0 and (groups > 0).sum() == 2
    with pytest.raises(MarsError, match="cannot be read"):
        verify.load(f"equivalent:{tmp_path}/none.json", target)
    with pytest.raises(MarsError, match="needs weights: name them, as equivalent:PATH"):
        verify.load("equivalent", target)
    with pytest.raises(MarsError, match="which is not one token"):
        contrib.token_groups(target, groups=[["extraordinarily", " big"]])


@pytest.mark.slow
def test_a_strict_span_takes_no_other_guard_away():
    """Never relax padding, stop tokens or tokens of the exact prefix, with or without spans."""
    tree = drafted(False, np.random.default_rng(0))
    rule = for_rows(contrib.equivalent(gap=np.inf, exact_prefix=2), BATCH)
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(*tree.tokens.shape, VOCAB)), jnp.float32)
    options = {"stop_tokens": (1, 4), "params": jnp.ones((VOCAB,), jnp.int32)}
    free = rule.guarded(evidence(tree, logits, **options))
    nowhere, everywhere = jnp.zeros(tree.tokens.shape, bool), jnp.ones(tree.tokens.shape, bool)
    assert 0 < free.sum() < free.size
    np.testing.assert_array_equal(rule.guarded(evidence(tree, logits, strict_nodes=nowhere, **options)), free)
    assert not rule.guarded(evidence(tree, logits, strict_nodes=everywhere, **options)).any()
