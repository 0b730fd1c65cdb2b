"""`mars`: Algorithm 1 of the paper at temperature 0, its guards, and its strict base `exact`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_jax.core import sampling
from mars_jax.core import tree as trees
from mars_jax.core.types import NO_TOKEN
from mars_jax.utils.errors import MarsError
from mars_jax.verify import MARGINS, evidence, exact, for_rows, mars, rejection
from mars_jax.verify.exact import Exact
from tests.helpers import rule_oracles, slow_but, verdict_of
from tests.helpers.random_trees import B, N, V, python_walk, random_tree
from tests.helpers.sampled_chains import sampled_chain

GREEDY = (0.0, 0, 1.0, 0.0)
SAMPLED = (0.8, 0, 1.0, 0.0)
FILTERED = (0.8, 1, 1.0, 0.0)
"""A filter may exclude the runner-up, but margins of the raw logits still accept it."""
seeds = st.integers(0, 2**32 - 1)
property_test = settings(max_examples=20, deadline=None)
ratio_rule = functools.partial(verdict_of, mars())


def algorithm_1(drafted, logits, theta):
    """Return the tokens that the paper's Algorithm 1 emits, implemented literally."""
    output = []
    for x, z in zip(drafted, logits, strict=False):
        first, second = np.argsort(-z, kind="stable")[:2]
        if x == first or (x == second and z[first] > 0 and z[second] / z[first] > theta):
            output.append(x)
        else:
            return [*output, first]
    return [*output, np.argmax(logits[len(drafted)])]


@given(seeds)
@property_test
def test_temperature_zero_is_algorithm_1_of_the_paper(seed):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-2, 9, (32, 5, 4)).astype(np.float32)  # few values: ties, z1 <= 0 and ratios of 1
    best = np.argsort(-logits, axis=-1, kind="stable")[..., :2]
    tokens = np.where(rng.random((32, 5)) < 0.5, best[..., 0], best[..., 1])
    tokens = np.where(rng.random((32, 5)) < 0.1, rng.integers(0, 4, (32, 5)), tokens)[:, :4]
    theta = rng.choice([0.3, 0.6, 0.9], 32)
    tree = trees.chain(jnp.asarray(np.pad(tokens, ((0, 0), (1, 0))), jnp.int32))
    controls = rule_oracles.controls_of([GREEDY] * 32, theta=theta)
    verdict = ratio_rule(rule_oracles.keys_of(0, 32), tree, jnp.asarray(logits), controls)
    out, count = rule_oracles.emitted(tree.tokens, verdict)
    for b in range(32):
        assert out[b, : count[b]].tolist() == algorithm_1(tokens[b], logits[b], np.float32(theta[b]))


def python_relaxable(tokens, parents, logits, y, margin, theta, strict, stops):
    """Return the edges of one row that may be relaxed."""
    result = [False]
    for i in range(1, len(tokens)):
        z = logits[parents[i]]
        first, second = np.argsort(-z, kind="stable")[:2]
        z1, z2 = z[first], z[second]
        low = {"ratio": z1 > 0 and z2 > theta * z1, "gap": z1 - z2 < theta < np.inf}[margin]
        stopping = {tokens[i], first, y[parents[i]]} & set(stops)
        result.append(bool(low and not strict and tokens[i] in (first, second) and not stopping))
    return result


