"""Choice of an implementation: made while the program is lowered, unless the caller names one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from kernels_pallas.trial import kernel_or
from kernels_pallas.whole import whole_or_partitioned

IMPLEMENTATIONS = ("reference", "xla", "partitioned", "pallas_tpu")
"""Valid values of `implementation`."""
KERNELS = {"tpu": "pallas_tpu"}
"""The default kernel of each platform."""
GPUS = ("cuda", "rocm")
"""Platforms whose fastest form is "partitioned", even on a single device (docs/kernels.md)."""


def dispatch(
    implementation: str | None,
    blocks: Any,
    interpret: Any,
    operands: Any,
    forms: dict[str, Callable[..., Any]],
) -> Any:
    """Call the named one of `forms` on `operands`, or by default the best one for the lowering platform.

    The default is "partitioned" on GPUs and if XLA partitions the program over devices. Otherwise it is the platform's
    kernel if `KERNELS` has one, `trial.SWITCH` allows it and it compiles (`trial.kernel_or`), else "xla".

    Raises:
      ValueError: an unknown name; blocks or interpret without a named kernel; the switch is neither 0 nor 1.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}: expected None or one of {', '.join(IMPLEMENTATIONS)}."
        )
    kernel = implementation == "pallas_tpu"
    if not kernel and (blocks is not None or interpret):
        raise ValueError(
            f"blocks and interpret belong to a kernel, and implementation is {implementation!r}: "
            "name 'pallas_tpu' as well."
        )
    # Decisions have no gradient. Without this, a loss over a program that decodes could not be differentiated.
    operands = jax.tree.map(lax.stop_gradient, operands)
    if kernel:
        return forms["pallas_tpu"](*operands, blocks=blocks, interpret=interpret)
    if implementation is not None:
        return forms[implementation](*operands)
    xla, partitioned = forms["xla"], forms["partitioned"]
    choices = {
        platform: whole_or_partitioned(kernel_or(forms[name], xla, platform=platform), partitioned)
        for platform, name in KERNELS.items()
    }
    choices |= dict.fromkeys(GPUS, partitioned)
    return lax.platform_dependent(*operands, **choices, default=whole_or_partitioned(xla, partitioned))
