"""Rows of a running state start again, and the others do not notice.

B rows of the state, b rows that are put into it, T token buffer, M stop tokens. Oracle: each row decoded alone
(tests/core/test_insert.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core import cache as kv_cache
from mars_jax.core import mesh as meshes
from mars_jax.core.errors import MarsError
from mars_jax.core.given import check_same
from mars_jax.core.types import NO_TOKEN, Controls, DecodeState, LanguageModel, Params, Prompts


def scatter(target: LanguageModel, state: DecodeState, at: Array, new: DecodeState) -> DecodeState:
    """The rows of `new` put into rows `at` i32[b] of the state; one past the end is dropped."""
    for name in ("tokens", "draft", "rule"):
        check_same(name, getattr(state, name), getattr(new, name), rows=False)
    cache = target.put(state.cache, at, new.cache)
    others = dataclasses.replace(state, cache=())
    others = kv_cache.put(others, at, dataclasses.replace(new, cache=()))
    return dataclasses.replace(others, cache=cache)


def inserted(
    read: Callable[[Params, Prompts], DecodeState],
    put: Callable[[DecodeState, Array, DecodeState], DecodeState],
    params: Params,
    state: DecodeState,
    rows: Array,
    prompts: Prompts,
) -> DecodeState:
    """`Decoder.insert` of prompts that are yet to be read.

    Args:
      read: gives the state of b rows that have read prompts of the buffer's width.
      put: puts its rows into places i32[b] of another state, and drops one past the end.
      params, state, rows, prompts: as for `Decoder.insert`.
    """
    batch, buffer = state.tokens.shape
    width = prompts.tokens.shape[1]
    if width > buffer:
        raise MarsError(
            f"the prompts are {width} wide and the state's token buffer {buffer}: cut them to {buffer}."
        )
    tokens = jnp.pad(prompts.tokens, ((0, 0), (0, buffer - width)))
    prompts = dataclasses.replace(prompts, tokens=tokens)

    def place(params: Params, state: DecodeState, ids: Array, rows: Array, prompts: Prompts) -> DecodeState:
        # Of a mesh's part of the rows, `ids` says which they are; what is none of them goes past the end.
        mine = rows[:, None] == ids[None]  # bool[b, B]
        # The place in this part, and its size, one past its end, for rows of other parts: a scatter drops those.
        at = jnp.where(jnp.any(mine, axis=1), jnp.argmax(mine, axis=1), ids.shape[0]).astype(jnp.int32)
        return put(state, at, read(params, prompts))

    ids = jnp.arange(batch, dtype=jnp.int32)
    return meshes.by_rows(place)(params, state, ids, jnp.asarray(rows, jnp.int32), prompts)


_SAME_KIND = {
    "temperature": ("a temperature", "make_controls a number for both, or None for both"),
    "edits": ("edits of logits", "both make_edits or neither"),
    "guides": (
        "a constraint or a span",
        "both the same kinds of guides; a row without one begins in the state 0",
    ),
}
"""Controls whose absence is compiled: the rows and the state have one or neither does."""


def as_wide(controls: Controls, state: Controls) -> Controls:
    """Controls with as many stop tokens and biased tokens per row as the state has: a row's own are padded."""
    for name, (what, cure) in _SAME_KIND.items():
        if jax.tree.structure(getattr(controls, name)) != jax.tree.structure(getattr(state, name)):
            raise MarsError(
                f"the rows have {what} and the state has none, or the other way round: give {cure}."
            )

    def padded(values: Array, like: Array, what: str, fill: Any) -> Array:
        room = like.shape[1] - values.shape[1]
        if room < 0:
            raise MarsError(
                f"a row has {values.shape[1]} {what} and the state has room for {like.shape[1]}: make the state's "
                "controls with as many, padded with NO_TOKEN."
            )
        return jnp.pad(values, ((0, 0), (0, room)), constant_values=fill)

    made = dataclasses.replace(
        controls, stop_tokens=padded(controls.stop_tokens, state.stop_tokens, "stop tokens", NO_TOKEN)
    )
    if controls.edits is None or state.edits is None:
        return made
    edits = dataclasses.replace(
        controls.edits,
        bias_tokens=padded(controls.edits.bias_tokens, state.edits.bias_tokens, "biased tokens", NO_TOKEN),
        bias=padded(controls.edits.bias, state.edits.bias, "biased tokens", 0.0),
    )
    return dataclasses.replace(made, edits=edits)
