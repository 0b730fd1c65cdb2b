"""Rejection over siblings drawn without replacement: exact enumeration, and chi-square of completions."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, drafters, verify
from mars_jax.core import tree as trees
from mars_jax.core.types import NO_TOKEN, DraftTree
from mars_jax.drafters.draw import draw_siblings
from mars_jax.utils.errors import MarsError
from mars_jax.verify.siblings import descend
from tests.helpers import judge, rule_oracles
from tests.helpers.sampled_chains import probabilities
from tests.helpers.sampled_texts import SMALL, TARGET, law, sampled

VOCAB = 3


def sequences_without_replacement(q, count):
    """Yield every ordered draw of `count` tokens from q without replacement, with its probability."""
    for drawn in itertools.permutations(range(len(q)), count):
        chance, remaining = 1.0, 1.0
        for token in drawn:
            chance *= q[token] / remaining if remaining > 0 else 0.0
            remaining -= q[token]
        yield drawn, chance


def python_node(p, q, drawn, deterministic):
    """Return the float64 threshold of each sibling in turn."""
    p, q, thresholds = p.copy(), q.copy(), []
    for token in drawn:
        draft_law = np.eye(len(p))[token] if deterministic else q
        thresholds.append(min(1.0, p[token] / draft_law[token]))
        p = np.maximum(p - draft_law, 0)
        p = p / p.sum() if p.sum() > 1e-12 else p
        q = q.copy()
        q[token] = 0
        q /= max(q.sum(), 1e-300)
    return thresholds


def cells(thresholds):
    """Yield (chance, index of the accepted sibling or None, uniforms near the thresholds) of each cell."""
    chance, uniforms = 1.0, []
    for index, threshold in enumerate(thresholds):
        yield chance * threshold, index, [*uniforms, threshold * (1 - 1e-4)]
        chance, uniforms = chance * (1 - threshold), [*uniforms, threshold + (1 - threshold) * 1e-4]
    yield chance, None, uniforms


@pytest.mark.parametrize(
    ("branching", "deterministic"), [((2, 2), False), ((3, 1), False), ((1, 3), False), ((2, 2), True)]
)
def test_enumeration_gives_the_target_distribution(branching, deterministic):
    """Sum over drafts of two levels, cells of the uniforms and emitted tokens; the target completes the sequences."""
    p = probabilities(rule_oracles.tables(0, VOCAB, 3))
    q = probabilities(rule_oracles.tables(9, VOCAB, 2, 1.0))
    parents, depths = trees.static_topology(branching)
    fixed = (1, 0, 2)
    rows = []  # chance, tokens of the tree, uniforms [2, 3], accepted tokens

    def draws(law, count):
        return [(fixed[:count], 1.0)] if deterministic else sequences_without_replacement(law, count)

    for first, chance in draws(q[0], branching[0]):
        second_draws = [list(draws(q[1][token], branching[1])) for token in first]
        for second in itertools.product(*second_draws):
            tokens = [0, *first, *(token for drawn, _ in second for token in drawn)]
            drafted = chance * np.prod([c for _, c in second])
            thresholds = python_node(p[0], q[0], first, deterministic)
            for outer_chance, index, uniforms in cells(thresholds):
                numbers = np.ones((2, 3))
                numbers[0, : len(uniforms)] = uniforms
                if index is None:
                    rows.append((drafted * outer_chance, tokens, numbers, ()))
                    continue
                token = first[index]
                deeper = python_node(p[1][token], q[1][token], second[index][0], deterministic)
                for inner_chance, inner, inner_uniforms in cells(deeper):
                    numbers = numbers.copy()
                    numbers[1] = 1.0
                    numbers[1, : len(inner_uniforms)] = inner_uniforms
                    path = (token,) if inner is None else (token, second[index][0][inner])
                    rows.append((drafted * outer_chance * inner_chance, tokens, numbers, path))
    rows = [row for row in rows if row[0] > 0]
    tokens = jnp.asarray([row[1] for row in rows], jnp.int32)
    q_nodes = np.zeros((len(rows), tokens.shape[1], VOCAB), np.float32)
    p_nodes = np.zeros_like(q_nodes)
    drafted = np.asarray(tokens)
    for node, (parent, depth) in enumerate(zip(parents, depths, strict=True)):
        prefix = [drafted[:, node]] if depth == 1 else [drafted[:, parent], drafted[:, node]][:depth]
        p_nodes[:, node] = np.log(p[depth][tuple(prefix)])
        if depth < 2:
            q_nodes[:, node] = np.log(q[depth][tuple(prefix)])
    spread = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.int32), tokens.shape)  # noqa: E731
    tree = DraftTree(
        tokens=tokens, parents=spread(parents), depths=spread(depths), max_depth=2, is_chain=False,
        draft_logits=None if deterministic else jnp.asarray(q_nodes),
    )  # fmt: skip
    numbers = jnp.asarray(np.asarray([row[2] for row in rows]), jnp.float32)

    def uniform(rank, depth):
        return jax.vmap(lambda u, r, d: u[d - 1, r])(numbers, rank, depth)

    stop, residual = jax.jit(functools.partial(descend, uniform=uniform))(
        tree, jnp.asarray(p_nodes), start=jnp.zeros((len(rows),), jnp.int32)
    )
    residual = np.asarray(residual, np.float64)
    residual /= residual.sum(-1, keepdims=True)
    target = rule_oracles.sequence_probabilities(p)
    joint = np.zeros_like(target)
    for row, (chance, _, _, path) in enumerate(rows):
        walked, node = [], int(stop[row])
        while node:
            walked.insert(0, int(drafted[row, node]))
            node = int(parents[node])
        assert tuple(walked) == path
        marginal = target[path].sum(tuple(range(1, 3 - len(path))), keepdims=True)
        emitted = residual[row].reshape((VOCAB,) + (1,) * (2 - len(path)))
        joint[path] += chance * emitted * target[path] / marginal
    np.testing.assert_allclose(joint, target, atol=2e-6)


def test_siblings_are_drawn_without_replacement_in_their_order():
    """Compare filtered draws of two of four tokens with the law of sequential draws."""
    rows, logits = 20_000, jnp.asarray([[1.0, 0.3, -0.5, 0.9]])
    row_settings = [(0.7, 0, 1.0, 0.0), (1.3, 3, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0)]
    settings = rule_oracles.controls_of([row_settings[row % 4] for row in range(rows)])
    drawn = jax.jit(functools.partial(draw_siblings, k=2))(
        jnp.broadcast_to(logits, (rows, 1, 4)), keys=rule_oracles.keys_of(0, rows), controls=settings
    )
    ids = np.asarray(drawn.ids)[:, 0]
    for s, row in enumerate(row_settings[:2]):
        q = rule_oracles.processed_tables([np.asarray(logits[0])], row)[0]
        joint = np.zeros((4, 4))
        for pair, chance in sequences_without_replacement(q, 2):
            joint[pair] = chance
        assert rule_oracles.chi_square(ids[s::4], joint) > 1e-3
    assert np.all(ids[2::4] == [0, 3]), "a greedy row takes the best tokens"
    assert np.all(ids[3::4] == [0, NO_TOKEN]), "a filter that keeps one token gives one child"


@pytest.mark.slow
@pytest.mark.parametrize("tree", [(2, 2), drafters.Dynamic(top_k=3, depth=2, nodes=6)], ids=str)
def test_text_under_a_mixture_follows_the_mixture(tree):
    """Check only the first token, which always has a draft. After a draft, the rule emits from p."""
    drafter = drafters.language_model(SMALL, tree=tree, sample=True)
    text, _ = sampled(drafter, verify.mixture(weight=0.5))
    assert rule_oracles.chi_square(text[:, :1], (law(TARGET)[0] + law(SMALL)[0]) / 2) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        verify.mars(base=verify.rejection(block=True), theta=2.3, margin="gap", exact_prefix=2),
        verify.mixture(weight=0.2, block=True, exact_prefix=2),
    ],
    ids=["relaxing", "retargeted"],
)
def test_by_blocks_the_first_tokens_follow_the_target_and_the_next_does_not(rule):
    text, tau = sampled(drafters.language_model(SMALL, 3, sample=True), rule)
    target = rule_oracles.sequence_probabilities(law(TARGET))
    assert rule_oracles.chi_square(text[:, :2], target.sum(2)) > 1e-3
    # The third token deviates by far more than the noise of 12,000 draws.
    assert np.abs(np.bincount(text[:, 2], minlength=6) / len(text) - target.sum((0, 1))).sum() > 0.05
    assert tau > 1.3


CHAINS_ONLY = [verify.rejection(block=True), contrib.cactus(), verify.mixture(block=True)]


def on_a_tree(rule, drawn):
    """Return the verdict on a tree of three nodes, with or without q."""
    tree = trees.chain(jnp.zeros((1, 3), jnp.int32)).replace(is_chain=False)
    if drawn:
        tree = tree.replace(draft_logits=jnp.zeros((1, 3, 4)))
    controls = rule_oracles.controls_of([(1.0, 0, 1.0, 0.0)])
    return jax.jit(judge(rule))(rule_oracles.keys_of(0, 1), tree, jnp.zeros((1, 3, 4)), controls)


@pytest.mark.parametrize("rule", CHAINS_ONLY, ids=lambda rule: rule.name)
def test_a_rule_of_chains_refuses_a_tree(rule):
    with pytest.raises(MarsError, match=r"chain.*exact\(\) or rejection\(\)"):
        on_a_tree(rule, drawn=True)


def test_a_rule_that_needs_q_refuses_a_tree_without_it():
    with pytest.raises(MarsError, match=r"mixture needs a sampled tree.*sample=True"):
        on_a_tree(verify.mixture(), drawn=False)
    assert on_a_tree(verify.rejection(), drawn=False).num_accepted.shape == (1,)
