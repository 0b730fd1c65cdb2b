"""`margin_stats` against numpy: one class of cases that every implementation inherits."""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels_pallas import MarginStats, TpuBlocks, margin_stats, reference, xla
from tests.helpers.implementations import assert_no_races, compiled
from tests.helpers.kernel_oracles import top_two

# Sums of up to 150,000 float32 exponentials in different orders, and a polynomial exponential on CPU.
TOLERANCE = 2e-5


class Cases:
    """Every case compares values and ids exactly; only the logsumexp may differ by rounding."""

    name: str
    vocabularies: ClassVar = {
        "float32": (1, 2, 127, 128, 129, 32000, 151936),
        "bfloat16": (129, 32000),
    }

    @functools.cached_property
    def stats(self):
        return compiled(margin_stats, self.name, ("logsumexp", "blocks"))

    def check(self, logits, *, without=False, **options):
        """With the logsumexp; `without=True` also without it, where another kernel is compiled."""
        for logsumexp in (True, False)[: 1 + without]:
            got = self.stats(logits, logsumexp=logsumexp, **options)
            assert [x.dtype for x in got[:4]] == [jnp.float32, jnp.int32, jnp.float32, jnp.int32]
            want = top_two(logits)
            for field, value, expected in zip(MarginStats._fields, got[:4], want[:4], strict=False):
                np.testing.assert_array_equal(value, expected, err_msg=field)
            if logsumexp:
                np.testing.assert_allclose(got.logsumexp, want[4], atol=TOLERANCE, rtol=1e-6)
            else:
                assert got.logsumexp is None
        if self.name == "mosaic_simulated":
            assert_no_races()

    def normal(self, *shape, seed=0, scale=3.0, dtype=jnp.float32):
        z = np.random.default_rng(seed).normal(scale=scale, size=shape)
        return jnp.asarray(z, jnp.float32).astype(dtype)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_every_vocabulary_size(self, dtype):
        for vocab in self.vocabularies[dtype]:
            self.check(self.normal(2, 3, vocab, dtype=dtype))

    def test_without_the_logsumexp(self):
        self.check(self.normal(3, 1100), without=True)

    def test_every_shape_in_front_of_the_vocabulary(self):
        # One node, chains, trees that are no multiple of 8, matrices and single rows.
        for lead in [(), (17,), (3, 1), (2, 33), (2, 2, 3)]:
            self.check(self.normal(*lead, 300))

    def test_constant_rows_name_the_first_two_tokens(self):
        for value in (0.0, -7.5, 3.0):
            self.check(jnp.full((1, 3, 400), value, jnp.float32))

    def test_ties_go_to_the_smaller_id_wherever_they_lie(self):
        z = np.zeros((6, 1300), np.float32)
        for row, (i, j, k) in enumerate(
            [(0, 1, 2), (5, 133, 261), (1299, 4, 900), (128, 256, 384), (127, 128, 129), (1298, 1299, 0)]
        ):
            z[row, [i, j, k]] = 2.0
        self.check(jnp.asarray(z))

    def test_zero_and_minus_zero_are_equal(self):
        z = np.full((2, 300), -1.0, np.float32)
        z[0, [3, 200]], z[1, [3, 200]] = (-0.0, 0.0), (0.0, -0.0)
        self.check(jnp.asarray(z))

    def test_bfloat16_ties(self):
        # 8 bits of mantissa: near 100 neighbouring values are 0.5 apart, so ties abound.
        self.check(jnp.round(self.normal(2, 5, 700) + 100.0).astype(jnp.bfloat16))

    def test_all_negative_logits(self):
        self.check(-10.0 - jnp.abs(self.normal(2, 3, 500)))

    def test_huge_and_tiny_logits(self):
        z = self.normal(2, 3, 500)
        self.check(z * 1e30)
        self.check(z * 1e-30)

    def test_masked_vocabularies_give_no_nan(self):
        z = np.asarray(self.normal(7, 1300)).copy()
        z[0] = -np.inf  # nothing allowed
        z[1, 1:] = -np.inf  # one token
        z[2, :-1] = -np.inf
        z[3, :700] = -np.inf  # whole blocks
        z[4, 200:] = -np.inf
        z[5, np.arange(1300) % 7 > 0] = -np.inf
        z[6, [0, 2]] = np.inf, -np.inf
        z[6] = np.where(z[6] == np.inf, -np.inf, z[6])
        self.check(jnp.asarray(z))
        self.check(jnp.asarray(z).astype(jnp.bfloat16))

    # The subclasses are different executors on purpose; nothing is replayed from a database.
    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    @given(seed=st.integers(0, 2**32 - 1))
    def test_random_rows_of_few_values(self, seed):
        rng = np.random.default_rng(seed)
        values = np.asarray([-np.inf, -2.0, -0.0, 0.0, 1.5, 1.5, 3.0], np.float32)
        self.check(jnp.asarray(rng.choice(values[: rng.integers(1, 8)], size=(5, 517))))


def test_the_default_is_the_xla_form_on_cpu():
    z = Cases().normal(2, 3, 5000)
    got, want = jax.jit(margin_stats)(z), jax.jit(functools.partial(margin_stats, implementation="xla"))(z)
    jax.tree.map(np.testing.assert_array_equal, got, want)


class TestReference(Cases):
    name = "reference"


class TestXla(Cases):
    name = "xla"

    def test_greedy_statistics_compute_no_exponential(self):
        program = jax.jit(margin_stats).lower(self.normal(2, 2048)).as_text()
        assert "exponential" not in program and "power" not in program


class TestPartitioned(Cases):
    name = "partitioned"


class TestMosaic(Cases):
    name = "mosaic"
    vocabularies: ClassVar = {"float32": (1, 127, 129, 32000), "bfloat16": (129,)}

    @pytest.mark.parametrize("blocks", [TpuBlocks(8, 128), TpuBlocks(16, 384), TpuBlocks(24, 1024)])
    def test_every_legal_block_gives_the_same(self, blocks):
        self.check(self.normal(24, 1025), blocks=blocks)
        self.check(self.normal(19, 1000), blocks=blocks._replace(trees=8))


@pytest.mark.slow
class TestMosaicSimulated(Cases):
    name = "mosaic_simulated"
    vocabularies: ClassVar = {"float32": (1, 2, 127, 129, 32000), "bfloat16": (129,)}


def test_the_simulated_kernel_has_no_race():
    """The short form of the slow class above: several row blocks, several vocabulary blocks, the last
    partial."""
    suite = TestMosaicSimulated()
    suite.check(suite.normal(16, 700), blocks=TpuBlocks(8, 256))


@pytest.mark.parametrize("form", [reference.margin_stats, xla.margin_stats])
def test_no_form_sums_what_nobody_asks_for(form):
    assert form(jnp.asarray([[1.0, 3.0, 2.0]])).logsumexp is None


def test_rows_are_taken_a_few_at_a_time_and_none_is_lost():
    """More rows than fit into one turn, and no multiple of those."""
    rows = xla.ROWS_BYTES // (4 * 70_000) + 3
    z = np.random.default_rng(0).normal(scale=3.0, size=(rows, 70_000)).astype(np.float32)
    got, want = xla.margin_stats(jnp.asarray(z), logsumexp=True), top_two(z)
    for value, expected in zip(got[:4], want[:4], strict=True):
        np.testing.assert_array_equal(value, expected)
    np.testing.assert_allclose(got.logsumexp, want[4], atol=TOLERANCE, rtol=1e-6)
