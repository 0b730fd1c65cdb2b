"""Frequencies, compared with transformers' ROPE_INIT_FUNCTIONS, and angles, compared with float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.hub.config_json import from_json
from mars_jax.models.config import ModelConfig, Rope
from mars_jax.models.rope import angles, frequencies, rotate
from mars_jax.utils.errors import MarsError
from tests.helpers import transformers_oracle

# Parameters of published checkpoints: Llama 3.1 and 3.2, Qwen2.5 with YaRN, and edge cases of each formula.
PUBLISHED = [
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 1.0, "attention_factor": None, "beta_fast": 16, "truncate": False},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0},
]


@pytest.mark.parametrize("scaling", PUBLISHED)
@pytest.mark.parametrize("theta, dim", [(10000.0, 64), (500000.0, 128), (1e6, 80)])
def test_frequencies_equal_those_of_transformers(scaling, theta, dim):
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"original_max_position_embeddings": 8192, "rope_theta": theta, **scaling}
    sizes = {"hidden_size": 2 * dim, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    with transformers_oracle.third_party():
        theirs = LlamaConfig(**sizes, max_position_embeddings=16384, rope_parameters=dict(scaling))
        expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, "cpu")
    data = {"model_type": "llama", "vocab_size": 8, **sizes, "rope_scaling": scaling}
    rope = from_json(data).rope
    np.testing.assert_allclose(frequencies(rope, dim), expected.numpy(), rtol=2e-6)  # float32 powers
    np.testing.assert_allclose(rope.attention_factor, factor, rtol=1e-12)


@pytest.mark.parametrize("trained", [4096, 16384])
def test_longrope_divides_by_the_factors_of_the_context(trained):
    """In transformers, the length of the text selects the factors; here it is the context, 16,384."""
    pytest.importorskip("torch")
    from transformers import Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = {"short_factor": np.linspace(1, 2, 36).tolist(), "long_factor": np.linspace(1, 60, 36).tolist()}
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **factors}
    sizes = {"hidden_size": 192, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"max_position_embeddings": 16384, "original_max_position_embeddings": trained}
    with transformers_oracle.third_party():
        theirs = Phi3Config(**sizes, rope_parameters=dict(scaling))
        expected, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu", seq_len=16384)
    rope = from_json({"model_type": "phi3", "vocab_size": 8, **sizes, "rope_scaling": scaling}).rope
    assert rope.is_long == (trained < 16384)
    np.testing.assert_allclose(frequencies(rope, 96), expected.numpy(), rtol=2e-6)
    np.testing.assert_allclose(rope.attention_factor, factor, rtol=1e-12)


def test_a_part_of_a_head_is_rotated():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 2, 8)), jnp.float32)
    cos, sin = angles(jnp.asarray([[0, 5, 9]], jnp.int32), Rope(fraction=0.5), 8)
    assert cos.shape == (1, 3, 1, 2)
    y = rotate(x, cos, sin)
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(y[..., :4], rotate(x[..., :4], cos, sin))
    # Interleaved pairs (0, 1) and (2, 3) are rotated as (0, 2) and (1, 3) of the reordered input.
    pairs = x[..., jnp.asarray([0, 2, 1, 3, 4, 5, 6, 7])]
    np.testing.assert_array_equal(rotate(x, cos, sin, interleaved=True), rotate(pairs, cos, sin))


def test_angles_are_float32_far_into_the_context():
    position = 131071
    cos, sin = angles(jnp.full((1, 1), position, jnp.int32), Rope(), 8)
    exact = position * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    # The float32 rounding of the angle itself: half a unit in the last place of 131071.
    np.testing.assert_allclose(cos[0, 0, 0], np.cos(exact), atol=0.01)
    np.testing.assert_allclose(sin[0, 0, 0], np.sin(exact), atol=0.01)


def test_a_rope_that_makes_no_sense_is_refused():
    with pytest.raises(MarsError, match="rope kind 'su' is not supported: choose one of none, linear"):
        Rope(kind="su")
    with pytest.raises(MarsError, match="needs original_max_positions"):
        dataclasses.replace(Rope(), kind="yarn", factor=2.0)
    with pytest.raises(MarsError, match="must be positive"):
        Rope(theta=0.0)
    with pytest.raises(MarsError, match=r"rope fraction is 1\.5: expected a number above 0, and at most 1"):
        Rope(fraction=1.5)
    with pytest.raises(MarsError, match="divisors must be positive"):
        Rope(kind="longrope", original_max_positions=8, short_divisors=(1.0, 0.0))
    with pytest.raises(MarsError, match="longrope has 2 divisors: expected 4"):
        rope = Rope(kind="longrope", original_max_positions=8, short_divisors=(1.0, 2.0))
        ModelConfig(vocab_size=8, hidden_size=16, intermediate_size=8, num_layers=1, num_heads=2, rope=rope)
