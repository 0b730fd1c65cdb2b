"""Rows of a running state start anew, and the others do not notice.

B rows of the state, b rows that are put into it, T token buffer, M stop tokens. Oracle: each row decoded alone
(tests/core/test_insert.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from mars_jax.core import cache as kv_cache
from mars_jax.core import mesh as meshes
from mars_jax.core.errors import MarsError
from mars_jax.core.guide import first_states
from mars_jax.core.types import NO_TOKEN, Controls, DecodeState, Params, PyTree

NO_ROW = -1
"""An entry of `rows` that only fills the sub-batch, and is put nowhere."""


def put_by(put: Callable[[PyTree, Array, PyTree], PyTree]) -> Callable:
    """`Decoder.put` of a decoder; see there. `put` is the target's, `LanguageModel.put`."""

    def place(
        state: DecodeState, at: Array, read: DecodeState, controls: PyTree, rule: PyTree, keys: Array
    ) -> DecodeState:
        limit = jnp.minimum(controls.limit, state.tokens.shape[1])
        new = dataclasses.replace(
            read,
            controls=controls,
            rule=rule,
            keys=keys,
            done=read.length >= limit,
            guides=first_states(controls),
        )
        return scatter(put, state, at, new)

    return place


def scatter(
    put: Callable[[PyTree, Array, PyTree], PyTree], state: DecodeState, at: Array, new: DecodeState
) -> DecodeState:
    """The rows of `new` put into rows `at` i32[b] of the state; one past the end is dropped."""
    cache = put(state.cache, at, new.cache)
    others = dataclasses.replace(state, cache=())
    others = kv_cache.put(others, at, dataclasses.replace(new, cache=()))
    return dataclasses.replace(others, cache=cache)


def insert_by(init: Callable[..., DecodeState], put: Callable[[PyTree, Array, PyTree], PyTree]) -> Callable:
    """`Decoder.insert` of a decoder.

    Args:
      init: `(params, prompts i32[b, T], lengths, controls, rule, keys) -> DecodeState` of b rows.
      put: of the target, `LanguageModel.put`.
    """

    def place(
        params: Params, state: DecodeState, ids: Array, rows: Array, prompts: Array, *rest: PyTree
    ) -> DecodeState:
        width = state.tokens.shape[1] - prompts.shape[1]
        new = init(params, jnp.pad(prompts, ((0, 0), (0, width))), *rest)
        # Of a mesh's part of the rows, `ids` says which they are; what is none of them goes past the end.
        mine = rows[:, None] == ids[None]  # bool[b, B]
        at = jnp.where(jnp.any(mine, axis=1), jnp.argmax(mine, axis=1), ids.shape[0]).astype(jnp.int32)
        return scatter(put, state, at, new)

    def insert(
        params: Params,
        state: DecodeState,
        rows: Array,
        prompts: Array,
        lengths: Array,
        controls: Controls,
        rule: PyTree,
        keys: Array,
    ) -> DecodeState:
        batch, buffer = state.tokens.shape
        rows = jnp.asarray(rows, jnp.int32)
        if prompts.shape[1] > buffer:
            raise MarsError(
                f"the prompts are {prompts.shape[1]} wide and the state's token buffer {buffer}: cut them to {buffer}."
            )
        check_insert(rows, batch)
        controls = _as_wide(controls, state.controls)
        ids = jnp.arange(batch, dtype=jnp.int32)
        return meshes.by_rows(place)(params, state, ids, rows, prompts, lengths, controls, rule, keys)

    return insert


def check_insert(rows: Any, batch: int) -> None:
    """Raise MarsError for rows that are not of the state, are named twice, or are on another device of the mesh."""
    count = rows.shape[0]
    mesh = meshes.current()
    parts = meshes.size_of("data", mesh)
    if mesh is not None:
        meshes.check_rows(count, mesh)
    if isinstance(rows, Tracer) or (isinstance(rows, Array) and not rows.is_fully_addressable):
        return
    given = np.asarray(rows)
    named = given[given != NO_ROW]
    if np.any((named < 0) | (named >= batch)) or len(set(named.tolist())) < len(named):
        raise MarsError(
            f"rows are {given.tolist()}: expected each of 0 to {batch - 1} at most once, or {NO_ROW} for none."
        )
    part = np.arange(count) // (count // parts)
    if np.any((given != NO_ROW) & (given // (batch // parts) != part)):
        raise MarsError(
            f"rows are {given.tolist()} on a mesh with data={parts}: expected the first {count // parts} of them among "
            f"the first {batch // parts} rows of the state, and so on, or {NO_ROW} for none."
        )


def _as_wide(controls: Controls, state: Controls) -> Controls:
    """Controls with as many stop tokens and biased tokens per row as the state has: a row's own are padded."""
    if (controls.edits is None) != (state.edits is None):
        raise MarsError(
            "the rows have edits of logits and the state has none, or the other way round: give both make_edits or "
            "neither."
        )

    if jax.tree.structure(controls.guides) != jax.tree.structure(state.guides):
        raise MarsError(
            "the rows have a constraint or a span and the state has none, or the other way round: give both the same "
            "kinds of guides; a row without one begins in the state 0."
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
