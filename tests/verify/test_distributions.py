"""Rules over distributions, and `nucleus` over rejection, compared with Python versions of their papers."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize
from scipy.spatial import distance

from mars_jax import contrib, verify
from mars_jax.core import tree as trees
from mars_jax.core.rule import for_rows
from tests.helpers import rule_oracles, verdict_of
from tests.helpers.sampled_chains import sampled_chain

VOCAB, ROWS = 4, 9_000


def over(weights):
    """Normalise weights to a distribution; return None if all are zero."""
    weights = np.maximum(weights, 0)
    return weights / weights.sum() if weights.sum() > 1e-12 else None


def by_target(v, p, q, x):
    """Return rejection against v: the chance of accepting x, and the distribution drawn from otherwise."""
    return min(1.0, v[x] / q[x]), over(v - q)


def lenience(z, p, q, x, factor):
    return min(1.0, p[x] / (factor * q[x])), over(p - q)


def mixture(z, p, q, x, weight):
    return by_target(weight * p + (1 - weight) * q, p, q, x)


def cactus(z, p, q, x, divergence):
    grown = min(p[x] + np.sqrt(2 * divergence * p[x] * (1 - p[x])), 1.0)
    h = p * (1 - grown) / (1 - p[x]) if p[x] < 1 else p.copy()
    h[x] = grown
    return by_target(h, p, q, x)


def token_v3(z, p, q, x, alpha):
    trusted = p >= (1 - alpha) * p.max()
    return by_target(q * trusted + p * q[~trusted].sum(), p, q, x)


def opt(z, p, q, x, alpha):
    defers = q.max() < p.max() - alpha * np.abs(p - q).sum() / 2
    return by_target(p if defers else q, p, q, x)


@functools.cache
def closest(p, q, bound):
    """Return f64[V]: min(max(q, a p), b p) for tuples p and q, by nested roots for a and b; KL decreases with a."""
    p, q = over(np.asarray(p)), over(np.asarray(q))
    inside = p > 0

    def distribution_at(a):
        v = np.maximum(q, a * p)
        v[~inside] *= max(1 - v[inside].sum(), 0) / max(v[~inside].sum(), 1e-300)
        if v.sum() <= 1 + 1e-12:
            return v
        excess_mass = lambda b: np.minimum(v, b * p).sum() - 1  # noqa: E731
        b = optimize.brentq(excess_mass, 0.5, 2 * max(v[inside] / p[inside]), xtol=1e-15)
        return np.minimum(v, b * p)

    def divergence(a):
        return np.sum(p[inside] * np.log(p[inside] / distribution_at(a)[inside]))

    if divergence(np.exp(-600)) <= bound:
        return distribution_at(0.0)
    log_a = optimize.brentq(lambda log_a: divergence(np.exp(log_a)) - bound, -600, 0, xtol=1e-12)
    return distribution_at(np.exp(log_a))


def mentored(z, p, q, x, bound):
    return by_target(closest(tuple(p), tuple(q), bound), p, q, x)


def fuzzy_js(z, p, q, x, bound):
    return by_target(q if distance.jensenshannon(p, q) ** 2 < bound else p, p, q, x)


def fuzzy_tv(z, p, q, x, bound):
    return by_target(q if np.abs(p - q).sum() / 2 < bound else p, p, q, x)


def released(z, p, q, x, ratio):
    allowed_logits = np.where(p > 0, z, -np.inf)
    first, second = np.argsort(-allowed_logits)[:2]
    if allowed_logits[second] / allowed_logits[first] > ratio and x in (first, second):
        return 1.0, None
    without_x = p.copy()
    without_x[x] = 0
    return min(1.0, p[x] / q[x]), over(without_x)


def nucleus(z, p, q, x, mass):
    inside = p[x] > 0 and p[p > p[x]].sum() < mass
    return 1.0 if inside else min(1.0, p[x] / q[x]), over(p - q)


class Law(NamedTuple):
    rule: Any
    decide: Any  # (z, p, q, x, number) -> chance of x, and the distribution to draw from otherwise
    number: float


LAWS = {
    "lenience": Law(contrib.lenience(factor=0.4), lenience, 0.4),
    "lenience by blocks": Law(contrib.lenience(factor=0.4, block=True), lenience, 0.4),
    "mixture": Law(verify.mixture(weight=0.6), mixture, 0.6),
    "mixture by blocks": Law(verify.mixture(weight=0.6, block=True), mixture, 0.6),
    "cactus": Law(contrib.cactus(divergence=0.2), cactus, 0.2),
    "token_v3": Law(contrib.speccascade(alpha=0.6), token_v3, 0.6),
    "opt": Law(contrib.speccascade(trust="opt", alpha=0.3), opt, 0.3),
    "mentored": Law(contrib.mentored(bound=0.2), mentored, 0.2),
    "fuzzy": Law(contrib.fuzzy(bound=0.2), fuzzy_js, 0.2),
    "fuzzy(tv)": Law(contrib.fuzzy(distance="tv", bound=0.5), fuzzy_tv, 0.5),
    "released": Law(contrib.released(ratio=0.6), released, 0.6),
    "nucleus": Law(verify.nucleus(mass=0.9), nucleus, 0.9),
}


def law_of(law, z, p, q):
    """Return the law of one emitted token after every prefix, over all drafts, in the shape of p."""
    flat = [x.reshape(-1, VOCAB) for x in (z, p, q)]
    emitted = np.zeros_like(flat[1])
    for row, (z_row, p_row, q_row) in enumerate(zip(*(x.astype(float) for x in flat), strict=True)):
        for x in np.flatnonzero(q_row > 0):
            chance, else_from = law.decide(z_row, p_row, q_row, x, law.number)
            emitted[row, x] += q_row[x] * chance
            if chance < 1 and else_from is not None:
                emitted[row] += q_row[x] * (1 - chance) * else_from
    return (emitted / emitted.sum(-1, keepdims=True)).reshape(p.shape)


@functools.cache
def steps():
    """Return drafts of two tokens and the target's logits. The batch mixes all settings."""
    settings = rule_oracles.controls_of([rule_oracles.SETTINGS[b % 5] for b in range(ROWS)])
    z_table, q_table = rule_oracles.tables(41, VOCAB, 3), rule_oracles.tables(42, VOCAB, 2)
    tree, drafted = sampled_chain(rule_oracles.keys_of(1, ROWS), q_table, settings, ROWS)
    logits = jnp.asarray(np.stack([rule_oracles.after(z_table, drafted[:, :i]) for i in range(3)], 1))
    return settings, z_table, q_table, tree, logits


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_the_text_follows_the_law_of_the_paper(name):
    """The emitted text follows the law; the token after the draft follows the target."""
    law = LAWS[name]
    settings, z_table, q_table, tree, logits = steps()
    verdict = verdict_of(law.rule, rule_oracles.keys_of(2, ROWS), tree, logits, settings)
    out, count = rule_oracles.emitted(tree.tokens, verdict)
    for s, row in enumerate(rule_oracles.SETTINGS):
        p, q = rule_oracles.processed_tables(z_table, row), rule_oracles.processed_tables(q_table, row)
        laws = [law_of(law, *layer) for layer in zip(z_table[:2], p[:2], q, strict=True)] + [p[2]]
        assert np.abs(laws[0] - p[0]).max() > 0.02 or s
        sequences = rule_oracles.complete(np.random.default_rng(s), out[s::5], count[s::5], laws)
        assert rule_oracles.chi_square(sequences, rule_oracles.sequence_probabilities(laws)) > 1e-3, row


