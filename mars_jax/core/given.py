"""Validation of the inputs of `Decoder.init`, `insert` and `extend`.

Shapes and dtypes are always checked. Values are checked unless this process cannot read them, because the array is
traced or partly stored on another host. Dimensions: B state rows, b prompts, t prompt width, T token buffer. Tested on
a table of invalid inputs (tests/core/test_given.py).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from mars_jax.core import axes as meshes
from mars_jax.core.donating import check_held
from mars_jax.core.drafter import Drafter
from mars_jax.core.guide import first_states
from mars_jax.core.types import KEY_IMPL, Controls, DecodeState, LanguageModel, Params, Prompts, PyTree
from mars_jax.utils.errors import MarsError, check_type

NO_ROW = -1
"""Value in `rows` of `Decoder.insert` for a prompt that is padding and is ignored."""


def check_pair(target: object, drafter: Drafter) -> None:
    """Raise MarsError unless `target` is a `LanguageModel` and `drafter` a hashable `Drafter`."""
    expected = "a LanguageModel, such as the field model of the result of mars_jax.load"
    check_type("the target", target, LanguageModel, expected)
    expected = "a Drafter, such as the field drafter of the result of mars_jax.drafters.load"
    check_type("the drafter", drafter, Drafter, expected)
    try:
        hash(drafter)
    except TypeError as error:
        raise MarsError(
            f"the drafter '{drafter.name}' cannot be hashed ({error}): make it a dataclass with frozen=True, and its "
            "fields hashable, such as tuples instead of lists."
        ) from None


def check_recurrent(drafter: Drafter) -> None:
    """Raise MarsError if the drafter drafts trees, which a target with recurrent layers cannot verify."""
    if drafter.num_nodes != drafter.max_depth + 1:
        raise MarsError(
            f"the drafter '{drafter.name}' drafts trees, and the target has recurrent layers, which verify only "
            "chains: set num_draft_tokens (--num-draft-tokens) instead of a tree."
        )


def check_draft_model(model: LanguageModel) -> None:
    """Raise MarsError if the model has recurrent layers: they cannot drop rejected tokens, so it cannot draft."""
    if model.for_chains is not None:
        raise MarsError(
            "the draft model has recurrent layers, whose state cannot drop rejected tokens: draft with ngram, or "
            "with a model that has attention in every layer."
        )


def check_params(params: object) -> None:
    """Raise MarsError unless `params` is an instance of `Params`."""
    check_type("params", params, Params, "Params(target=..., draft=...), the weights of both")


def check_prompts(prompts: Prompts, vocab_size: int) -> None:
    """Raise MarsError unless `prompts` has valid token ids i32[b, t] and lengths i32[b] from 1 to t."""
    check_type("prompts", prompts, Prompts, "Prompts(tokens, length, controls, rule, keys)")
    tokens, lengths = prompts.tokens, prompts.length
    _check_whole("prompts", tokens, 2, "token ids i32[b, t], each prompt left-aligned in a row of its own")
    count, width = tokens.shape
    _check_whole("lengths", lengths, 1, f"the tokens of each prompt, i32[{count}]")
    if lengths.shape[0] != count:
        raise MarsError(f"there are {lengths.shape[0]} lengths for {count} prompts: give one for each.")
    if not _is_seen(lengths):
        return
    values = np.asarray(lengths)
    if np.any(wrong := (values < 1) | (values > width)):
        raise MarsError(
            f"a prompt has the length {values[wrong][0]}: expected 1 to {width}, the width of the prompts array."
        )
    # The tokens may be traced or on other hosts even if the lengths are not.
    if not _is_seen(tokens):
        return
    tokens = np.asarray(tokens)
    # Tokens past the length of a prompt are padding and may have any value.
    wrong = (np.arange(width)[None] < values[:, None]) & ((tokens < 0) | (tokens >= vocab_size))
    if np.any(wrong):
        raise MarsError(
            f"a prompt has the token {tokens[wrong][0]}: expected ids of 0 to {vocab_size - 1}, as the target's "
            "tokenizer returns them."
        )


def check_settings(controls: Controls, keys: Array, count: int) -> None:
    """Raise MarsError unless the controls and keys have `count` rows, and the keys use the generator `KEY_IMPL`."""
    check_type("controls", controls, Controls, f"the result of make_controls({count})")
    for path, leaf in jax.tree_util.tree_leaves_with_path(controls):
        if np.shape(leaf)[:1] != (count,):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise MarsError(
                f"{name} of the controls has shape {list(np.shape(leaf))} for {count} prompts: make the controls with "
                f"make_controls({count}), and their edits and guides for as many rows."
            )
    dtype = getattr(keys, "dtype", type(keys).__name__)
    is_key = hasattr(keys, "dtype") and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_key or str(jax.random.key_impl(keys)) != KEY_IMPL:
        raise MarsError(
            f"keys are of dtype {dtype}: expected typed keys of {KEY_IMPL}, as keys_from_seeds makes them; with "
            "other generators, a row's random numbers would depend on its batch."
        )
    if keys.shape != (count,):
        raise MarsError(
            f"keys have shape {list(keys.shape)} for {count} prompts: give keys_from_seeds a seed for each."
        )


def check_places(rows: Array, count: int, batch: int) -> None:
    """Raise MarsError unless `rows` i32[b] are distinct rows of the state, each on the same device as its prompt."""
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
    ids = np.asarray(rows)
    row_ids = ids[ids != NO_ROW]
    if np.any((row_ids < 0) | (row_ids >= batch)) or len(set(row_ids.tolist())) < len(row_ids):
        raise MarsError(
            f"rows are {ids.tolist()}: expected each of 0 to {batch - 1} at most once, or {NO_ROW} for none."
        )
    # The prompts and the state's rows are split equally over the mesh axis `data`, and each device can write only its
    # own rows.
    prompt_part = np.arange(count) // (count // parts)
    if np.any((ids != NO_ROW) & (ids // (batch // parts) != prompt_part)):
        raise MarsError(
            f"rows are {ids.tolist()} on a mesh with data={parts}: expected the first {count // parts} of them among "
            f"the first {batch // parts} rows of the state, and so on, or {NO_ROW} for none."
        )


def begun(prompts: Prompts, cache: PyTree, draft: PyTree) -> DecodeState:
    """Return the state after prefill. The prompts must be as wide as the token buffer."""
    length = prompts.length
    return DecodeState(
        tokens=prompts.tokens,
        # The length includes the prompt's last token: the root of the first draft, committed but not cached.
        length=length,
        # Make a copy, because a donated state must not contain the same buffer twice.
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
    """Return the number of rows of a state. Raise MarsError if it is not a `DecodeState` or was already donated."""
    check_type("state", state, DecodeState, "the result of decode.start or Decoder.init")
    check_held(state.tokens, "state", "this function")
    return state.tokens.shape[0]


def check_same(name: str, field: PyTree, expected: PyTree, *, rows: bool = True) -> None:
    """Raise MarsError unless a field of the state has the structure, shapes and dtypes that this decoder creates.

    Args:
      name: name of the field, used in the message.
      field: value of the field.
      expected: the arrays or shapes that this decoder would create.
      rows: if False, ignore the first dimension of each array, the number of rows.
    """

    first_dim = 0 if rows else 1

    def shapes(tree: PyTree) -> tuple[Any, list[Any]]:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(leaf.shape[first_dim:], leaf.dtype) for leaf in leaves]

    if shapes(field) != shapes(expected):
        raise other_decoder(name)


def other_decoder(field: str) -> MarsError:
    """Return the error for a state that a different decoder has created."""
    return MarsError(
        f"the field '{field}' of the state does not match this decoder: use a state that was created with the same "
        "target, drafter, rule and width of the token buffer."
    )


def _check_whole(name: str, value: object, ndim: int, expected: str) -> None:
    is_array = isinstance(value, Array | np.ndarray)
    if not is_array or value.ndim != ndim or not jnp.issubdtype(value.dtype, jnp.integer):
        description = f"{value.dtype}{list(value.shape)}" if is_array else f"of type {type(value).__name__}"
        raise MarsError(f"{name} are {description}: expected an array of whole numbers, {expected}.")


def _is_seen(value: Array) -> bool:
    """Return True if this process can read the values of an array."""
    return not isinstance(value, Tracer) and not (isinstance(value, Array) and not value.is_fully_addressable)
