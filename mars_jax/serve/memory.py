"""Number of rows that fit in a device's memory. Oracle: the sizes of the arrays (tests/serve/test_queue.py)."""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import jax.numpy as jnp

from mars_jax.core.prefill import WIDE_CHUNK
from mars_jax.mesh.axes import state_shardings
from mars_jax.serve.prepare import of_mesh
from mars_jax.serve.prepared import Prepared

MOST, MOST_ON_CPU = 128, 16
"""Maximum rows of a batch. A CPU is saturated by a few: the time of a step then grows in proportion to the rows."""
SHARE, SHARE_OF_HOST = 0.85, 0.25
"""Fraction of a device's memory, and of a host's, for weights, rows and a step's arrays. Other programs use the host's
memory too."""


def default_rows(prepared: Prepared) -> int:
    """Return the number of rows to decode side by side: as many as fit in memory, at most one per request.

    The number depends only on the machine and not on other contents of its memory. If the size of the memory is
    unknown, use the maximum, `MOST` or `MOST_ON_CPU`.
    """
    target = prepared.target
    leaves = jax.tree.leaves((prepared.params.target, prepared.params.draft))
    weights = [x for x in leaves if isinstance(x, jax.Array)]
    device = next(iter(weights[0].sharding.addressable_devices)) if weights else jax.local_devices()[0]
    parts = of_mesh(target, 1)
    max_rows = MOST_ON_CPU if device.platform == "cpu" else MOST
    room = _bytes_of(device)
    if room is not None:
        weight_bytes = sum(_part(x, x.sharding) for x in weights)
        max_rows = min(max_rows, int((room - weight_bytes) // row_bytes(prepared)))
    return min(max(max_rows, 1) * parts, len(prepared.requests))


def row_bytes(prepared: Prepared) -> int:
    """Return the bytes of a row on each device that holds it.

    They are its state, plus the larger of four copies of a step's logits and a layer's activations for a prompt chunk.
    """
    parts = of_mesh(prepared.target, 1)
    prompts = prepared.prompts([None] * parts)
    with prepared.target.on_mesh():
        state = jax.eval_shape(prepared.decoder.init, prepared.params, prompts)
    mesh = prepared.target.mesh
    leaves = jax.tree.leaves(state)
    places = [None] * len(leaves) if mesh is None else jax.tree.leaves(state_shardings(state, mesh))
    nodes, vocab = prepared.drafter.drafter.num_nodes, prepared.target.model.vocab_size
    config, model = prepared.target.config, prepared.target.model
    # A user's model may have a config without these fields.
    wide = 2 * getattr(config, "intermediate_size", 0) + 4 * getattr(config, "hidden_size", 0)
    reading = min(model.prefill_chunk or WIDE_CHUNK, state.tokens.shape[1]) * wide * 4
    return max(4 * nodes * vocab * 4, reading) + sum(map(_part, leaves, places))


def _part(x: Any, place: Any) -> int:
    """Return the bytes of an array, or of the part that a device holds."""
    shape = x.shape if place is None else place.shard_shape(x.shape)
    # A key is two words.
    size = 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
    return math.prod(shape) * size


def _bytes_of(device: Any) -> float | None:
    """Return the bytes of a device's memory that may be used; None if they are unknown."""
    if device.platform == "cpu":
        try:
            return SHARE_OF_HOST * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError, AttributeError):
            return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else SHARE * limit
