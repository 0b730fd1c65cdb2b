"""A vocabulary spread over 8 CPU devices: the same result, and no collective that carries the vocabulary."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import (
    MarginStats,
    empty,
    margin_accept,
    margin_stats,
    merge,
    sharded_margin_accept,
    sharded_margin_stats,
)
from tests.helpers.accept_cases import accept_case
from tests.helpers.kernel_oracles import top_two
from tests.helpers.meshes import mesh_of

VOCAB = 4096


def few_values(*shape):
    """Return logits with ties across every shard, rows of -inf and whole shards of -inf."""
    z = np.random.default_rng(0).integers(-3, 4, size=shape).astype(np.float32)
    z[0, 0], z[0, 1, 512:] = -np.inf, -np.inf
    z[0, 2, : VOCAB // 2] = -np.inf
    return jnp.asarray(z)


def check(stats, logits):
    """Compare with numpy. Sums of 4096 float32 exponentials have another order."""
    reference = top_two(logits)
    for value, expected in zip(stats[:4], reference[:4], strict=True):
        np.testing.assert_array_equal(value, expected)
    np.testing.assert_allclose(stats.logsumexp, reference[4], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("shards", [1, 8])
def test_ids_do_not_depend_on_the_number_of_shards(shards):
    mesh, logits = mesh_of(model=shards), few_values(3, 4, VOCAB)
    placed = jax.device_put(logits, NamedSharding(mesh, P(None, None, "model")))
    stats = jax.jit(functools.partial(sharded_margin_stats, mesh=mesh, axis="model", logsumexp=True))(placed)
    check(stats, logits)


def test_verdicts_equal_those_of_one_device_with_the_batch_spread_as_well():
    mesh = mesh_of(data=2, model=4)
    (logits, tokens, parents, y, controls), options = accept_case(4, 6, 9, 4, 512, sampled=True)
    expected = jax.jit(functools.partial(margin_accept, **options))(logits, tokens, parents, y, controls)
    placed = jax.device_put(logits, NamedSharding(mesh, P("data", None, "model")))
    spread = functools.partial(sharded_margin_accept, mesh=mesh, axis="model", batch_axis="data", **options)
    actual = jax.jit(spread)(placed, tokens, parents, y, controls)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_both_axes_of_a_mesh_can_hold_the_vocabulary():
    logits = few_values(2, 3, VOCAB)
    with jax.set_mesh(mesh_of(data=2, model=4)):
        stats = functools.partial(sharded_margin_stats, axis=("data", "model"), logsumexp=True)
        check(jax.jit(stats)(logits), logits)


def collectives(program):
    """Return (name, elements of the largest result) of every collective in an HLO text."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    matches = re.findall(rf" = (.*?) ({names})(?:-start)?\(", program)
    shapes = [(name, re.findall(r"\[([\d,]*)\]", result)) for result, name in matches]
    return [(name, max(math.prod(map(int, filter(None, s.split(",")))) for s in all)) for name, all in shapes]


def test_one_collective_of_a_few_numbers_per_node_inside_a_while_loop():
    """Compile a small decode loop: unembed with a sharded vocabulary, accept, repeat."""
    mesh, batch, nodes, shards = mesh_of(model=8), 2, 5, 8
    (_, tokens, parents, _, controls), options = accept_case(5, batch, nodes, 3, VOCAB)

    def loop(hidden, weight):
        def body(carry):
            i, hidden, _ = carry
            logits = jnp.einsum("bne,ev->bnv", hidden, weight)
            out = sharded_margin_accept(
                logits, tokens, parents, None, controls, mesh=mesh, axis="model", logsumexp=True, **options
            )
            return i + 1, hidden + out.next_token[:, None, None].astype(jnp.float32), out.num_accepted

        start = jnp.int32(0), hidden, jnp.zeros((batch,), jnp.int32)
        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, start)

    shapes = (
        jax.ShapeDtypeStruct((batch, nodes, 16), jnp.float32, sharding=NamedSharding(mesh, P())),
        jax.ShapeDtypeStruct((16, VOCAB), jnp.float32, sharding=NamedSharding(mesh, P(None, "model"))),
    )
    program = jax.jit(loop).lower(*shapes).compile().as_text()
    assert collectives(program) == [("all-gather", shards * 5 * batch * nodes)]


@pytest.mark.parametrize("vocab", [VOCAB, 8 * 501])
def test_without_shard_map_the_default_is_partitioned_without_gathering_the_vocabulary(vocab):
    mesh, batch, nodes, shards = mesh_of(model=8), 2, 5, 8

    def program(hidden, weight):
        return margin_stats(jnp.einsum("bne,ev->bnv", hidden, weight), logsumexp=True)

    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.integers(-2, 3, (batch, nodes, 4)), jnp.float32)
    weight = jnp.asarray(rng.integers(-2, 3, (4, vocab)), jnp.float32)
    placed = jax.device_put(weight, NamedSharding(mesh, P(None, "model")))
    compiled = jax.jit(program).lower(hidden, placed).compile()
    assert 0 < max(elements for _, elements in collectives(compiled.as_text())) <= shards * batch * nodes
    stats = compiled(hidden, placed)
    check(stats, np.einsum("bne,ev->bnv", hidden, weight))  # small integers: exact in any order


def test_a_vocabulary_or_axis_that_does_not_divide_is_named():
    mesh = mesh_of(model=8)
    with pytest.raises(ValueError, match="a vocabulary of 4097 does not divide over 8 devices"):
        sharded_margin_stats(jnp.zeros((1, 2, 4097)), mesh=mesh, axis="model")
    with pytest.raises(ValueError, match="axis is 'tensor' and the mesh has"):
        sharded_margin_stats(jnp.zeros((1, 2, 4096)), mesh=mesh, axis="tensor")


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
    expected = part(logits, range(12))
    assert_same(merge(merge(a, b), c), expected)
    assert_same(merge(a, merge(b, c)), expected)
    assert_same(merge(merge(c, a), b), expected)
    nothing = empty((6,), logsumexp=True)
    assert_same(merge(nothing, a), a)
    assert_same(merge(a, nothing), a)
    assert merge(a, b._replace(logsumexp=None)).logsumexp is None
