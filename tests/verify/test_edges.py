"""Rules over edges, compared with transformers' warpers, scipy's entropies, and decisions per node in Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from mars_jax import contrib, drafters, verify
from mars_jax.core import fake
from mars_jax.core import tree as trees
from mars_jax.core.rule import for_rows
from mars_jax.core.types import DraftTree
from mars_jax.utils.errors import MarsError
from tests.helpers import rule_oracles, verdict_of

VOCAB, ROWS, NODES = 12, 60, 7


@functools.cache
def case(chain: bool):
    """Return random trees with half of their tokens among the target's best, and logits of varied entropy."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, rng.choice([0.3, 1.0, 3.0], (ROWS, NODES, 1)), (ROWS, NODES, VOCAB))
    best = np.argsort(-logits, axis=-1)
    parents = np.tile(np.arange(NODES) - 1 if chain else [-1, 0, 0, 1, 1, 2, 4], (ROWS, 1))
    depths = np.arange(NODES) if chain else np.asarray([0, 1, 1, 2, 2, 2, 3])
    rank = np.where(rng.random((ROWS, NODES)) < 0.5, rng.integers(0, 4, (ROWS, NODES)), VOCAB - 1)
    rank[rng.random((ROWS, NODES)) < 0.3] = 0
    tokens = np.take_along_axis(
        np.take_along_axis(best, np.maximum(parents, 0)[..., None], 1), rank[..., None], 2
    )[..., 0]
    tree = DraftTree(
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.asarray(parents, jnp.int32),
        depths=jnp.broadcast_to(jnp.asarray(depths, jnp.int32), (ROWS, NODES)),
        max_depth=int(depths.max()),
        is_chain=chain,
    )
    return tree, jnp.asarray(logits, jnp.float32)


both = pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])


def relaxable(rule, tree, logits, **controls):
    """Return bool[B, N - 1]: the relaxable edges below the root."""
    return np.asarray(relaxable_nodes(for_rows(rule, ROWS), tree, logits, **controls))[:, 1:]


@functools.partial(jax.jit, static_argnames=("temperature", "top_k"))
def relaxable_nodes(rule, tree, logits, **controls):
    return rule.relaxable(verify.evidence(tree, logits, **controls))


@jax.jit
def greedy_step(rule, tree, logits):
    return rule(verify.evidence(tree, logits))


def at_edges(tree, per_node):
    """Gather [B, N, V] at the parent of each drafted token and the token itself: [B, N - 1]."""
    tokens, parents = np.asarray(tree.tokens)[:, 1:], np.asarray(tree.parents)[:, 1:]
    return np.asarray(per_node)[np.arange(ROWS)[:, None], parents, tokens]


def warped(logits, *warpers):
    """Return bool[B, N, V]: the tokens that transformers' warpers keep."""
    scores = pytest.importorskip("torch").tensor(np.asarray(logits)).reshape(-1, VOCAB)
    for warper in warpers:
        scores = warper(None, scores)
    return np.isfinite(scores.numpy()).reshape(logits.shape)


def assert_equal_and_mixed(actual, expected):
    np.testing.assert_array_equal(actual, expected)
    assert 0.05 < np.mean(expected) < 0.95


@pytest.fixture(scope="module")
def warpers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


@both
@pytest.mark.parametrize(("k", "delta"), [(1, 9.0), (10, 0.6), (3, 1.0)])
def test_topk_lets_through_the_best_k_within_delta(chain, k, delta, warpers):
    tree, logits = case(chain)
    min_p = warpers.MinPLogitsWarper(float(np.exp(-delta)))
    expected = at_edges(tree, warped(logits, warpers.TopKLogitsWarper(k), min_p))
    assert_equal_and_mixed(relaxable(verify.topk(k=k, delta=delta), tree, logits), expected)


@both
@pytest.mark.parametrize("theta", [0.05, 0.3, 0.7])
def test_adaptive_lets_through_what_min_p_keeps(chain, theta, warpers):
    tree, logits = case(chain)
    expected = at_edges(tree, warped(logits, warpers.MinPLogitsWarper(theta)))
    assert_equal_and_mixed(relaxable(verify.adaptive(theta=theta), tree, logits), expected)


