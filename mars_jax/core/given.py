"""Checks of everything that a decoder is given for its rows; `init`, `insert` and `extend` all pass here.

Shapes and dtypes are checked wherever they are traced. Values are where they can be seen: those of tracers, and of
arrays that another process has a part of, cannot. B rows of a state, b prompts, t their width, T token buffer.
Oracle: a table of what cannot be meant (tests/core/test_given.py).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from mars_jax.core import mesh as meshes
from mars_jax.core.donating import check_held
from mars_jax.core.drafter import Drafter
from mars_jax.core.errors import MarsError, check_type
from mars_jax.core.guide import first_states
from mars_jax.core.types import KEY_IMPL, Controls, DecodeState, LanguageModel, Params, Prompts, PyTree

NO_ROW = -1
"""An entry of `rows` that only fills the sub-batch, and is put nowhere."""


def check_pair(target: Any, drafter: Any) -> None:
    """Raise MarsError for anything but a model and a drafter as functions, without their weights."""
    check_type(
        "the target",
        target,
        LanguageModel,
        "a LanguageModel, which is the field model of what mars_jax.load gives",
    )
    check_type(
        "the drafter",
        drafter,
        Drafter,
        "a Drafter, which is the field drafter of what mars_jax.drafters.load gives",
    )


def check_params(params: Any) -> None:
    """Raise MarsError for anything but the weights of both models."""
    check_type("params", params, Params, "Params(target=..., draft=...), the weights of both")


def check_asked(prompts: Any) -> None:
    """Raise MarsError for anything but `Prompts`."""
    check_type("prompts", prompts, Prompts, "Prompts(tokens, length, controls, rule, keys)")


def check_prompts(prompts: Any, lengths: Any, vocab_size: int) -> None:
    """Raise MarsError for anything but token ids i32[b, t] of the vocabulary and lengths i32[b] of 1 to t."""
    _check_whole("prompts", prompts, 2, "token ids i32[b, t], each prompt left-aligned in a row of its own")
    count, width = prompts.shape
    _check_whole("lengths", lengths, 1, f"the tokens of each prompt, i32[{count}]")
    if lengths.shape[0] != count:
        raise MarsError(f"there are {lengths.shape[0]} lengths for {count} prompts: give one for each.")
    if not _is_seen(lengths):
        return
    given = np.asarray(lengths)
    if np.any(wrong := (given < 1) | (given > width)):
        raise MarsError(
            f"a prompt has the length {given[wrong][0]}: expected 1 to {width}, the width that prompts are given in."
        )
    if not _is_seen(prompts):
        return
    tokens = np.asarray(prompts)
    wrong = (np.arange(width)[None] < given[:, None]) & ((tokens < 0) | (tokens >= vocab_size))
    if np.any(wrong):
        raise MarsError(
            f"a prompt has the token {tokens[wrong][0]}: expected ids of 0 to {vocab_size - 1}, as the target's own "
            "tokenizer gives them."
        )


def check_settings(controls: Any, keys: Any, count: int) -> None:
    """Raise MarsError for controls or keys of another number of rows, or keys that would tie a row to its batch."""
    if not isinstance(controls, Controls):
        raise MarsError(
            f"controls is a {type(controls).__name__}: expected what make_controls({count}) makes."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(controls):
        if np.shape(leaf)[:1] != (count,):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise MarsError(
                f"{name} of the controls has shape {list(np.shape(leaf))} for {count} prompts: make the controls with "
                f"make_controls({count}), and their edits and guides for as many rows."
            )
    dtype = getattr(keys, "dtype", type(keys).__name__)
    typed = hasattr(keys, "dtype") and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed or str(jax.random.key_impl(keys)) != KEY_IMPL:
        raise MarsError(
            f"keys are of dtype {dtype}: expected typed keys of {KEY_IMPL}, as keys_from_seeds makes them; with "
            "other generators a row would draw other numbers in a batch than alone."
        )
    if keys.shape != (count,):
        raise MarsError(
            f"keys have shape {list(keys.shape)} for {count} prompts: give keys_from_seeds a seed for each."
        )


def check_places(rows: Any, count: int, batch: int) -> None:
    """Raise MarsError for anything but i32[b] rows of the state, each named once, on the device of the mesh that has
    their prompt."""
    _check_whole("rows", rows, 1, f"i32[{count}], the row of the state for each prompt, or {NO_ROW} for none")
    if rows.shape[0] != count:
        raise MarsError(
            f"there are {rows.shape[0]} rows for {count} prompts: name one for each, or {NO_ROW} for none."
        )
    mesh = meshes.current()
    parts = meshes.size_of("data", mesh)
    if mesh is not None:
        meshes.check_rows(count, mesh)
    if not _is_seen(rows):
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


def begun(prompts: Prompts, cache: PyTree, draft: PyTree) -> DecodeState:
    """The state of rows that have read their prompts, whose width is the token buffer."""
    length = prompts.length
    return DecodeState(
        tokens=prompts.tokens,
        length=length,
        # An array of its own: a loop that is given the state may not be given one buffer twice.
        prompt_length=jnp.copy(length),
        done=length >= jnp.minimum(prompts.controls.limit, prompts.tokens.shape[1]),
        failed=jnp.zeros(length.shape, bool),
        cache=cache,
        draft=draft,
        controls=prompts.controls,
        rule=prompts.rule,
        keys=prompts.keys,
        guides=first_states(prompts.controls),
    )


def rows_of(state: Any) -> int:
    """B of a state; raise MarsError for what is none."""
    check_type("state", state, DecodeState, "what decode.start or Decoder.init gives")
    check_held(state.tokens, "state", "this function")
    return state.tokens.shape[0]


def check_same(what: str, held: PyTree, own: PyTree, *, rows: bool = True) -> None:
    """Raise MarsError where a part of a state is not as this decoder makes it.

    Args:
      what: the field of the state.
      held: what the state has there.
      own: arrays or shapes, as this decoder makes them.
      rows: whether both have as many rows; without it their first dimensions may differ.
    """

    def shapes(tree: PyTree) -> tuple[Any, list[Any]]:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(leaf.shape[0 if rows else 1 :], leaf.dtype) for leaf in leaves]

    if shapes(held) != shapes(own):
        raise other_decoder(what)


def other_decoder(field: str) -> MarsError:
    """Return the error for a state with a field of another decoder."""
    return MarsError(
        f"the field '{field}' of the state is not as this decoder makes it: give a state that began with the same "
        "target, drafter, rule and width of the token buffer."
    )


def _check_whole(name: str, value: Any, ndim: int, wanted: str) -> None:
    is_array = isinstance(value, Array | np.ndarray)
    if not is_array or value.ndim != ndim or not jnp.issubdtype(value.dtype, jnp.integer):
        found = f"{value.dtype}{list(value.shape)}" if is_array else f"of type {type(value).__name__}"
        raise MarsError(f"{name} are {found}: expected an array of whole numbers, {wanted}.")


def _is_seen(value: Any) -> bool:
    return not isinstance(value, Tracer) and not (isinstance(value, Array) and not value.is_fully_addressable)
