"""Test cases of `margin_accept` that every implementation must pass, checked against a slow walk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels_pallas import AcceptControls, margin_accept
from kernels_pallas.margin_rule import MARGINS
from tests.helpers.implementations import assert_no_races, compiled
from tests.helpers.kernel_oracles import accept, top_two


def random_controls(rng, batch, *, stops=2, vocab=40):
    theta = rng.choice([0.3, 0.8, 0.9, 2.0, np.inf], size=batch, p=[0.3, 0.2, 0.2, 0.2, 0.1])
    stop_tokens = np.where(rng.random((batch, stops)) < 0.5, rng.integers(0, vocab, (batch, stops)), -1)
    return AcceptControls(
        jnp.asarray(theta, jnp.float32),
        jnp.asarray(rng.random(batch) < 0.1),
        jnp.asarray(rng.choice([0, 1, 2, 99], size=batch), jnp.int32),
        jnp.asarray(stop_tokens, jnp.int32),
    )


def random_trees(rng, logits, depth, *, chain=False):
    """Return trees whose tokens are mostly among the target's best three, so that walks go deep; some are padding."""
    batch, nodes, vocab = logits.shape
    best = np.argsort(-np.asarray(logits, np.float32), axis=-1)[..., : min(3, vocab)]
    parents = np.full((batch, nodes), -1)
    depths = np.zeros((batch, nodes), np.int64)
    tokens = rng.integers(0, vocab, (batch, nodes))
    for b in range(batch):
        for i in range(1, nodes):
            parent = i - 1 if chain else rng.choice(np.flatnonzero(depths[b, :i] < depth))
            parents[b, i], depths[b, i] = parent, depths[b, parent] + 1
            kind = rng.random()
            if kind < 0.9:
                tokens[b, i] = rng.choice(best[b, parent])
            elif kind < 0.95:
                tokens[b, i] = -1
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(parents, jnp.int32)