@pytest.mark.parametrize("margin", slow_but(MARGINS, "ratio"))
def test_trees_of_greedy_and_sampled_rows_follow_the_python_rule(margin):
    """Apply all guards at once, on random trees with repeated siblings and padding."""
    verify = functools.partial(verdict_of, mars(margin=margin))
    draw = jax.jit(sampling.sample)
    num_relaxed = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        tree = random_tree(rng)
        logits = rng.integers(-4, 17, (B, N, V)).astype(np.float32) / 4 + 0.01
        theta = rng.choice([0.3, 0.5, 1.5, np.inf], B)
        strict, max_run = rng.random(B) < 0.1, rng.choice([0, 1, 2, 9, 9], B)
        stops = [list(rng.choice(V, rng.integers(0, 3) // 2, replace=False)) for _ in range(B)]
        controls = rule_oracles.controls_of(
            [(GREEDY, SAMPLED, FILTERED)[b % 3] for b in range(B)],
            theta=theta, strict=strict, max_relaxed_run=max_run, stop_tokens=stops,
        )  # fmt: skip
        keys = rule_oracles.keys_of(seed, B)
        verdict, tree, y = jax.device_get(
            (verify(keys, tree, logits, controls), tree, draw(keys, tree.depths, logits, controls))
        )
        for b in range(B):
            tokens, parents = tree.tokens[b].tolist(), tree.parents[b].tolist()
            exact_tokens = [-2] + [y[b, parents[i]] for i in range(1, N)]
            hits = [tokens[i] == exact_tokens[i] for i in range(N)]
            relaxable = python_relaxable(
                tokens, parents, logits[b], y[b], margin, theta[b], strict[b], stops[b]
            )
            path, count, edges = python_walk(tokens, parents, hits, relaxable, max_run[b], tree.max_depth)
            assert verdict.path[b].tolist() == path and int(verdict.num_accepted[b]) == count
            assert verdict.relaxed[b].tolist() == edges
            assert int(verdict.next_token[b]) == y[b, path[-1]]
            num_relaxed += sum(edges)
    assert num_relaxed > 10


ROWS = 192


def chain_case(seed, temperature=0.8):
    """Return target logits with close runners-up, a draft sampled from a similar true q, and controls."""
    rng, rows, nodes, vocab = np.random.default_rng(seed), ROWS, 6, 5
    controls = rule_oracles.controls_of([(temperature, 0, 1.0, 0.0)] * rows, theta=0.3, max_relaxed_run=9)
    logits = jnp.asarray(rng.normal(3, 1, (rows, nodes, vocab)), jnp.float32)
    processed = rule_oracles.process(
        logits + jnp.asarray(rng.normal(0, 1, logits.shape), jnp.float32), controls
    )
    places = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (rows, nodes))
    drafted = jax.jit(sampling.sample_processed)(rule_oracles.keys_of(seed + 1, rows), places, processed)
    tree = trees.chain(jnp.pad(drafted[:, :-1], ((0, 0), (1, 0))), processed)
    return rule_oracles.keys_of(seed + 2, rows), tree, logits, controls


BASES = [exact(), rejection(), rejection(block=True)]


@pytest.mark.parametrize("stop", [1, 2])
@pytest.mark.parametrize("base", BASES[::2], ids=lambda v: v.name)
def test_a_stop_token_is_neither_overridden_nor_put_in_by_relaxation(stop, base):
    """The target prefers token 1, the draft is its close second 2, and 3 follows."""
    logits = jnp.asarray([[[1.0, 10.0, 9.5, 0.0], [1.0, 0.0, 0.0, 8.0]]])
    tree = trees.chain(jnp.asarray([[0, 2]], jnp.int32))
    for stop_tokens, emitted in (([NO_TOKEN, 3], [2, 3]), ([3, stop], [1])):
        controls = rule_oracles.controls_of([GREEDY], theta=0.9, stop_tokens=stop_tokens)
        verdict = verdict_of(mars(base=base), rule_oracles.keys_of(0, 1), tree, logits, controls)
        out, count = rule_oracles.emitted(tree.tokens, verdict)
        assert out[0, : count[0]].tolist() == emitted


def test_margins_are_their_formulas_and_strict_at_infinity():
    rng = np.random.default_rng(0)
    z1 = rng.normal(1, 3, 500).astype(np.float32)
    z2 = (z1 - rng.exponential(1, 500)).astype(np.float32)
    theta = rng.uniform(0.05, 2, 500).astype(np.float32)
    expected = {"ratio": (z1 > 0) & (z2 / z1 > theta), "gap": z1 - z2 < theta}
    for name, margin in MARGINS.items():
        np.testing.assert_array_equal(margin(*map(jnp.asarray, (z1, z2, theta))), expected[name])
        assert expected[name].any() and not expected[name].all()
        assert not np.any(margin(jnp.asarray(z1), jnp.asarray(z1), jnp.full((500,), jnp.inf)))
        assert not margin(*(jnp.asarray(x, jnp.float32) for x in (5.0, -np.inf, 0.9)))


@pytest.mark.parametrize("base", slow_but(BASES[1:], BASES[1]), ids=lambda v: v.name)
def test_over_rejection_the_strict_stretch_stands_and_only_guarded_edges_are_relaxed(base):
    """The first relaxed edge is the one at which the base stopped, unless the base emitted a stop token or x."""
    keys, tree, logits, controls = chain_case(seed=4)
    controls = controls.replace(
        stop_tokens=jnp.asarray(np.random.default_rng(0).integers(0, 5, (ROWS, 1)), jnp.int32),
        max_relaxed_run=jnp.full((ROWS,), 2, jnp.int32),
    )
    rule = mars(base=base)
    verdicts = [verdict_of(rule, keys, tree, logits, controls) for rule in (base, rule)]
    rows = for_rows(dataclasses.replace(rule, theta=controls.theta), ROWS)
    guarded = jax.jit(lambda rule, inputs: rule.guarded(inputs))(
        rows, evidence(tree, logits, controls=controls)
    )
    (strict, verdict), relaxable = jax.device_get((verdicts, guarded))
    stops, tokens = np.asarray(controls.stop_tokens[:, 0]), np.asarray(tree.tokens)
    num_open = 0
    for b in range(ROWS):
        stop, token = int(strict.num_accepted[b]), int(strict.next_token[b])
        relaxed = np.asarray(verdict.relaxed[b])
        open_edge = stop < 5 and relaxable[b, stop + 1] and token not in (stops[b], tokens[b, stop + 1])
        assert relaxed.any() == open_edge
        if open_edge:
            num_open += 1
            assert np.flatnonzero(relaxed)[0] == stop
            assert verdict.num_accepted[b] > stop
            assert all(relaxable[b, i + 1] for i in np.flatnonzero(relaxed))
            assert "TTT" not in "".join("FT"[flag] for flag in relaxed.astype(int))
        else:
            assert (int(verdict.num_accepted[b]), int(verdict.next_token[b])) == (stop, token)
    assert 15 < num_open < 170


@pytest.mark.parametrize("base", slow_but(BASES[1:], BASES[1]), ids=lambda v: v.name)
def test_over_rejection_greedy_rows_are_mars_over_exact(base):
    keys, tree, logits, controls = chain_case(seed=8, temperature=0.0)
    tree = tree.replace(draft_logits=jnp.zeros_like(logits))
    mixed = controls.replace(temperature=controls.temperature.at[::2].set(1.0))
    expected = ratio_rule(keys, tree, logits, controls)
    run = functools.partial(verdict_of, mars(base=base))
    rule_oracles.same_verdict(run(keys, tree, logits, controls), expected)
    odd = lambda x: x[1::2]  # noqa: E731
    rule_oracles.same_verdict(jax.tree.map(odd, run(keys, tree, logits, mixed)), jax.tree.map(odd, expected))
    assert np.any(expected.relaxed)


@pytest.mark.slow
def test_behind_a_relaxed_token_rejection_starts_afresh():
    """The first token is relaxed or accepted in every row; later margins are negative and strict.

    So the rest is the target's own continuation of the drafted token. By blocks it is so only nearly: where a block
    stops depends on the tokens drafted after it, which given that stop are not samples of q.
    """
    vocab, rows, first, free = 4, 20_000, 2, (1.0, 0, 1.0, 0.0)
    table = [t - 8 for t in rule_oracles.tables(31, vocab, 4)]
    table[0] = np.asarray([-5, 2.1, 2.0, -5], np.float32)
    # The draft's first token is certain, and two follow that are drawn from the true q.
    controls = rule_oracles.controls_of([free] * rows, theta=0.9)
    q_table = [np.where(np.arange(vocab) == first, 0, -np.inf).astype(np.float32)]
    q_table += rule_oracles.tables(32, vocab, 3)[1:]
    tree, drafted = sampled_chain(rule_oracles.keys_of(0, rows), q_table, controls, rows)
    logits = np.stack([rule_oracles.after(table, drafted[:, :i]) for i in range(4)], 1)
    verdict = verdict_of(
        mars(base=rejection()), rule_oracles.keys_of(3, rows), tree, jnp.asarray(logits), controls
    )
    relaxed = np.asarray(verdict.relaxed)
    assert not relaxed[:, 1:].any() and 0.3 < relaxed[:, 0].mean() < 0.7
    out, count = rule_oracles.emitted(tree.tokens, verdict)
    assert np.all(out[:, 0] == first) and np.all(count >= 2)
    p = rule_oracles.processed_tables(table, free)
    joint = rule_oracles.sequence_probabilities([x[first] for x in p[1:]])
    sequences = rule_oracles.complete(np.random.default_rng(0), out, count, p)[:, 1:]
    assert rule_oracles.chi_square(sequences[relaxed[:, 0]], joint) > 1e-3


def test_bad_margins_bases_and_thetas_are_refused():
    with pytest.raises(MarsError, match=r"margin is 'entropy'.*ratio, gap"):
        mars(margin="entropy")
    with pytest.raises(MarsError, match=r"base is .*exact"):
        mars(base=mars())
    for theta in (0.0, -1.0, float("nan"), 1.5, [0.5, 1.5]):
        with pytest.raises(MarsError, match=r"^theta is"):
            mars(theta=theta)
    assert mars().base == Exact()


def test_exact_walks_where_the_sample_of_each_node_leads():
    """The verdict equals a Python walk over `sample`, with greedy and sampled rows mixed."""
    tree = random_tree(np.random.default_rng(1))
    logits = jax.random.normal(jax.random.key(1), (B, N, V))
    controls = rule_oracles.controls_of([(0.0 if b % 2 else 0.8, 0, 1.0, 0.0) for b in range(B)])
    verdict = verdict_of(exact(), rule_oracles.keys_of(0, B), tree, logits, controls)
    y = np.asarray(jax.jit(sampling.sample)(rule_oracles.keys_of(0, B), tree.depths, logits, controls))
    np.testing.assert_array_equal(y[1::2], np.argmax(logits, -1)[1::2])
    for b in range(B):
        hits = tree.tokens[b] == y[b, tree.parents[b]]
        path, count, _ = python_walk(tree.tokens[b], tree.parents[b], hits, [False] * N, 0, tree.max_depth)
        assert verdict.path[b].tolist() == path and int(verdict.num_accepted[b]) == count
        assert int(verdict.next_token[b]) == y[b, path[-1]]


@pytest.mark.parametrize("rule", slow_but([*BASES, mars()], BASES[0], BASES[1]), ids=lambda v: v.name)
def test_a_tree_of_one_node_is_plain_decoding(rule):
    logits = jax.random.normal(jax.random.key(0), (3, 1, 5))
    controls = rule_oracles.controls_of([(0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (0.7, 1, 1.0, 0.0)])
    tree = trees.chain(jnp.zeros((3, 1), jnp.int32))
    verdict = verdict_of(rule, rule_oracles.keys_of(0, 3), tree, logits, controls)
    assert verdict.path.tolist() == [[0]] * 3 and verdict.relaxed.shape == (3, 0)
    assert verdict.next_token[::2].tolist() == jnp.argmax(logits[::2, 0], axis=-1).tolist()
