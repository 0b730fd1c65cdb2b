"""Shared by the tests: build a batch for the hash model, and decode it the slow way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax import decode
from mars_jax.controls import make_controls
from mars_jax.types import Params, keys_from_seeds

NO_WEIGHTS = Params(target=(), draft=())


def ragged(lengths, buffer, vocab, seed=0):
    """Random prompts of the given lengths, left-aligned in a buffer; the rest is filled with junk, not zeros."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, vocab, (len(lengths), buffer)), jnp.int32), jnp.asarray(
        lengths, jnp.int32
    )


def decode_all(
    target, drafter, rule, prompts, lengths, *, limit=None, seeds=None, params=NO_WEIGHTS, **chosen
):
    """Run to the end; returns (state, stats)."""
    batch, buffer = prompts.shape
    made = make_controls(batch, limit=buffer if limit is None else limit, **chosen)
    keys = keys_from_seeds(jnp.asarray(range(batch) if seeds is None else seeds, jnp.uint32))
    decoder = decode.speculative_decoder(target, drafter, rule, prefill_chunk=16)
    state = decode.start(decoder, params, prompts, lengths, made, keys)
    return decode.run(decoder, params, state)


def committed(state):
    """The committed tokens of each row, as lists."""
    tokens, length = jax.device_get((state.tokens, state.length))
    return [row[:n].tolist() for row, n in zip(tokens, length, strict=True)]
