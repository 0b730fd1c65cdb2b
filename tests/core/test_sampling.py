"""Processed logits compared with transformers and a sorting reference; the sampler compared with the softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_jax.core import sampling
from mars_jax.core.controls import make_controls
from mars_jax.core.types import NO_TOKEN
from mars_jax.utils.errors import MarsError
from tests.helpers import slow_but
from tests.helpers.rule_oracles import chi_square, controls_of

# temperature, top_k, top_p and min_p of each row
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (0.7, 0, 0.8, 0.0),
    (1.3, 20, 0.9, 0.0),
    (0.7, 0, 1.0, 0.1),
    (2.0, 100, 0.95, 0.02),
    (0.7, 1, 0.5, 0.0),
    (1.0, 10_000, 0.01, 1.0),
]
process = jax.jit(sampling.process)


def python_process(z, temperature, top_k, top_p, min_p):
    """Process one node by sorting in float64; return (log weights, mask). Ties with the last kept token are kept."""
    z = z.astype(np.float64)
    if temperature == 0:
        return None, np.arange(len(z)) == np.argmax(z)
    weights = np.exp((z - z.max()) / temperature)
    mask = z >= np.sort(z)[::-1][(top_k or len(z)) - 1 if top_k < len(z) else -1]
    if top_p < 1:
        weights = np.where(mask, weights, 0)
        mass_above = np.asarray([weights[z > value].sum() for value in z])
        mask &= mass_above < top_p * weights.sum()
    mask &= weights >= min_p * weights.max()
    return (z - z.max()) / temperature, mask & np.isfinite(z)


@pytest.mark.parametrize("vocab", [7, 300])
def test_process_equals_the_warpers_of_transformers(vocab):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    rows, nodes = SETTINGS, 6
    z = np.random.default_rng(vocab).normal(0, 3, (len(rows), nodes, vocab)).astype(np.float32)
    actual = np.asarray(process(jnp.asarray(z), controls_of(rows)))
    for b, (temperature, top_k, top_p, min_p) in enumerate(rows):
        warpers = [hf.TemperatureLogitsWarper(temperature)]
        warpers += [hf.TopKLogitsWarper(top_k)] if top_k else []
        warpers += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
        warpers += [hf.MinPLogitsWarper(min_p)] if min_p else []
        expected = torch.from_numpy(z[b])
        for warper in warpers:
            expected = warper(None, expected)
        expected = expected.numpy()
        np.testing.assert_array_equal(np.isneginf(actual[b]), np.isneginf(expected), err_msg=str(rows[b]))
        # Ours are shifted so that the largest is 0. float32 rounds differently, since the operations differ in order.
        np.testing.assert_allclose(actual[b], expected - expected.max(-1, keepdims=True), atol=1e-5)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_process_equals_the_sorting_reference_with_ties(seed):
    rng = np.random.default_rng(seed)
    batch, nodes, vocab = 6, 3, 40
    # Quarters tie often. Partial sums of irrational weights never equal a top_p in sixteenths.
    z = np.round(rng.normal(0, 2, (batch, nodes, vocab)) * 4) / 4
    z[rng.random(z.shape) < 0.1] = -np.inf
    z[..., 0] = np.where(np.isneginf(z).all(-1), 0, z[..., 0])
    rows = [
        (
            rng.choice([0.0, 0.3, 0.7, 1.9]),
            rng.integers(0, 50),
            rng.integers(1, 17) / 16,
            rng.choice([0.0, 0.03, 0.2]),
        )
        for _ in range(batch)
    ]
    actual = np.asarray(process(jnp.asarray(z, jnp.float32), controls_of(rows)))
    for b in range(batch):
        for n in range(nodes):
            logs, mask = python_process(z[b, n], *rows[b])
            np.testing.assert_array_equal(np.isfinite(actual[b, n]), mask, err_msg=str(rows[b]))
            np.testing.assert_allclose(actual[b, n][mask], 0.0 if logs is None else logs[mask], atol=1e-5)


@pytest.mark.parametrize(
    ("top_p", "count"),
    [
        (0.5, 1),  # the mass above the second token is one half, which is not less than top_p
        (np.nextafter(np.float32(0.5), np.float32(1)), 2),
        (0.75, 2),
        (np.nextafter(np.float32(0.75), np.float32(1)), 4),  # the last two tie
        (0.875, 4),
        (np.nextafter(np.float32(0.5), np.float32(0)), 1),
    ],
)
def test_top_p_at_the_boundary_of_a_partial_sum(top_p, count):
    """Halves, quarters and eighths have exact sums, so that `<` and `<=` differ."""
    weights = np.asarray([0.125, 0.5, 0.125, 0.25], np.float32)
    z = jnp.log(jnp.asarray(weights))[None, None]
    scaled = process(z, controls_of([(1.0, 0, 1.0, 0.0)]))
    # Otherwise the sums below would not be exact.
    np.testing.assert_array_equal(jnp.exp(scaled)[0, 0], 2 * weights)
    actual = process(z, controls_of([(1.0, 0, top_p, 0.0)]))[0, 0]
    assert np.isfinite(actual).tolist() == (np.argsort(np.argsort(-weights, kind="stable")) < count).tolist()


def test_a_tiny_temperature_is_finite_and_a_zero_one_never_divides():
    z = jnp.asarray([[[1e4, 1e4 - 1, -np.inf]]] * 3, jnp.float32)
    actual = process(z, make_controls(3, limit=1, temperature=[0.0, 1e-30, 1e-42]))
    np.testing.assert_array_equal(np.exp(actual), [[[1, 0, 0]]] * 3)


@pytest.mark.parametrize("vocab", slow_but([5, 200], 5))
def test_sample_follows_the_processed_distribution(vocab):
    rows, draws = [*SETTINGS[:7], (0.0, 0, 1.0, 0.0)], 1 << 14
    z = np.random.default_rng(vocab).normal(0, 2, (len(rows), 1, vocab)).astype(np.float32)
    z[:, :, 1] = -np.inf
    keys = jax.random.split(jax.random.key(vocab), (draws, len(rows)))
    controls = controls_of(rows)
    places = jnp.zeros(z.shape[:2], jnp.int32)
    draw = jax.jit(jax.vmap(lambda k: sampling.sample(k, places, jnp.asarray(z), controls)))
    tokens = np.asarray(draw(keys))
    p = np.exp(np.asarray(process(jnp.asarray(z), controls), np.float64))[:, 0]
    p /= p.sum(-1, keepdims=True)
    for b in range(len(rows)):
        assert chi_square(tokens[:, b], p[b]) > 1e-3


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_argmax_takes_the_smaller_id_of_a_tie(seed):
    z = np.random.default_rng(seed).integers(-3, 4, (4, 3, 200)).astype(np.float32)
    np.testing.assert_array_equal(sampling.argmax(jnp.asarray(z)), np.argmax(z, -1))


def test_the_inverse_cdf_never_returns_a_token_of_weight_zero():
    rng = np.random.default_rng(0)
    weights = np.where(
        rng.random((64, 500)) < 0.98, 0, rng.random((64, 500)) * 10.0 ** rng.integers(-20, 3, (64, 500))
    )
    weights[:, rng.integers(500)] = 1.0
    last = 1.0 - 2.0**-24  # above every uniform that can be drawn: the end of the sum, including rounding
    for u in (0.0, 0.5, last, 1.0):
        tokens = sampling.inverse_cdf(jnp.asarray(weights, jnp.float32), jnp.full((64,), u, jnp.float32))
        assert np.all(weights[np.arange(64), tokens] > 0)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_the_inverse_cdf_is_the_inverse_of_the_cumulative_sum(seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 4, (32, 300))  # small whole numbers: float32 sums are exact
    weights[:, 7] += 1
    uniform = rng.random(32).astype(np.float32)
    tokens = sampling.inverse_cdf(jnp.asarray(weights, jnp.float32), jnp.asarray(uniform))
    target = uniform * weights.sum(-1).astype(np.float32)
    np.testing.assert_array_equal(tokens, np.argmax(np.cumsum(weights, -1) > target[:, None], -1))


def test_a_number_belongs_to_its_position():
    """The draw at a position is the same in every tree."""
    keys = jax.random.split(jax.random.key(5), 3)
    first = sampling.node_uniforms(keys, jnp.asarray([[4, 5, 6]] * 3, jnp.int32))
    tree = sampling.node_uniforms(keys, jnp.asarray([[5, 6, 6, 4]] * 3, jnp.int32))
    np.testing.assert_array_equal(tree, first[:, [1, 2, 2, 0]])
    assert len(np.unique(first)) == 9


def test_controls_take_scalars_and_rows():
    built = make_controls(2, limit=[5, 6], temperature=0.5, strict=[True, False], stop_tokens=[[1], [2, 3]])
    assert built.limit.tolist() == [5, 6] and built.temperature.tolist() == [0.5, 0.5]
    assert built.strict.tolist() == [True, False]
    assert built.stop_tokens.tolist() == [[1, NO_TOKEN], [2, 3]]
    assert make_controls(2, limit=1, stop_tokens=[4, 5]).stop_tokens.tolist() == [[4, 5], [4, 5]]
    assert make_controls(2, limit=1).stop_tokens.tolist() == [[NO_TOKEN], [NO_TOKEN]]
    assert make_controls(2, limit=1, stop_tokens=[[], [7]]).stop_tokens.tolist() == [[NO_TOKEN], [7]]
    traced = jax.jit(
        lambda t: make_controls(2, limit=1, temperature=t, stop_tokens=jnp.zeros((2, 3), jnp.int32))
    )
    assert traced(jnp.asarray([0.0, 1.0])).temperature.tolist() == [0.0, 1.0]


BAD_VALUES = {
    "temperature": [-0.1, np.nan, np.inf, [1.0, 1.0, 1.0], "warm"],
    "top_p": [0.0, 1.1],
    "min_p": [-0.1, 1.1],
    "top_k": [-1, 2.5],
    "limit": [0, 2**40],
    "stop_tokens": [[1.5], [-7], [[1], [2], [3]]],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values]
)
def test_controls_refuse_a_bad_value_in_one_sentence_that_names_it(name, value):
    with pytest.raises(MarsError, match=f"^{name} .*expected.*\\.$"):
        make_controls(2, **{"limit": 8, name: value})
