"""Seconds of what is on a device. Oracle: a loop of known length in tests/lab/commands/test_check.py."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def taken(call: Callable[[], Any], rounds: int) -> list[float]:
    """Seconds of each of so many calls, after one that is not counted."""
    seconds = []
    for _ in range(1 + rounds):
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def looped(call: Callable[..., Any], times: int, operands: Any) -> Callable[[], Any]:
    """`call(*operands)` so many times in one loop on the device, where a call from the host would take longer than it.

    >>> looped(lambda x: x + 1, 3, (jnp.ones(2),))().tolist()
    [2.0, 2.0]
    """

    @functools.partial(jax.jit, static_argnums=0)
    def run(times: int, operands: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            # Without a barrier XLA would call once, before the loop.
            operands, _ = lax.optimization_barrier(carry)
            return operands, call(*operands)

        made = jax.eval_shape(call, *operands)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
        return lax.fori_loop(0, times, body, (operands, empty))[1]

    return functools.partial(run, times, operands)
