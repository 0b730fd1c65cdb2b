"""Construction and validation of per-request settings.

Dimensions: B batch, M stop tokens. Tests: tests/core/test_sampling.py.
"""

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
    help="maximum number of tokens in a row",
    per_row=True,
    ranges=Range("a whole number of at least 1", 1, LARGEST_INT),
)
_SETTINGS = REQUEST | by_name(_LIMIT)

PerRow = ArrayLike | Sequence[float]
"""Type of a setting: one value for all rows, or one value per row."""


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
    """Build the `Controls` of a batch; every setting is either one value for all rows or one value per row, [B].

    Args:
      batch: B, the number of rows.
      limit: maximum total number of tokens in the prompt and the output.
      temperature: sampling temperature; 0 selects greedy decoding. None makes all rows greedy and omits the sampling
        code from the program, which then compiles faster.
      top_k: sample from this many of the most probable tokens; 0 disables the filter.
      top_p: sample from the smallest set of tokens with at least this total probability; 1 disables the filter.
      min_p: drop tokens below this fraction of the highest probability; 0 disables the filter.
      strict: True makes the row use the lossless base of a lossy rule.
      draft_stop: threshold on the square root of the draft's entropy in nats. Drafting stops after a node at which this
        value exceeds the threshold (SVIP, arXiv 2411.18462). inf disables it.
      stop_tokens: token ids that end any row, or one sequence of ids per row. Sequences are padded with `NO_TOKEN` to a
        common length M >= 1.

    Raises:
      MarsError: a value is out of range or has the wrong shape. The values of traced arrays are not checked.

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
    """Return bool[B, ...], True where `tokens` i32[B, ...] are stop tokens of their row; False for NO_TOKEN.

    >>> is_stop(jnp.asarray([[2, 7, -1]]), jnp.asarray([[2, -1]])).tolist()
    [[True, False, False]]
    """
    row_stops = stop_tokens.reshape(tokens.shape[:1] + (1,) * (tokens.ndim - 1) + (-1,))
    return jnp.any(tokens[..., None] == row_stops, axis=-1) & (tokens >= 0)


def one_per_row(name: str, value: PerRow, batch: int, dtype: DTypeLike) -> Array:
    """Broadcast a setting, which is one value or one value per row, to an array dtype[batch].

    Raises:
      MarsError: the value has the wrong type or shape, or is out of range.
    """
    if isinstance(value, Tracer):
        return jnp.broadcast_to(value.astype(dtype), (batch,))
    _SETTINGS[name].check(value)
    with np.errstate(over="ignore"):  # numbers beyond the range of float32 become inf
        typed_value = np.asarray(value, dtype)
    if typed_value.shape not in ((), (batch,)):
        raise MarsError(
            f"{name} has shape {typed_value.shape}: expected one value, or one for each of the {batch} rows."
        )
    # A small positive number may round to 0 in float32.
    _SETTINGS[name].check(typed_value)
    # Broadcast in NumPy, because jnp would compile a program.
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
    # A flat sequence of token ids applies to all rows.
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
    """Convert the stop tokens of one row to an array of integers."""
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
"""Fields of `Controls` that may be None. The compiled step depends on which fields are None, so new rows and the state
must have None in the same fields."""


def pad_controls(controls: Controls, state: Controls) -> Controls:
    """Pad the stop tokens and the biased tokens of new rows to the widths of the running state.

    Raises:
      MarsError: temperature, edits or guides are None in the new rows but not in the state, or the reverse; or a new
        row has more stop tokens or biased tokens than the state has room for.
    """
    for name, (field, fix) in _SAME_KIND.items():
        if jax.tree.structure(getattr(controls, name)) != jax.tree.structure(getattr(state, name)):
            raise MarsError(
                f"the rows have {field} and the state has none, or the other way round: give {fix}."
            )

    def padded(values: Array, like: Array, noun: str, fill: float) -> Array:
        # The compiled program depends on the state's width, so pad new rows to this width.
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