@pytest.mark.parametrize("name", [name for name in LAWS if "blocks" not in name and name != "nucleus"])
def test_every_decision_is_the_papers(name):
    """Check every x for 300 pairs of distributions, without sampling. Some distributions exclude tokens."""
    law, rng, pairs = LAWS[name], np.random.default_rng(5), 300
    z, y = (rng.normal(0, 1.5, (pairs, VOCAB)).astype(np.float32) for _ in range(2))
    top_k = rng.integers(2, VOCAB + 1, pairs)
    rows = rule_oracles.controls_of([(1.0, k, 1.0, 0.0) for k in np.repeat(top_k, VOCAB)])
    tokens = np.stack([np.zeros(pairs * VOCAB, int), np.tile(np.arange(VOCAB), pairs)], 1)
    z_rows, y_rows = (jnp.asarray(np.repeat(a, VOCAB, 0))[:, None].repeat(2, 1) for a in (z, y))
    q_logits = rule_oracles.process(y_rows, rows)
    evidence = verify.evidence(trees.chain(jnp.asarray(tokens, jnp.int32), q_logits), z_rows, controls=rows)
    log_p, log_q = (jax.nn.log_softmax(a, axis=-1) for a in (rule_oracles.process(z_rows, rows), q_logits))
    log_v = for_rows(law.rule, len(tokens)).target(log_p, log_q, evidence)
    p, q = (np.exp(np.asarray(a, float))[:, 0] for a in (log_p, log_q))
    v = np.asarray(jax.nn.softmax(log_v, axis=-1), float)[:, 0]
    relaxed = 0
    for b, x in enumerate(tokens[:, 1]):
        if q[b, x] == 0:
            continue
        chance, else_from = law.decide(np.asarray(z_rows)[b, 0], p[b], q[b], x, law.number)
        np.testing.assert_allclose(min(1.0, v[b, x] / q[b, x]), chance, atol=2e-5)
        if chance < 0.99:
            np.testing.assert_allclose(over(v[b] - q[b]), else_from, atol=2e-4)
        relaxed += chance > min(1.0, p[b, x] / q[b, x]) + 1e-3
    assert relaxed > 30