@both
@pytest.mark.parametrize("epsilon", [0.09, 0.01, 0.25])
def test_typical_lets_through_what_eta_sampling_keeps(chain, epsilon, warpers):
    """Eta sampling is typical acceptance with delta = sqrt(epsilon), except that it always keeps the best token."""
    tree, logits = case(chain)
    expected = at_edges(tree, warped(logits, warpers.EtaLogitsWarper(epsilon, device="cpu")))
    edges = relaxable(verify.typical(epsilon=epsilon, delta=epsilon**0.5), tree, logits)
    assert_equal_and_mixed(edges | at_edges(tree, best_tokens(logits)), expected)
    if epsilon == 0.09:
        np.testing.assert_array_equal(edges, relaxable(verify.typical(), tree, logits))


@both
@pytest.mark.parametrize("mass", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_nucleus_lets_through_what_top_p_keeps_of_the_processed_target(chain, mass, temperature, warpers):
    tree, logits = case(chain)
    filters = warpers.TemperatureLogitsWarper(temperature), warpers.TopKLogitsWarper(5)
    expected = at_edges(tree, warped(logits, *filters, warpers.TopPLogitsWarper(mass)))
    rule = verify.nucleus(base=verify.exact(), mass=mass)
    assert_equal_and_mixed(relaxable(rule, tree, logits, temperature=temperature, top_k=5), expected)
    # At temperature 0 only the best token remains.
    np.testing.assert_array_equal(relaxable(rule, tree, logits), at_edges(tree, best_tokens(logits)))


def best_tokens(logits):
    """Return bool[B, N, V]: the target's best tokens."""
    return np.asarray(logits) == np.asarray(logits).max(-1, keepdims=True)


@both
def test_the_entropy_gate_opens_by_scipys_entropy(chain):
    tree, logits = case(chain)
    best = np.argsort(-np.asarray(logits), axis=-1)[..., :2]
    nats = scipy.stats.entropy(scipy.special.softmax(np.asarray(logits, float), axis=-1), axis=-1)
    runner_up = (np.arange(VOCAB) == best[..., :1]) | (np.arange(VOCAB) == best[..., 1:])
    expected = at_edges(tree, runner_up & (nats > 1.9)[..., None])
    assert_equal_and_mixed(relaxable(contrib.entropy_gate(entropy=1.9), tree, logits), expected)


def is_uncertain(z, threshold):
    """Compare the entropy of the three largest probabilities, not renormalised, with the threshold."""
    p = np.sort(scipy.special.softmax(np.asarray(z, float)))[-3:]
    return scipy.special.entr(p).sum() >= threshold


@both
@pytest.mark.parametrize("window", [0, 1, 2])
def test_fly_lets_through_what_is_followed_by_the_targets_own_tokens(chain, window):
    tree, logits = case(chain)
    tokens, parents, z = (np.asarray(x) for x in (tree.tokens, tree.parents, logits))

    def continues(b, node, count):
        """Return whether `count` drafted tokens in a row below a node are the target's."""
        children = [
            c for c in range(1, NODES) if parents[b, c] == node and tokens[b, c] == z[b, node].argmax()
        ]
        return count == 0 or any(continues(b, child, count - 1) for child in children)

    def is_relaxable(b, i):
        return is_uncertain(z[b, parents[b, i]], 0.8) and continues(b, i, window)

    expected = [[is_relaxable(b, i) for i in range(1, NODES)] for b in range(ROWS)]
    np.testing.assert_array_equal(relaxable(contrib.fly(entropy=0.8, window=window), tree, logits), expected)
    assert np.any(expected) and not np.all(expected)


def test_fly_refuses_a_draft_shorter_than_its_window():
    model = fake.hash_model(vocab_size=VOCAB)
    contrib.fly(window=[9, 3]).check_drafter(drafters.language_model(model, 4))
    with pytest.raises(MarsError, match=r"window is 6, and this draft is 6 tokens deep.*smaller window"):
        contrib.fly().check_drafter(drafters.language_model(model, 6))


def python_budget_step(tree, logits, gap, max_relaxed, total):
    """Run one greedy step of ASD in Python; return the accepted tokens and the remaining budget of each row."""
    tokens, parents, z = (np.asarray(x) for x in (tree.tokens, tree.parents, logits))
    out = []
    for b in range(ROWS):
        node, remaining, relaxed, accepted = 0, np.float32(total), 0, []
        for i in range(tree.max_depth):
            children = [c for c in range(1, NODES) if parents[b, c] == node]
            exact = [c for c in children if tokens[b, c] == z[b, node].argmax()]
            regret = {c: z[b, node].max() - z[b, node, tokens[b, c]] for c in children}
            bound = min(gap * (tree.max_depth - i), remaining) if relaxed < max_relaxed else -1
            cheap = [c for c in children if regret[c] <= bound]
            if not (exact or cheap):
                break
            node = (exact or cheap)[0]
            if not exact:
                remaining, relaxed = remaining - regret[node], relaxed + 1
            accepted.append(tokens[b, node])
        out.append((accepted, remaining))
    return out


@both
@pytest.mark.parametrize(
    ("gap", "max_relaxed", "total"), [(0.25, 2, 8.0), (0.5, 1, 8.0), (1.0, 9, 0.7), (1.0, 0, 8.0)]
)
def test_a_budget_is_spent_as_in_python(chain, gap, max_relaxed, total):
    tree, logits = case(chain)
    rule = for_rows(contrib.budget(gap=gap, max_relaxed=max_relaxed, total=total), ROWS)
    verdict, next_rule = greedy_step(rule, tree, logits)
    out, count = rule_oracles.emitted(tree.tokens, verdict)
    expected = python_budget_step(tree, logits, gap, max_relaxed, total)
    assert [row[: n - 1].tolist() for row, n in zip(out, count, strict=True)] == [row for row, _ in expected]
    np.testing.assert_allclose(next_rule.total, [remaining for _, remaining in expected], atol=1e-5)
    assert bool(np.any(verdict.relaxed)) == (max_relaxed > 0)
    assert np.asarray(verdict.relaxed).sum(1).max() == min(max_relaxed, 2)


@pytest.mark.slow
def test_over_rejection_a_step_relaxes_no_more_than_its_share():
    """Every drafted token is the runner-up, and rejection rejects nearly all of them."""
    tokens = jnp.asarray([[0, 1, 1, 1, 1]] * ROWS, jnp.int32)
    sure = jnp.tile(jnp.asarray([[[0.0, -9.0, -9.0]]]), (ROWS, 5, 1))
    tree = trees.chain(tokens, sure[..., jnp.asarray([1, 0, 2])])
    for max_relaxed in (0, 1, 3):
        rule = contrib.budget(base=verify.rejection(), gap=9.0, max_relaxed=max_relaxed, total=99.0)
        rows = rule_oracles.controls_of([(1.0, 0, 1.0, 0.0)] * ROWS)
        verdict = verdict_of(rule, rule_oracles.keys_of(1, ROWS), tree, sure, rows)
        relaxed = np.asarray(verdict.relaxed).sum(1)
        assert relaxed.max() == max_relaxed and np.mean(relaxed == max_relaxed) > 0.9


@pytest.mark.parametrize(
    "base", [verify.rejection(), pytest.param(verify.rejection(block=True), marks=pytest.mark.slow)]
)
def test_over_rejection_no_more_are_relaxed_in_a_row_than_may_be(base):
    """The target is certain of token 0, which is accepted; token 1 is rejected but may be relaxed."""
    rng, nodes = np.random.default_rng(0), 8
    drafted, max_runs = rng.integers(0, 2, (ROWS, nodes - 1)), rng.integers(0, 4, ROWS)
    tree = trees.chain(jnp.asarray(np.pad(drafted, ((0, 0), (1, 0))), jnp.int32))
    sure = jnp.broadcast_to(jnp.asarray([30.0, 0.0, 0.0]), (ROWS, nodes, 3))
    rows = rule_oracles.controls_of([(1.0, 0, 1.0, 0.0)] * ROWS, max_relaxed_run=max_runs.astype(np.int32))
    rule = verify.topk(base=base, k=2, delta=99.0)
    verdict = verdict_of(rule, rule_oracles.keys_of(1, ROWS), tree, sure, rows)
    for row in range(ROWS):
        count = run = 0
        while count < nodes - 1 and (not drafted[row, count] or run < max_runs[row]):
            run = run + 1 if drafted[row, count] else 0
            count += 1
        assert int(verdict.num_accepted[row]) == count
        assert verdict.relaxed[row, :count].tolist() == drafted[row, :count].astype(bool).tolist()
