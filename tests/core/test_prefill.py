"""Number of tokens in each forward of the prompt."""

import jax
import jax.numpy as jnp
import pytest

from mars_jax import drafters, verify
from mars_jax.core import decode, mesh, prefill
from mars_jax.core.controls import make_controls
from mars_jax.core.errors import MarsError
from mars_jax.core.fake import hash_model
from mars_jax.core.types import Params, Prompts, keys_from_seeds

MODEL = hash_model(vocab_size=11)


def noting(widths, prefill_chunk):
    """Return a model that records the number of tokens in each of its forwards."""

    def forward(params, tokens, visible, cache):
        widths.append(tokens.shape[1])
        return MODEL.forward(params, tokens, visible, cache)

    return MODEL._replace(forward=forward, prefill_chunk=prefill_chunk)


def read(target, drafter, buffer, prefill_chunk):
    """Trace the prefill of a prompt."""
    decoder = decode.speculative_decoder(target, drafter, verify.exact(), prefill_chunk=prefill_chunk)
    prompts, lengths = jnp.ones((1, buffer), jnp.int32), jnp.asarray([3], jnp.int32)
    batch = Prompts(
        prompts, lengths, make_controls(1, limit=buffer), verify.exact(), keys_from_seeds(jnp.arange(1))
    )
    jax.eval_shape(decoder.init, Params(()), batch)


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
    widths = []
    read(noting(widths, of_model), drafters.none(), buffer, of_decoder)
    assert set(widths) == {expected}


def test_a_draft_model_uses_its_own_chunk():
    widths = []
    read(MODEL, drafters.language_model(noting(widths, 8), 2), 128, 32)
    assert set(widths) == {8}


def test_an_accelerator_is_filled(monkeypatch):
    monkeypatch.setattr(mesh, "device_kind", lambda: "TPU v5 lite")
    assert prefill.chunk_of(64) == prefill.chunk_of(4096) == 512
    for axes, wanted in (("model=4", [2048, 512, 512]), ("data=2,model=2", [512] * 3)):
        with jax.set_mesh(mesh.parse_mesh(axes)):
            assert [prefill.chunk_of(4096, rows) for rows in (1, 3, 16)] == wanted
            assert prefill.chunk_of(2048) == 512


def test_a_chunk_of_no_token_is_refused():
    with pytest.raises(MarsError, match="prefill_chunk is 0"):
        decode.speculative_decoder(MODEL, drafters.none(), verify.exact(), prefill_chunk=0)
