"""Every form of `margin_stats`, compared with numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import MarginStats, TpuBlocks, margin_stats
from kernels_pallas.margin import xla
from tests.helpers import slow_but
from tests.helpers.implementations import assert_no_races, compiled
from tests.helpers.kernel_oracles import top_two

# Sums of up to 150,000 float32 exponentials in different orders, and a polynomial exponential on CPU.
TOLERANCE = 2e-5


def normal(*shape, seed=0, scale=3.0, dtype=jnp.float32):
    z = np.random.default_rng(seed).normal(scale=scale, size=shape)
    return jax.device_put(z.astype(np.float32).astype(dtype))


def ties():
    """Return rows with three equal largest logits, within a block and across blocks."""
    z = np.zeros((7, 1300), np.float32)
    places = [(0, 1, 2), (5, 133, 261), (1299, 4, 900), (128, 256, 384), (127, 128, 129), (1298, 1299, 0)]
    for row, tokens in enumerate(places):
        z[row, list(tokens)] = 2.0
    return jax.device_put(z)


def zeros_of_both_signs():
    z = np.full((17, 300), -1.0, np.float32)
    z[::2, [3, 200]], z[1::2, [3, 200]] = (-0.0, 0.0), (0.0, -0.0)
    return jax.device_put(z)


def masked():
    """Return rows without an unmasked token, with one, and with whole blocks masked."""
    z = np.asarray(normal(7, 1300)).copy()
    z[0] = z[6] = -np.inf
    z[1, 1:] = -np.inf
    z[2, :-1] = -np.inf
    z[3, :700] = -np.inf
    z[4, 200:] = -np.inf
    z[5, np.arange(1300) % 7 > 0] = -np.inf
    return jax.device_put(z)


SIZES = [(v, "float32") for v in (1, 128, 129, 151936)]
SIZES += [(v, "bfloat16") for v in (129, 32000)]
# Single rows, matrices, trees whose size is no multiple of 8, and more dimensions.
LEADS = [(), (17,), (2, 33), (2, 2, 3)]
# Cases of one shape share a program.
CASES = {
    **{f"{v} tokens in {dtype}": functools.partial(normal, 2, 3, v, dtype=dtype) for v, dtype in SIZES},
    **{f"rows {lead}": functools.partial(normal, *lead, 300) for lead in LEADS},
    "ties": ties,
    "zeros of both signs": zeros_of_both_signs,
    # bfloat16 has 8 bits of mantissa: near 100 neighbouring values are 0.5 apart, so ties abound.
    "ties in bfloat16": lambda: jnp.round(normal(2, 3, 129) + 100.0).astype(jnp.bfloat16),
    "negative": lambda: -10.0 - jnp.abs(normal(2, 33, 300)),
    "huge": lambda: normal(2, 33, 300) * 1e30,
    "tiny": lambda: normal(2, 33, 300) * 1e-30,
    "masked": masked,
}
FORMS = ("reference", "xla", "partitioned", "mosaic", "mosaic_simulated")


@functools.cache
def stats_of(form):
    return compiled(margin_stats, form, ("logsumexp", "blocks"))


def check(form, logits, *, logsumexp=True, **options):
    """Compare with numpy: values and ids exactly; only the logsumexp may differ by rounding."""
    stats = stats_of(form)(logits, logsumexp=logsumexp, **options)
    assert [x.dtype for x in stats[:4]] == [jnp.float32, jnp.int32, jnp.float32, jnp.int32]
    reference = top_two(logits)
    for field, value, expected in zip(MarginStats._fields, stats[:4], reference[:4], strict=False):
        np.testing.assert_array_equal(value, expected, err_msg=field)
    if logsumexp:
        np.testing.assert_allclose(stats.logsumexp, reference[4], atol=TOLERANCE, rtol=1e-6)
    else:
        assert stats.logsumexp is None
    if form == "mosaic_simulated":
        assert_no_races()


def is_slow(form, case):
    like_another = case in ("128 tokens in float32", "rows (2, 2, 3)", "tiny")
    large = case.startswith(("151936", "32000 tokens in b"))
    return form == "mosaic_simulated" or like_another or (form == "mosaic" and large)


PAIRS = [(form, case) for form in FORMS for case in CASES]


@pytest.mark.parametrize(("form", "case"), slow_but(PAIRS, *(pair for pair in PAIRS if not is_slow(*pair))))
def test_statistics_are_those_of_a_sort(form, case):
    check(form, CASES[case]())


@pytest.mark.parametrize("form", slow_but(FORMS, *FORMS[:-1]))
def test_statistics_without_the_logsumexp(form):
    check(form, normal(3, 1100), logsumexp=False)


@pytest.mark.parametrize("form", slow_but(FORMS, *FORMS[:-1]))
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_rows_of_few_values(form, seed):
    rng = np.random.default_rng(seed)
    values = np.asarray([-np.inf, -2.0, -0.0, 0.0, 1.5, 1.5, 3.0], np.float32)
    check(form, jax.device_put(rng.choice(values[: rng.integers(1, 8)], size=(7, 1300))))


@pytest.mark.parametrize("blocks", [TpuBlocks(8, 128), TpuBlocks(16, 384), TpuBlocks(24, 1024)])
def test_every_legal_block_gives_the_same(blocks):
    check("mosaic", normal(24, 1025), blocks=blocks)
    check("mosaic", normal(19, 1000), blocks=blocks._replace(trees=8))


def test_the_simulated_kernel_has_no_race():
    """Use several blocks of rows and of the vocabulary, the last ones partial."""
    check("mosaic_simulated", normal(16, 700), blocks=TpuBlocks(8, 256))


def test_greedy_statistics_compute_no_exponential():
    program = jax.jit(margin_stats).lower(normal(2, 2048)).as_text()
    assert "exponential" not in program and "power" not in program


def test_more_rows_than_the_xla_form_takes_at_a_time():
    """Use a row count that is no multiple of the rows of one iteration."""
    check("xla", normal(xla.ROWS_BYTES // (4 * 70_000) + 3, 70_000))
