"""Per-request settings of a batch, with validation. Oracle: tests/core/test_sampling.py. B batch, M stop tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from mars_jax.core.types import NO_TOKEN, Controls
from mars_jax.utils.errors import MarsError, check_count, short_repr
from mars_jax.utils.limits import BATCH_ROWS
from mars_jax.utils.settings import LARGEST_INT, REQUEST, Range, Setting, by_name

_LIMIT = Setting(
    name="limit",
    kind=int,
    help="most tokens of a row",
    per_row=True,
    ranges=Range("a whole number of at least 1", 1, LARGEST_INT),
)
_SETTINGS = REQUEST | by_name(_LIMIT)

PerRow = ArrayLike | Sequence[float]
"""A setting: one value for all rows, or one per row."""


def make_controls(
    batch: int,
    *,
    limit: PerRow,
    temperature: PerRow | None = 0.0,
    top_k: PerRow = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    strict: PerRow = False,
    draft_stop: PerRow = math.inf,
    stop_tokens: Array | Iterable[int] | Iterable[Iterable[int]] = (),
) -> Controls:
    """Build `Controls` for `batch` requests; every setting is one value for all rows or one per row (shape [B]).

    Args:
      batch: B.
      limit: maximum number of tokens, prompt and output together.
      temperature: 0 is greedy. None makes every row greedy at compile time: the program contains no sampling and
        compiles faster.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      strict: True replaces a lossy rule by its lossless base in this row.
      draft_stop: threshold on the square root of the draft's entropy in nats; drafting stops after a node that exceeds
        it (SVIP, arXiv 2411.18462). inf is off.
      stop_tokens: ids for all rows, or one sequence of ids per row; padded with `NO_TOKEN` to a common M >= 1.

    Raises:
      MarsError: a value is out of range or has the wrong shape. Traced values are not checked.

    >>> make_controls(2, limit=64, temperature=[0.0, 0.7], stop_tokens=[[2], [2, 13]]).stop_tokens.tolist()
    [[2, -1], [2, 13]]
    """

    def field(name: str, value: PerRow, dtype: DTypeLike) -> Array:
        return one_per_row(name, value, batch, dtype)

    check_count("batch", batch, most=BATCH_ROWS)
    return Controls(
        temperature=None if temperature is None else field("temperature", temperature, np.float32),
        top_k=field("top_k", top_k, np.int32),
        top_p=field("top_p", top_p, np.float32),
        min_p=field("min_p", min_p, np.float32),
        strict=field("strict", strict, np.bool_),
        draft_stop=field("draft_stop", draft_stop, np.float32),
        limit=field("limit", limit, np.int32),
        stop_tokens=_stop_tokens(stop_tokens, batch),
    )


def is_stop(tokens: Array, stop_tokens: Array) -> Array:
    """Return bool[B, ...]: whether tokens i32[B, ...] are among the row's stop tokens i32[B, M]; NO_TOKEN never is.

    >>> is_stop(jnp.asarray([[2, 7, -1]]), jnp.asarray([[2, -1]])).tolist()
    [[True, False, False]]
    """
    row_stops = stop_tokens.reshape(tokens.shape[:1] + (1,) * (tokens.ndim - 1) + (-1,))
    return jnp.any(tokens[..., None] == row_stops, axis=-1) & (tokens >= 0)


def one_per_row(name: str, value: PerRow, batch: int, dtype: DTypeLike) -> Array:
    """Broadcast a setting, given once or once per row, to dtype[batch].

    Raises:
      MarsError: the value has the wrong type or shape, or is out of range.
    """
    if isinstance(value, Tracer):
        return jnp.broadcast_to(value.astype(dtype), (batch,))
    _SETTINGS[name].check(value)
    with np.errstate(over="ignore"):  # beyond float32, a number counts as inf
        typed_value = np.asarray(value, dtype)
    if typed_value.shape not in ((), (batch,)):
        raise MarsError(
            f"{name} has shape {typed_value.shape}: expected one value, or one for each of the {batch} rows."
        )
    # A small positive number may round to 0 in float32.
    _SETTINGS[name].check(typed_value)
    # Broadcast in NumPy, which compiles nothing.
    return jax.device_put(np.broadcast_to(typed_value, (batch,)), may_alias=False)


def _stop_tokens(value: Any, batch: int) -> Array:
    if isinstance(value, Array):
        if value.ndim == 2 and value.shape[0] == batch and value.shape[1] >= 1:
            return value.astype(jnp.int32)
        value = np.asarray(value)
    try:
        if isinstance(value, str | bytes | Mapping):
            raise TypeError
        sequences = list(value)
    except TypeError:
        raise MarsError(
            f"stop_tokens is {short_repr(value)}: expected a sequence of token ids, or one for each row."
        ) from None
    # Token ids that are not inside further sequences form one sequence, which applies to all rows.
    if not any(getattr(row, "ndim", isinstance(row, list | tuple | range)) for row in sequences):
        sequences = [sequences] * batch
    if len(sequences) != batch:
        raise MarsError(
            f"stop_tokens has {len(sequences)} rows: expected one sequence of ids, or one for each of {batch}."
        )
    ids_by_row = [_row_of_ids(row) for row in sequences]
    padded = np.full((batch, max(1, *map(len, ids_by_row))), NO_TOKEN, np.int32)
    for b, row in enumerate(ids_by_row):
        padded[b, : len(row)] = row
    return jax.device_put(padded, may_alias=False)


def _row_of_ids(row: object) -> np.ndarray:
    """Return i32[M]: the stop tokens of one row."""
    try:
        ids = np.asarray(row)
    except ValueError:  # lists of different lengths
        ids = np.zeros((0, 0))
    if ids.shape == (0,):
        return ids.astype(np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or np.any((ids < NO_TOKEN) | (ids > LARGEST_INT)):
        raise MarsError(
            f"stop_tokens holds {short_repr(row)}: expected token ids, whole numbers of at least 0."
        )
    return ids


_SAME_KIND = {
    "temperature": ("a temperature", "make_controls a number for both, or None for both"),
    "edits": ("edits of logits", "both make_edits or neither"),
    "guides": (
        "a constraint or a span",
        "both the same kinds of guides; a row without one begins in the state 0",
    ),
}
"""Fields that may be None, which changes the compiled step. The rows and the state must agree on which are None."""


def pad_controls(controls: Controls, state: Controls) -> Controls:
    """Pad the stop tokens and biased tokens of new rows to the widths of the state.

    Raises:
      MarsError: either the rows or the state lack a temperature, edits or guides that the other has, or the rows have
        more tokens than the state has room for.
    """
    for name, (field, fix) in _SAME_KIND.items():
        if jax.tree.structure(getattr(controls, name)) != jax.tree.structure(getattr(state, name)):
            raise MarsError(
                f"the rows have {field} and the state has none, or the other way round: give {fix}."
            )

    def padded(values: Array, like: Array, noun: str, fill: float) -> Array:
        # The state's width is part of its compiled program, so new rows adapt to it.
        extra_columns = like.shape[1] - values.shape[1]
        if extra_columns < 0:
            raise MarsError(
                f"a row has {values.shape[1]} {noun} and the state has room for {like.shape[1]}: make the state's "
                "controls with as many, padded with NO_TOKEN."
            )
        return jnp.pad(values, ((0, 0), (0, extra_columns)), constant_values=fill)

    controls = dataclasses.replace(
        controls, stop_tokens=padded(controls.stop_tokens, state.stop_tokens, "stop tokens", NO_TOKEN)
    )
    if controls.edits is None or state.edits is None:
        return controls
    edits = dataclasses.replace(
        controls.edits,
        bias_tokens=padded(controls.edits.bias_tokens, state.edits.bias_tokens, "biased tokens", NO_TOKEN),
        bias=padded(controls.edits.bias, state.edits.bias, "biased tokens", 0.0),
    )
    return dataclasses.replace(controls, edits=edits)
