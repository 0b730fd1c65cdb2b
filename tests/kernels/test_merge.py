"""`merge` is a commutative monoid: its sum over any split of a vocabulary equals the statistics of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import MarginStats, empty, merge
from tests.helpers.kernel_oracles import top_two


def rows(seed, vocab=12):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.choice([-np.inf, -1.0, 0.0, 2.0, 2.0], size=(6, vocab)), jnp.float32)


def part(logits, tokens):
    """Return the statistics of some tokens of a vocabulary under their own ids, computed by numpy."""
    tokens = np.sort(np.asarray(tokens))
    top1, id1, top2, id2, total = top_two(np.asarray(logits)[:, tokens])
    ids = np.append(tokens, -1)
    return MarginStats(
        jnp.asarray(top1),
        jnp.asarray(ids[id1], jnp.int32),
        jnp.asarray(top2),
        jnp.asarray(ids[id2], jnp.int32),
        jnp.asarray(total, jnp.float32),
    )


def assert_same(a, b):
    for x, y in zip(a[:4], b[:4], strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_allclose(a.logsumexp, b.logsumexp, rtol=1e-6)  # sums in another order


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), first=st.integers(1, 5), second=st.integers(1, 5))
def test_any_split_in_any_order_gives_the_whole(seed, first, second):
    logits = rows(seed)
    order = np.random.default_rng(seed).permutation(12)
    a, b, c = (part(logits, tokens) for tokens in np.split(order, [first, first + second]))
    whole = part(logits, range(12))
    assert_same(merge(merge(a, b), c), whole)
    assert_same(merge(a, merge(b, c)), whole)
    assert_same(merge(merge(c, a), b), whole)


def test_empty_changes_nothing_on_either_side():
    stats, nothing = part(rows(0), range(12)), empty((6,), logsumexp=True)
    for a, b, expected in ((nothing, stats, stats), (stats, nothing, stats), (nothing, nothing, nothing)):
        assert_same(merge(a, b), expected)


def test_the_logsumexp_survives_only_where_both_sides_have_it():
    stats = part(rows(1), range(12))
    assert merge(stats, stats._replace(logsumexp=None)).logsumexp is None
    assert jax.tree.structure(merge(stats, stats)) == jax.tree.structure(stats)
