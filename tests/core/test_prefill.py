"""How many tokens a prefill forward takes, and who says so."""

import jax
import jax.numpy as jnp
import pytest

from mars_jax import drafters, verify
from mars_jax.core import decode, mesh, prefill
from mars_jax.core.controls import make_controls
from mars_jax.core.errors import MarsError
from mars_jax.core.fake import hash_model
from mars_jax.core.types import Params, Prompts, keys_from_seeds


class Widths(list):
    """A model that notes how many tokens each of its forwards takes."""

    def of(self, model):
        def forward(params, tokens, visible, cache):
            self.append(tokens.shape[1])
            return model.forward(params, tokens, visible, cache)

        return model._replace(forward=forward)


def read(target, drafter, buffer: int, **options) -> None:
    decoder = decode.speculative_decoder(target, drafter, verify.exact(), **options)
    prompts, lengths = jnp.ones((1, buffer), jnp.int32), jnp.asarray([3], jnp.int32)
    controls = make_controls(1, limit=buffer)
    keys = keys_from_seeds(jnp.arange(1))
    jax.eval_shape(decoder.init, Params(()), Prompts(prompts, lengths, controls, verify.exact(), keys))


@pytest.mark.parametrize(
    ("own", "asked", "buffer", "wanted"),
    [
        (None, None, 128, prefill.CHUNK),
        (None, None, prefill.LONG, prefill.LONG_CHUNK),
        (None, None, 32, 32),
        (24, None, 128, 24),
        (24, 16, 128, 16),
    ],
)
def test_the_call_before_the_model_before_the_backend(own, asked, buffer, wanted):
    seen = Widths()
    read(
        seen.of(hash_model(vocab_size=11))._replace(prefill_chunk=own),
        drafters.none(),
        buffer,
        prefill_chunk=asked,
    )
    assert set(seen) == {wanted}


def test_a_draft_model_goes_by_its_own():
    seen = Widths()
    draft = seen.of(hash_model(vocab_size=11))._replace(prefill_chunk=8)
    read(hash_model(vocab_size=11), drafters.language_model(draft, 2), 128, prefill_chunk=32)
    assert set(seen) == {8}


def test_an_accelerator_is_filled(monkeypatch):
    monkeypatch.setattr(mesh, "device_kind", lambda: "TPU v5 lite")
    assert prefill.chunk_of(64) == prefill.chunk_of(4096) == 512
    for axes, wanted in (("model=4", [2048, 512, 512]), ("data=2,model=2", [512] * 3)):
        with jax.set_mesh(mesh.parse_mesh(axes)):
            assert [prefill.chunk_of(4096, rows) for rows in (1, 3, 16)] == wanted
            assert prefill.chunk_of(2048) == 512


def test_less_than_a_token_is_refused():
    with pytest.raises(MarsError, match="prefill_chunk is 0"):
        decode.speculative_decoder(
            hash_model(vocab_size=11), drafters.none(), verify.exact(), prefill_chunk=0
        )
