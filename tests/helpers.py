"""Shared by the tests: build a batch for the hash model, and decode it the slow way."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.types import Params, keys_from_seeds

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


@jax.jit
def one_row(batch, row):
    """A row of a tree of arrays as a batch of one. `x[row : row + 1]` outside of jit compiles for every row anew."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), batch)


def logits_after(model, tokens, *, width):
    """Logits f32[V] of a model without weights after a list of tokens, from a cache that has no past.

    Padded to one width, so that every length shares a compilation; the mask hides the padding.
    """
    padded = np.full((1, width), 99, np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_last_logits(model, jnp.asarray(padded), jnp.int32(len(tokens))))


@functools.partial(jax.jit, static_argnums=0)
def _last_logits(model, tokens, length):
    width = tokens.shape[1]
    position = jnp.arange(width, dtype=jnp.int32)[None]
    mask = (position[:, None, :] <= position[:, :, None]) & (position < length)[:, None, :]
    out = model.forward((), tokens, position, mask, model.init_cache(1, width), jnp.zeros((1,), jnp.int32))
    return model.unembed((), out.hidden)[0, length - 1]


def committed(state):
    """The committed tokens of each row, as lists."""
    tokens, length = jax.device_get((state.tokens, state.length))
    return [row[:n].tolist() for row, n in zip(tokens, length, strict=True)]
