"""`margin_accept` in every implementation, compared with a walk in plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import AcceptControls, TpuBlocks, margin_accept
from kernels_pallas.margin.rule import MARGINS
from tests.helpers import slow_but
from tests.helpers.accept_cases import accept_case
from tests.helpers.implementations import assert_no_races, compiled
from tests.helpers.kernel_oracles import accept, top_two

NAMES = ("reference", "xla", "mosaic", "mosaic_simulated")
every_implementation = pytest.mark.parametrize("name", slow_but(NAMES, *NAMES[:-1]))


@functools.cache
def accept_by(name):
    return compiled(margin_accept, name, ("max_depth", "margin", "logsumexp", "blocks"))


def check(name, logits, tokens, parents, y, controls, *, max_depth, margin="ratio", **options):
    """Compare every field exactly."""
    arguments = (logits, tokens, parents, y, controls)
    verdict = jax.device_get(accept_by(name)(*arguments, max_depth=max_depth, margin=margin, **options))
    walks = accept(logits, *jax.tree.map(np.asarray, arguments[1:]), max_depth, margin)
    assert verdict.relaxed.dtype == bool and verdict.relaxed.shape == (len(walks), max_depth)
    for b, (path, count, token, relaxed) in enumerate(walks):
        assert verdict.path[b].tolist() == path
        assert (int(verdict.num_accepted[b]), int(verdict.next_token[b])) == (count, token)
        assert verdict.relaxed[b].tolist() == relaxed
    for value, expected in zip(verdict.stats[:4], top_two(logits)[:4], strict=True):
        np.testing.assert_array_equal(value, expected)
    if name == "mosaic_simulated":
        assert_no_races()
    return verdict


@every_implementation
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), sampled=st.booleans())
def test_random_trees(name, seed, sampled):
    arguments, options = accept_case(seed, 3, 12, 4, 150, sampled=sampled)
    check(name, *arguments, **options)


@every_implementation
@pytest.mark.parametrize(
    ("seed", "shape", "options"),
    [
        # Several blocks of trees, the last one partial. Trees of 8 nodes are flattened to rows; trees of 60 or 64 nodes
        # are not.
        (27, (19, 8, 4, 260), {"sampled": True}),
        pytest.param(62, (2, 60, 4, 260), {"sampled": True}, marks=pytest.mark.slow),
        # One node, which emits its token; wide trees; deep chains.
        (3, (20, 1, 0, 130), {}),
        (5, (2, 64, 1, 140), {}),
        (6, (3, 16, 15, 140), {"chain": True}),
        (7, (17, 8, 4, 300), {"dtype": jnp.bfloat16}),
    ],
)
def test_trees_of_every_shape(name, seed, shape, options):
    arguments, depth = accept_case(seed, *shape, **options)
    check(name, *arguments, **depth)


@pytest.mark.parametrize("margin", sorted(MARGINS))
def test_every_margin(margin):
    for seed in range(5):
        arguments, options = accept_case(seed, 3, 12, 4, 150, sampled=True)
        check("reference", *arguments, **options, margin=margin)


@every_implementation
@pytest.mark.parametrize("margin", sorted(MARGINS))
def test_infinite_theta_equals_strict_for_every_margin(name, margin):
    (logits, tokens, parents, _, controls), options = accept_case(8, 3, 12, 4, 150)
    controls = controls._replace(theta=jnp.full_like(controls.theta, jnp.inf))
    logits = logits.at[0].set(-jnp.inf).at[1, :, 1:].set(-jnp.inf)
    assert not check(name, logits, tokens, parents, None, controls, **options, margin=margin).relaxed.any()


@every_implementation
def test_the_first_edges_of_a_row_may_be_strict(name):
    (logits, tokens, parents, y, controls), options = accept_case(9, 24, 5, 4, 50, chain=True)
    controls = controls._replace(
        theta=jnp.full((24,), 0.3, jnp.float32), max_relaxed_run=jnp.full((24,), 99, jnp.int32)
    )
    for strict in (0, 1, 2, 4, 2**31 - 1):
        edges = controls._replace(strict=jnp.full((24,), strict, jnp.int32))
        verdict = check(name, logits, tokens, parents, y, edges, **options)
        assert not verdict.relaxed[:, :strict].any()
        assert bool(verdict.relaxed[:, strict:].any()) == (strict < 3)


def row_controls(*stop_tokens):
    """Return the controls of one row that may relax nine edges, at a theta of 0.9."""
    return AcceptControls(
        jnp.asarray([0.9]), jnp.asarray([False]), jnp.asarray([9]), jnp.asarray([stop_tokens])
    )


@every_implementation
def test_an_exact_sibling_goes_before_a_relaxed_one_with_a_lower_id(name):
    logits = jnp.zeros((1, 4, 9)).at[0, 0, jnp.asarray([2, 5])].set(jnp.asarray([9.5, 10.0]))
    tokens, parents = jnp.asarray([[0, 2, 5, 5]]), jnp.asarray([[-1, 0, 0, 0]])
    verdict = check(name, logits, tokens, parents, None, row_controls(-1), max_depth=1)
    assert verdict.path.tolist() == [[0, 2]] and not verdict.relaxed.any()


@every_implementation
def test_stop_tokens_are_never_relaxed_over_on_any_side(name):
    # Token 2 is the runner-up at every node and token 5 the best; y is 7.
    logits = jnp.zeros((1, 2, 9)).at[0, :, jnp.asarray([2, 5])].set(jnp.asarray([[9.5], [10.0]]))
    tokens, parents, y = jnp.asarray([[0, 2]]), jnp.asarray([[-1, 0]]), jnp.asarray([[7, 7]])
    for stop, expected in ((2, 0), (5, 0), (7, 0), (3, 1), (-1, 1)):
        for stops in ([-1, stop], [stop, -1], [stop, 8]):
            verdict = check(name, logits, tokens, parents, y, row_controls(*stops), max_depth=1)
            assert int(verdict.num_accepted[0]) == expected


@pytest.mark.parametrize(
    ("name", "nodes", "blocks"),
    [
        ("mosaic", 8, TpuBlocks(8, 128)),
        ("mosaic", 6, TpuBlocks(8, 256)),
        ("mosaic_simulated", 8, TpuBlocks(8, 128)),
    ],
)
def test_every_legal_block_gives_the_same(name, nodes, blocks):
    """The simulated kernel also has no race."""
    batch = 9 if name == "mosaic_simulated" else 20
    arguments, options = accept_case(11, batch, nodes, 3, 300, sampled=True)
    check(name, *arguments, **options, blocks=blocks)


@pytest.mark.slow
def test_trees_too_large_for_a_block_are_walked_behind_the_fold():
    arguments, options = accept_case(12, 9, 140, 5, 40)
    check("mosaic", *arguments, **options)


def test_an_unknown_margin_is_named():
    arguments, options = accept_case(1, 1, 1, 0, 8)
    with pytest.raises(ValueError, match="margin is 'rato': expected one of ratio, gap"):
        margin_accept(*arguments, **options, margin="rato")
