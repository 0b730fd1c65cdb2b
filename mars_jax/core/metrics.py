"""Decoding metrics: per-row counters that are updated on the device, and their summary on the host.

Dimensions: B batch, D tree depth. Tested against counts over the `StepInfo` of every step (tests/core/test_decode.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core import struct
from mars_jax.core.pick import append
from mars_jax.core.types import NO_KIND, NO_TOKEN, TRUSTED, StepInfo, TopLogProbs
from mars_jax.utils.errors import MarsError, check_type, short_repr

COUNTERS = ("steps", "emitted", "proposed", "accepted_exact", "accepted_relaxed", "accepted_trusted")
"""Names of the counters in `DecodeStats` that `Metrics` sums over rows."""


@struct.dataclass(kw_only=True)
class DecodeStats:
    """Counters of each row over the steps before it was done, as a pytree that `run` carries in its loop."""

    steps: Array  # i32[B]; forward passes of the target
    emitted: Array  # i32[B]; new tokens
    proposed: Array  # i32[B]; drafted tokens, excluding padding
    accepted_exact: Array  # i32[B]; emitted draft tokens that the strict rule accepts
    accepted_relaxed: Array  # i32[B]; emitted draft tokens that only the relaxed rule accepts
    accepted_trusted: Array  # i32[B]; emitted draft tokens that were trusted and not verified
    depth_histogram: Array  # i32[B, D + 1]; number of steps that emitted 0, 1, ..., D draft tokens
    regret: Array  # f32[B]; sum over emitted tokens of (largest logit - logit of the token), nats
    tokens: TokenRecord | None = None  # only with `record`


SCORES = ("regret", "log_prob", "temperature_log_prob", "processed_log_prob")
"""Names of the fields of `TokenRecord` that hold one float per token."""


@struct.dataclass(kw_only=True)
class TokenRecord:
    """Information about each new token: entry [b, t] describes `DecodeState.tokens[b, t]`; see `StepInfo`."""

    kind: Array  # i32; NO_KIND for prompt tokens and tokens from steps that were not recorded
    regret: Array  # f32, as are the next three fields; 0 if `kind` is NO_KIND
    log_prob: Array
    temperature_log_prob: Array
    processed_log_prob: Array
    top: TopLogProbs | None = None  # [B, T, n] each; n is `Decoder.top_log_probs`; None if n is 0


# This function is jitted, so that one program allocates a separate buffer for each counter. A donated argument must not
# contain the same buffer twice.
@functools.partial(jax.jit, static_argnames=("batch", "max_depth", "record", "num_top"))
def zero_stats(batch: int, max_depth: int, record: int | None = None, num_top: int = 0) -> DecodeStats:
    """Return counters set to 0 for `batch` rows and draft trees of depth `max_depth`.

    If `record` is not None, it is the width T of a `TokenRecord`, whose field `top` has `num_top` tokens per position.
    """
    token_record = None
    if record is not None:
        kinds = jnp.full((batch, record), NO_KIND, jnp.int32)
        zero_scores: dict[str, Any] = {name: jnp.zeros((batch, record), jnp.float32) for name in SCORES}
        token_record = TokenRecord(kind=kinds, **zero_scores)
        if num_top:
            fills = (NO_TOKEN, 0.0, NO_TOKEN, 0.0)
            top = TopLogProbs(*(jnp.full((batch, record, num_top), fill) for fill in fills))
            token_record = dataclasses.replace(token_record, top=top)
    return DecodeStats(
        **{name: jnp.zeros((batch,), jnp.int32) for name in COUNTERS},
        depth_histogram=jnp.zeros((batch, max_depth + 1), jnp.int32),
        regret=jnp.zeros((batch,), jnp.float32),
        tokens=token_record,
    )


def accumulate(stats: DecodeStats, info: StepInfo, length: Array) -> DecodeStats:
    """Add one step to the counters. Draft tokens after a stop token or past the limit do not count as accepted.

    Args:
      stats: counters before the step.
      info: the result of the step.
      length: i32[B]; number of committed tokens after the step.
    """
    # A row that emits no token was already finished, or finishes in this step.
    is_live = info.num_emitted > 0
    # The accepted path may be cut short by a stop token or by the limit on new tokens.
    num_accepted = jnp.minimum(info.verdict.num_accepted, info.num_emitted)
    depth = info.verdict.relaxed.shape[1]
    # Edge d of the path leads to emitted token d, so the tokens of the first `num_accepted` edges were emitted.
    edge = jnp.arange(depth, dtype=jnp.int32)[None]
    num_relaxed = jnp.sum(info.verdict.relaxed & (edge < num_accepted[:, None]), axis=1, dtype=jnp.int32)
    num_trusted = jnp.sum(info.kind == TRUSTED, axis=1, dtype=jnp.int32)
    # The one-hot encoding of the number of accepted tokens, 0 .. D. Steps of finished rows are not counted.
    depth_one_hot = (jnp.arange(depth + 1, dtype=jnp.int32)[None] == num_accepted[:, None]) & is_live[:, None]
    token_record = stats.tokens
    if token_record is not None:
        # The tokens of this step are at positions [length - num_emitted, length).
        step_record = TokenRecord(**{f.name: getattr(info, f.name) for f in dataclasses.fields(TokenRecord)})
        token_record = append(token_record, length - info.num_emitted, step_record, info.num_emitted)
    return DecodeStats(
        steps=stats.steps + is_live.astype(jnp.int32),
        emitted=stats.emitted + info.num_emitted,
        proposed=stats.proposed + jnp.where(is_live, info.num_proposed, 0),
        accepted_exact=stats.accepted_exact + num_accepted - num_relaxed - num_trusted,
        accepted_relaxed=stats.accepted_relaxed + num_relaxed,
        accepted_trusted=stats.accepted_trusted + num_trusted,
        depth_histogram=stats.depth_histogram + depth_one_hot.astype(jnp.int32),
        regret=stats.regret + jnp.sum(info.regret, axis=1),
        tokens=token_record,
    )


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Totals over some rows of a batch.

    `tau` includes the correction or bonus token, as in the MARS paper. Other engines may report tau without this token.

    >>> m = Metrics(steps=2, emitted=6, proposed=8, accepted_exact=3, accepted_relaxed=1,
    ...             depth_histogram=(0, 1, 0, 1, 0), regret=0.5)
    >>> m.tau, m.tau_without_bonus, m.relaxed_share
    (3.0, 2.0, 0.25)
    """

    steps: int  # forward passes of the target, counted once per row
    emitted: int  # new tokens
    proposed: int  # drafted tokens
    accepted_exact: int  # accepted draft tokens that the strict rule accepts
    accepted_relaxed: int  # accepted draft tokens that only the relaxed rule accepts
    depth_histogram: tuple[int, ...]  # number of steps that accepted 0, 1, ..., D draft tokens
    regret: float  # sum over new tokens, nats
    accepted_trusted: int = 0  # accepted draft tokens that were trusted and not verified

    @property
    def accepted(self) -> int:
        return self.accepted_exact + self.accepted_relaxed + self.accepted_trusted

    @property
    def tau(self) -> float:
        """New tokens per forward pass of the target, including the correction or bonus token."""
        return self.emitted / max(self.steps, 1)

    @property
    def tau_without_bonus(self) -> float:
        """Accepted draft tokens per forward pass of the target."""
        return self.accepted / max(self.steps, 1)

    @property
    def acceptance_rate(self) -> float:
        """Fraction of the drafted tokens that were accepted."""
        return self.accepted / max(self.proposed, 1)

    @property
    def relaxed_share(self) -> float:
        """Fraction of the accepted draft tokens that only the relaxed rule accepts."""
        return self.accepted_relaxed / max(self.accepted, 1)

    @property
    def regret_per_token(self) -> float:
        """Mean over new tokens of (largest logit - logit of the token), nats."""
        return self.regret / max(self.emitted, 1)


def summarize(stats: DecodeStats, rows: int | slice | Sequence[int] = slice(None)) -> Metrics:
    """Sum the counters over some rows (an index, a slice or a list of indices into the batch) on the host."""
    check_type("stats", stats, DecodeStats, "the counters that mars_jax.run returns")
    num_rows = stats.steps.shape[0]
    try:
        # NumPy also accepts None and bools as indices, but with a different meaning.
        if rows is None or isinstance(rows, bool):
            raise TypeError
        np.empty(num_rows)[rows]
    except (IndexError, TypeError, ValueError):
        raise MarsError(
            f"rows is {short_repr(rows)}: expected an index, a slice or a list of indices into the {num_rows} rows."
        ) from None

    def pick(values: Array) -> np.ndarray:
        return np.atleast_1d(np.asarray(values)[rows])

    histogram = np.atleast_2d(np.asarray(stats.depth_histogram)[rows]).sum(axis=0)
    return Metrics(
        **{name: int(pick(getattr(stats, name)).sum()) for name in COUNTERS},
        depth_histogram=tuple(int(n) for n in histogram),
        regret=float(pick(stats.regret).sum()),
    )
