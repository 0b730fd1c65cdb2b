"""Token-wise and block verification: compared with exact enumeration, and by chi-square through the whole rule."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.core import tree as trees
from mars_jax.core.types import NO_TOKEN
from mars_jax.verify import rejection
from mars_jax.verify.rejection import _block_stop, _Ratios, _token_stop
from tests.helpers import rule_oracles, slow_but, verdict_of
from tests.helpers.sampled_chains import probabilities, sampled_chain


def python_rule(block, p, q, drafted):
    """Compute in float64, along one draft, the thresholds of nodes 1..K and the residual weights of nodes 0..K."""
    depth = len(drafted)
    p = [p[i][drafted[:i]] for i in range(depth + 1)]
    q = [q[i][drafted[:i]] for i in range(depth)]
    r, thresholds, residuals = 1.0, [], []
    for i, x in enumerate(drafted):
        residuals.append(np.maximum(r * p[i] - q[i], 0))
        if not block:
            thresholds.append(min(p[i][x] / q[i][x], 1.0))
            continue
        r = min(r * p[i][x] / q[i][x], 1.0)
        mass = np.maximum(r * p[i + 1] - q[i + 1], 0).sum() if i + 1 < depth else 0.0
        certain = 1 - r < 1e-12  # then m / (m + 1 - r) is 1, or 0 / 0 if no mass is left
        thresholds.append(r if i + 1 == depth else 1.0 if certain else mass / (mass + 1 - r))
    return thresholds, [*residuals, p[depth]]


def python_cases(block, p, q, deterministic):
    """Yield (probability, draft, uniforms near thresholds, stop node, residual weights) per cell of every draft."""
    vocab, depth = p[0].size, len(q)
    for drafted in itertools.product(range(vocab), repeat=depth):
        if deterministic and drafted != (1, 0, 2)[:depth]:
            continue
        one_hot_q = [np.broadcast_to(np.eye(vocab)[x], t.shape) for x, t in zip(drafted, q, strict=True)]
        thresholds, residuals = python_rule(block, p, one_hot_q if deterministic else q, drafted)
        chance = 1.0 if deterministic else np.prod([q[i][drafted[: i + 1]] for i in range(depth)])
        for accepted in itertools.product((True, False), repeat=depth):
            sides = list(zip(accepted, thresholds, strict=True))
            weight = chance * np.prod([t if b else 1 - t for b, t in sides])
            uniforms = [t * (1 - 1e-4) if b else t + (1 - t) * 1e-4 for b, t in sides]
            stop = max(np.flatnonzero([True, *accepted])) if block else [*accepted, False].index(False)
            yield weight, drafted, uniforms, stop, residuals[stop]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("vocab", "depth"), [(5, 1), (4, 2), (3, 3)])
def test_enumeration_gives_the_target_distribution_and_block_accepts_no_less(vocab, depth, deterministic):
    """Sum over drafts, cells of the uniforms and emitted tokens; the target completes the sequences.

    The reference gives the probabilities of the cells. The rule runs 1e-4 from each threshold, on both sides.
    """
    mean_accepted = {}
    for block, seed in itertools.product((False, True), range(2)):
        p_logits = rule_oracles.tables(seed, vocab, depth + 1)
        q_logits = rule_oracles.tables(seed + 50, vocab, depth, 1.0)
        p = probabilities(p_logits)
        cases = python_cases(block, p, probabilities(q_logits), deterministic)
        weights, drafted, uniforms, stops, residuals = (np.asarray(x) for x in zip(*cases, strict=True))
        rows = len(weights)
        assert abs(weights.sum() - 1) < 1e-9
        logits = np.stack([rule_oracles.after(p_logits, drafted[:, :i]) for i in range(depth + 1)], 1)
        # The last node's q is never read, so NaN must have no effect.
        unread = [np.full((rows, vocab), np.nan, np.float32)]
        q = np.stack([rule_oracles.after(q_logits, drafted[:, :i]) for i in range(depth)] + unread, 1)
        tokens = jnp.asarray(np.pad(drafted, ((0, 0), (1, 0))), jnp.int32)
        tree = trees.chain(tokens, None if deterministic else jnp.asarray(q))
        uniforms = jnp.asarray(np.pad(uniforms, ((0, 0), (1, 0))), "float32")
        stop, emit = stretch(block, tree, jnp.asarray(logits), uniforms)
        joint, target = np.zeros((vocab,) * (depth + 1)), rule_oracles.sequence_probabilities(p)
        for c in np.flatnonzero(weights > 1e-9):
            assert stop[c] == stops[c], drafted[c]
            np.testing.assert_allclose(emit[c], residuals[c] / residuals[c].sum(), atol=1e-4)
            prefix = tuple(drafted[c, : stops[c]])
            # The target draws the tokens after the emitted one.
            num_later = depth - stops[c]
            marginal = target[prefix].sum(tuple(range(1, num_later + 1)), keepdims=True)
            emitted = emit[c].reshape((vocab,) + (1,) * num_later)
            joint[prefix] += weights[c] * emitted * target[prefix] / marginal
        np.testing.assert_allclose(joint, target, atol=2e-6)
        mean_accepted[block, seed] = (weights * stops).sum()
    for seed in range(2):
        gain = mean_accepted[True, seed] - mean_accepted[False, seed]
        assert gain > -1e-9
        assert depth == 1 or deterministic or gain > 1e-4


@functools.partial(jax.jit, static_argnums=0)
def stretch(block, tree, logits, uniforms):
    """Return the node at which the rule stops for the uniforms, and the distribution f32[B, V] of its next token."""
    ratios = _Ratios.of(tree, logits)
    rule = _block_stop if block else _token_stop
    stop, scale = rule(ratios, uniforms, jnp.zeros(tree.tokens.shape[:1], jnp.int32))
    weights = ratios.residual(stop, scale)
    return stop, weights / jnp.sum(weights, axis=-1, keepdims=True)


@pytest.mark.parametrize("block", slow_but([False, True], True))
def test_rejection_leaves_the_target_distribution(block):
    """Mix all settings, greedy rows and rows with a padded tail in one batch."""
    vocab, rows = 4, 18_000
    choices = [*rule_oracles.SETTINGS, (0.0, 0, 1.0, 0.0)]
    settings = rule_oracles.controls_of([choices[b % 6] for b in range(rows)])
    p_table, q_table = rule_oracles.tables(21, vocab, 3), rule_oracles.tables(22, vocab, 2)
    tree, drafted = sampled_chain(rule_oracles.keys_of(1, rows), q_table, settings, rows)
    logits = jnp.asarray(np.stack([rule_oracles.after(p_table, drafted[:, :i]) for i in range(3)], 1))
    padded = np.arange(rows) // 6 % 4 == 0
    tree = tree.replace(tokens=tree.tokens.at[:, 2].set(jnp.where(padded, NO_TOKEN, tree.tokens[:, 2])))
    verdict = verdict_of(rejection(block=block), rule_oracles.keys_of(2, rows), tree, logits, settings)
    assert np.all(np.asarray(verdict.num_accepted)[padded] <= 1) and not np.any(verdict.relaxed)
    out, count = rule_oracles.emitted(tree.tokens, verdict)
    assert np.mean(count) > 1.3, "no drafts are accepted"
    for s, row in enumerate(choices):
        p = rule_oracles.processed_tables(p_table, row)
        sequences = rule_oracles.complete(np.random.default_rng(s), out[s::6], count[s::6], p)
        joint = rule_oracles.sequence_probabilities(p)
        if row[0] == 0:
            assert np.all(sequences == np.unravel_index(np.argmax(joint), joint.shape))
        else:
            assert rule_oracles.chi_square(sequences, joint) > 1e-3, row


@pytest.mark.parametrize("block", slow_but([False, True], True))
def test_a_token_that_neither_model_allows_is_refused(block):
    settings = rule_oracles.controls_of([(1.0, 2, 1.0, 0.0)] * 8)
    logits = jnp.tile(jnp.asarray([[[3.0, 2.0, 1.0]]]), (8, 3, 1))
    tree = trees.chain(jnp.asarray([[0, 2, 0]] * 8, jnp.int32), rule_oracles.process(logits, settings))
    verdict = verdict_of(rejection(block=block), rule_oracles.keys_of(0, 8), tree, logits, settings)
    assert verdict.num_accepted.tolist() == [0] * 8 and np.all(np.asarray(verdict.next_token) < 2)
