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
from jax import Array

from mars_jax.core import cache as kv_cache
from mars_jax.core import mesh as meshes
from mars_jax.core.errors import MarsError
from mars_jax.core.given import NO_ROW, check_same
from mars_jax.core.guide import first_states
from mars_jax.core.types import NO_TOKEN, Controls, DecodeState, LanguageModel, Params, PyTree


def put_by(target: LanguageModel, check_cache: Callable[[DecodeState], None]) -> Callable:
    """`Decoder.put` of a decoder; see there, and `insert_by`."""

    def place(
        state: DecodeState, rows: Array, read: DecodeState, controls: Controls, rule: PyTree, keys: Array
    ) -> DecodeState:
        batch, buffer = state.tokens.shape
        check_cache(state)
        check_cache(read)
        new = dataclasses.replace(
            read,
            controls=_as_wide(controls, state.controls),
            rule=rule,
            keys=keys,
            done=read.length >= jnp.minimum(controls.limit, buffer),
            guides=first_states(controls),
        )
        return scatter(target, state, jnp.where(rows == NO_ROW, batch, rows), new)

    return place


def scatter(target: LanguageModel, state: DecodeState, at: Array, new: DecodeState) -> DecodeState:
    """The rows of `new` put into rows `at` i32[b] of the state; one past the end is dropped."""
    for name in ("tokens", "draft", "rule"):
        check_same(name, getattr(state, name), getattr(new, name), rows=False)
    cache = target.put(state.cache, at, new.cache)
    others = dataclasses.replace(state, cache=())
    others = kv_cache.put(others, at, dataclasses.replace(new, cache=()))
    return dataclasses.replace(others, cache=cache)


def insert_by(
    init: Callable[..., DecodeState], target: LanguageModel, check_cache: Callable[[DecodeState], None]
) -> Callable:
    """`Decoder.insert` of a decoder.

    Args:
      init: `(params, prompts i32[b, T], lengths, controls, rule, keys) -> DecodeState` of b rows.
      target: whose cache the state has.
      check_cache: raises MarsError for a state with another one.
    """

    def place(
        params: Params, state: DecodeState, ids: Array, rows: Array, prompts: Array, *rest: PyTree
    ) -> DecodeState:
        check_cache(state)
        width = state.tokens.shape[1] - prompts.shape[1]
        new = init(params, jnp.pad(prompts, ((0, 0), (0, width))), *rest)
        # Of a mesh's part of the rows, `ids` says which they are; what is none of them goes past the end.
        mine = rows[:, None] == ids[None]  # bool[b, B]
        at = jnp.where(jnp.any(mine, axis=1), jnp.argmax(mine, axis=1), ids.shape[0]).astype(jnp.int32)
        return scatter(target, state, at, new)

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
        if prompts.shape[1] > buffer:
            raise MarsError(
                f"the prompts are {prompts.shape[1]} wide and the state's token buffer {buffer}: cut them to {buffer}."
            )
        rows = jnp.asarray(rows, jnp.int32)
        controls = _as_wide(controls, state.controls)
        ids = jnp.arange(batch, dtype=jnp.int32)
        return meshes.by_rows(place)(params, state, ids, rows, prompts, lengths, controls, rule, keys)

    return insert


def _as_wide(controls: Controls, state: Controls) -> Controls:
    """Controls with as many stop tokens and biased tokens per row as the state has: a row's own are padded."""
    if (controls.temperature is None) != (state.temperature is None):
        raise MarsError(
            "the rows have a temperature and the state has none, or the other way round: give make_controls a number "
            "for both, or None for both."
        )
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