class Cases:
    """Test cases for one implementation. Each compares every field exactly."""

    name: str

    @functools.cached_property
    def accept(self):
        return compiled(margin_accept, self.name, ("max_depth", "margin", "logsumexp", "blocks"))

    def check(self, logits, tokens, parents, y, controls, *, max_depth, margin="ratio", **options):
        got = jax.device_get(
            self.accept(logits, tokens, parents, y, controls, max_depth=max_depth, margin=margin, **options)
        )
        want = accept(
            logits,
            np.asarray(tokens),
            np.asarray(parents),
            None if y is None else np.asarray(y),
            jax.tree.map(np.asarray, controls),
            max_depth,
            margin,
        )
        assert got.relaxed.dtype == bool and got.relaxed.shape == (len(want), max_depth)
        for b, (path, count, token, relaxed) in enumerate(want):
            assert got.path[b].tolist() == path
            assert (int(got.num_accepted[b]), int(got.next_token[b])) == (count, token)
            assert got.relaxed[b].tolist() == relaxed
        for value, expected in zip(got.stats[:4], top_two(logits)[:4], strict=True):
            np.testing.assert_array_equal(value, expected)
        if self.name == "mosaic_simulated":
            assert_no_races()
        return got

    def case(self, seed, batch, nodes, depth, vocab, *, chain=False, sampled=False, dtype=jnp.float32):
        rng = np.random.default_rng(seed)
        # Round the logits, so that ties and margins exactly at theta occur.
        z = np.round(rng.normal(1.0, 2.0, size=(batch, nodes, vocab)) * 4) / 4
        logits = jnp.asarray(z, jnp.float32).astype(dtype)
        tokens, parents = random_trees(rng, logits, depth, chain=chain)
        y = None
        if sampled:
            best = np.argsort(-z, axis=-1, kind="stable")
            y = np.take_along_axis(best, rng.integers(0, min(3, vocab), (batch, nodes, 1)), axis=-1)[..., 0]
            # -1 leaves the choice of some nodes to the rule, which takes the best token.
            y = jnp.asarray(np.where(rng.random(y.shape) < 0.2, -1, y), jnp.int32)
        return (logits, tokens, parents, y, random_controls(rng, batch, vocab=vocab)), {"max_depth": depth}

    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    @given(seed=st.integers(0, 2**32 - 1), sampled=st.booleans())
    def test_random_trees(self, seed, sampled):
        arguments, options = self.case(seed, 3, 12, 4, 150, sampled=sampled)
        self.check(*arguments, **options)

    @pytest.mark.parametrize(
        ("seed", "shape", "options"),
        [
            # Several blocks of trees, the last one partial. Trees of 8 nodes are flattened to rows of a matrix; trees
            # of 7 and 60 nodes are not.
            (27, (19, 8, 4, 260), {"sampled": True}),
            (26, (19, 7, 4, 260), {"sampled": True}),
            (62, (2, 60, 4, 260), {"sampled": True}),
            # One node, which emits its token; wide trees; deep chains.
            (3, (1, 1, 0, 130), {}),
            (3, (20, 1, 0, 130), {}),
            (5, (2, 64, 1, 140), {}),
            (6, (3, 16, 15, 140), {"chain": True}),
            (7, (17, 8, 4, 300), {"dtype": jnp.bfloat16}),
        ],
    )
    def test_trees_of_every_shape(self, seed, shape, options):
        arguments, depth = self.case(seed, *shape, **options)
        self.check(*arguments, **depth)

    def test_infinite_theta_equals_strict_for_every_margin(self):
        (logits, tokens, parents, _, controls), options = self.case(8, 6, 9, 2, 50)
        controls = controls._replace(theta=jnp.full_like(controls.theta, jnp.inf))
        logits = logits.at[0].set(-jnp.inf).at[1, :, 1:].set(-jnp.inf)
        for margin in MARGINS:
            got = self.check(logits, tokens, parents, None, controls, **options, margin=margin)
            assert not got.relaxed.any()

    def test_the_first_edges_of_a_row_may_be_strict(self):
        (logits, tokens, parents, y, controls), options = self.case(9, 24, 5, 4, 50, chain=True)
        controls = controls._replace(
            theta=jnp.full((24,), 0.3, jnp.float32), max_relaxed_run=jnp.full((24,), 99, jnp.int32)
        )
        for strict in (0, 1, 2, 4, 2**31 - 1):
            edges = controls._replace(strict=jnp.full((24,), strict, jnp.int32))
            got = self.check(logits, tokens, parents, y, edges, **options)
            assert not got.relaxed[:, :strict].any()
            assert bool(got.relaxed[:, strict:].any()) == (strict < 3)

    def test_an_exact_sibling_goes_before_a_relaxed_one_with_a_lower_id(self):
        logits = jnp.zeros((1, 4, 9)).at[0, 0, jnp.asarray([2, 5])].set(jnp.asarray([9.5, 10.0]))
        tokens, parents = jnp.asarray([[0, 2, 5, 5]]), jnp.asarray([[-1, 0, 0, 0]])
        row = AcceptControls(jnp.asarray([0.9]), jnp.asarray([False]), jnp.asarray([9]), jnp.full((1, 1), -1))
        got = self.check(logits, tokens, parents, None, row, max_depth=1)
        assert got.path.tolist() == [[0, 2]] and not got.relaxed.any()

    def test_stop_tokens_are_never_relaxed_over_on_any_side(self):
        # Token 2 is the runner-up at every node and token 5 the best; y is 7.
        logits = jnp.zeros((1, 2, 9)).at[0, :, jnp.asarray([2, 5])].set(jnp.asarray([[9.5], [10.0]]))
        tokens, parents, y = jnp.asarray([[0, 2]]), jnp.asarray([[-1, 0]]), jnp.asarray([[7, 7]])
        for stop, expected in ((2, 0), (5, 0), (7, 0), (3, 1), (-1, 1)):
            for stops in ([-1, stop], [stop, -1], [stop, 8]):
                row = AcceptControls(
                    jnp.asarray([0.9]), jnp.asarray([False]), jnp.asarray([9]), jnp.asarray([stops])
                )
                got = self.check(logits, tokens, parents, y, row, max_depth=1)
                assert int(got.num_accepted[0]) == expected
