"""Build the per-request settings of a batch. Oracle: tests/core/test_sampling.py. B batch, M stop tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from mars_jax.core.errors import MarsError, check_count, check_type
from mars_jax.core.limits import BATCH_ROWS
from mars_jax.core.settings import CONTROLS, LARGEST_INT, Range, Setting, by_name
from mars_jax.core.types import NO_TOKEN, Controls

_LIMIT = Setting(
    name="limit",
    kind=int,
    help="most tokens of a row",
    ranges=Range("a whole number of at least 1", 1, LARGEST_INT),
)
_SETTINGS = CONTROLS | by_name(_LIMIT)


def make_controls(
    batch: int,
    *,
    limit: Any,
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    strict: Any = False,
    draft_stop: Any = math.inf,
    stop_tokens: Any = (),
) -> Controls:
    """`Controls` for `batch` requests; every setting is one value for all of them or one per row (shape [B]).

    Args:
      batch: B.
      limit: most tokens of prompt and output together.
      temperature: 0 is greedy. None says that every row is: what is compiled for these controls cannot draw, and
        compiles in less time.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      strict: True switches a lossy rule off: the row gets the rule's lossless base.
      draft_stop: nothing is drafted after a node where the square root of the draft's entropy, in nats, is above
        it (SVIP, arXiv 2411.18462); inf is off.
      stop_tokens: ids for all rows, or one sequence of ids per row; padded with `NO_TOKEN` to a common M >=
        1.

    Raises:
      MarsError: a value is out of range or has the wrong shape. Traced values are not checked.

    >>> make_controls(2, limit=64, temperature=[0.0, 0.7], stop_tokens=[[2], [2, 13]]).stop_tokens.tolist()
    [[2, -1], [2, 13]]
    """

    def field(name: str, value: Any, dtype: Any) -> Array:
        return _field(name, value, batch, dtype)

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
    """bool[B, ...]: tokens i32[B, ...] among the row's stop tokens i32[B, M]; NO_TOKEN never is.

    >>> is_stop(jnp.asarray([[2, 7, -1]]), jnp.asarray([[2, -1]])).tolist()
    [[True, False, False]]
    """
    stops = stop_tokens.reshape(tokens.shape[:1] + (1,) * (tokens.ndim - 1) + (-1,))
    return jnp.any(tokens[..., None] == stops, axis=-1) & (tokens >= 0)


def _field(name: str, value: Any, batch: int, dtype: Any) -> Array:
    if isinstance(value, Tracer):
        return jnp.broadcast_to(value.astype(dtype), (batch,))
    try:
        raw = np.asarray(value)
        array = raw.astype(dtype)
    except (TypeError, ValueError):
        raise MarsError(f"{name} is {value!r}: expected a number, or one per row.") from None
    if array.shape not in ((), (batch,)):
        raise MarsError(
            f"{name} has shape {array.shape}: expected one value, or one for each of the {batch} rows."
        )
    if dtype == np.int32 and not np.all(raw == array):
        raise MarsError(f"{name} is {value!r}: expected whole numbers of 32 bits.")
    _SETTINGS[name].check(array)
    return jax.device_put(np.broadcast_to(array, (batch,)), may_alias=False)  # for which nothing is compiled


def _stop_tokens(value: Any, batch: int) -> Array:
    if isinstance(value, Array):
        if value.ndim == 2 and value.shape[0] == batch and value.shape[1] >= 1:
            return value.astype(jnp.int32)
        value = np.asarray(value)
    check_type("stop_tokens", value, Iterable, "a sequence of token ids, or one for each row")
    rows = list(value)
    if not any(isinstance(row, Sequence | np.ndarray) and np.ndim(row) == 1 for row in rows):
        rows = [rows] * batch
    if len(rows) != batch:
        raise MarsError(
            f"stop_tokens has {len(rows)} rows: expected one sequence of ids, or one for each of {batch}."
        )
    width = max(1, *(len(row) for row in rows)) if rows else 1
    padded = np.full((batch, width), NO_TOKEN, np.int32)
    for b, row in enumerate(rows):
        ids = np.asarray(row if len(row) else [NO_TOKEN])
        if not np.issubdtype(ids.dtype, np.integer) or np.any(ids < NO_TOKEN):
            raise MarsError(f"stop_tokens holds {row!r}: expected token ids, whole numbers of at least 0.")
        padded[b, : len(ids)] = ids
    return jax.device_put(padded, may_alias=False)