def test_the_mixture_decides_as_transformers_ensemble(monkeypatch):
    """Run the function of transformers on fixed uniforms on either side of our acceptance probability."""
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("transformers.generation.utils")
    rng, weight = np.random.default_rng(7), 0.3
    distributions = []
    monkeypatch.setattr(
        torch, "multinomial", lambda p, num_samples: distributions.append(p) or torch.zeros(1, 1, dtype=int)
    )
    for _ in range(40):
        p_logits, q_logits = (rng.normal(0, 1.5, (1, n, VOCAB)).astype(np.float32) for n in (3, 2))
        drafted = rng.integers(0, VOCAB, (1, 2))
        tokens, unread = np.pad(drafted, ((0, 0), (1, 0))), np.pad(q_logits, ((0, 0), (0, 1), (0, 0)))
        tree = trees.chain(jnp.asarray(tokens, jnp.int32), jnp.asarray(unread))
        evidence = verify.evidence(tree, jnp.asarray(p_logits), temperature=1.0)
        log_p = jax.nn.log_softmax(evidence.logits, axis=-1)
        log_q = jax.nn.log_softmax(tree.draft_logits, axis=-1)
        log_v = for_rows(verify.mixture(weight=weight), 1).target(log_p, log_q, evidence)
        v, q = (np.exp(np.asarray(log_x, float))[0] for log_x in (log_v, log_q))
        chances = [min(1.0, v[i, x] / q[i, x]) for i, x in enumerate(drafted[0])]
        for stop in range(3):
            sides = [c * (1 - 1e-4) if i < stop else c + 1e-4 for i, c in enumerate(chances)]
            if any(u > 1 for u in sides):
                continue
            numbers = torch.tensor(sides, dtype=torch.float32)
            monkeypatch.setattr(torch, "rand_like", lambda like, numbers=numbers: numbers)
            tensors = (torch.tensor(a) for a in (drafted, q_logits))
            _, matches = utils._speculative_sampling(
                *tensors, 2, torch.tensor(p_logits), assistant_ensemble_weight=weight
            )
            assert int(matches) == stop
            expected = over(v[stop] - q[stop]) if stop < 2 else np.exp(np.asarray(log_p, float))[0, 2]
            np.testing.assert_allclose(distributions[-1].numpy().ravel(), expected, atol=1e-4)
    assert len(distributions) > 40


def test_no_distribution_of_a_grid_accepts_more_than_the_mentored_one():
    """Check all distributions of three tokens on a grid of 1/200 within the bound; the second target excludes one."""
    parts = np.arange(201)
    grid = np.stack(np.meshgrid(parts, parts, indexing="ij"), -1).reshape(-1, 2)
    grid = grid[grid.sum(1) <= 200]
    grid = np.column_stack([grid, 200 - grid.sum(1)]) / 200
    p = np.float32([[0.6, 0.3, 0.1], [0.7, 0.3, 0.0], [0.05, 0.05, 0.9], [0.5, 0.5, 0.0]])
    q = np.float32([[0.2, 0.3, 0.5], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.0, 0.4, 0.6]])
    bounds = np.float32([0.0, 0.02, 0.1, 0.3, 1.0, 9.0])
    rows = [(a, b, d) for a, b in zip(p, q, strict=True) for d in bounds]
    log_p, log_q = (jnp.log(jnp.asarray([row[i] for row in rows]))[:, None] for i in range(2))
    rule: Any = for_rows(contrib.mentored(bound=np.asarray([d for _, _, d in rows])), len(rows))
    distributions = np.asarray(jax.nn.softmax(rule.target(log_p, log_q, None), axis=-1), float)[:, 0]
    for (p_row, q_row, bound), v in zip(rows, distributions, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            harms = np.where(p_row > 0, p_row * np.log(p_row / np.vstack([v, grid])), 0.0).sum(1)
        assert harms[0] <= bound + 1e-6
        accepted = np.minimum(q_row, np.vstack([v, grid])).sum(1)
        best = accepted[1:][harms[1:] <= bound].max(initial=0)
        # The grid misses the optimum by at most one step per token. At bound 0, p may not be on the grid.
        upper_bound = best + 0.015 if bound > 0 else np.minimum(p_row, q_row).sum() + 1e-6
        assert best - 1e-5 <= accepted[0] <= upper_bound


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAWS if "blocks" not in name])
def test_at_temperature_0_in_strict_rows_and_after_the_draft_the_target_is_followed(name):
    settings, _, _, tree, logits = steps()
    first_rows = lambda x: x[:64]  # noqa: E731
    tree, logits = jax.tree.map(first_rows, tree), first_rows(logits)
    rows = jax.tree.map(first_rows, settings).replace(temperature=jnp.tile(jnp.asarray([0.0, 1.0]), 32))
    strict = rows.replace(strict=jnp.ones((64,), bool))
    keys = rule_oracles.keys_of(3, 64)
    run, base = (functools.partial(verdict_of, rule) for rule in (LAWS[name].rule, verify.rejection()))
    greedy_rows = lambda v: jax.tree.map(lambda x: x[::2], v)  # noqa: E731
    verdict, base_verdict = run(keys, tree, logits, rows), base(keys, tree, logits, rows)
    rule_oracles.same_verdict(greedy_rows(verdict), greedy_rows(base_verdict))
    rule_oracles.same_verdict(run(keys, tree, logits, strict), base_verdict)
    undrafted = tree.replace(tokens=tree.tokens.at[:, 1:].set(-1))
    rule_oracles.same_verdict(run(keys, undrafted, logits, rows), base(keys, undrafted, logits, rows))
