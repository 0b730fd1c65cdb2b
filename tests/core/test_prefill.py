"""Number of tokens in each forward of the prompt."""

import jax
import jax.numpy as jnp
import pytest

from mars_jax import drafters, verify
from mars_jax.core import axes as mesh
from mars_jax.core import decode, prefill
from mars_jax.core.controls import make_controls
from mars_jax.core.fake import hash_model
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from mars_jax.utils.errors import MarsError

MODEL = hash_model(vocab_size=11)


def widths_of(pair, chunk_of_model, buffer, chunk_of_decoder):
    """Trace the prefill of a prompt; return how many tokens a model reads at once."""
    widths = set()

    def forward(params, tokens, visible, cache):
        widths.add(tokens.shape[1])
        return MODEL.forward(params, tokens, visible, cache)

    target, drafter = pair(MODEL._replace(forward=forward, prefill_chunk=chunk_of_model))
    decoder = decode.speculative_decoder(target, drafter, verify.exact(), prefill_chunk=chunk_of_decoder)
    tokens, lengths = jnp.ones((1, buffer), jnp.int32), jnp.asarray([3], jnp.int32)
    controls, keys = make_controls(1, limit=buffer), keys_from_seeds(jnp.arange(1))
    decode.shapes(decoder, Params(()), Prompts(tokens, lengths, controls, verify.exact(), keys))
    return widths


@pytest.mark.parametrize(
    ("of_model", "of_decoder", "buffer", "expected"),
    [
        (None, None, 128, prefill.CHUNK),
        (None, None, prefill.LONG, prefill.LONG_CHUNK),
        (None, None, 32, 32),
        (24, None, 128, 24),
        (24, 16, 128, 16),
    ],
)
def test_the_chunk_of_the_decoder_overrides_the_models_and_that_the_backends(
    of_model, of_decoder, buffer, expected
):
    assert widths_of(lambda model: (model, drafters.none()), of_model, buffer, of_decoder) == {expected}


def test_a_draft_model_uses_its_own_chunk():
    assert widths_of(lambda model: (MODEL, drafters.language_model(model, 2)), 8, 128, 32) == {8}


def test_an_accelerator_is_filled(monkeypatch):
    monkeypatch.setattr(mesh, "device_kind", lambda: "TPU v5 lite")
    assert prefill.chunk_of(64) == prefill.chunk_of(4096) == 512
    for axes, expected in (("model=4", [2048, 512, 512]), ("data=2,model=2", [512] * 3)):
        with jax.set_mesh(mesh.parse_mesh(axes)):
            assert [prefill.chunk_of(4096, rows) for rows in (1, 3, 16)] == expected
            assert prefill.chunk_of(2048) == 512


def test_a_chunk_of_no_token_is_refused():
    with pytest.raises(MarsError, match="prefill_chunk is 0"):
        decode.speculative_decoder(MODEL, drafters.none(), verify.exact(), prefill_chunk=0)
