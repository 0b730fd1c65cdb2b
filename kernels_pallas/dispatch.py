"""Which implementation runs: chosen while the program is lowered, or named by the caller and then never
replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from kernels_pallas.trial import kernel_or
from kernels_pallas.whole import whole_or_partitioned

IMPLEMENTATIONS = ("reference", "xla", "partitioned", "pallas_tpu")
"""The names that `implementation` takes."""
KERNELS = {"tpu": "pallas_tpu"}
"""The kernel that runs on a platform unasked."""
GPUS = ("cuda", "rocm")
"""Platforms whose fastest form is "partitioned" also where one device has all (docs/kernels.md)."""


def dispatch(
    implementation: str | None,
    blocks: Any,
    interpret: Any,
    operands: Any,
    forms: dict[str, Callable[..., Any]],
) -> Any:
    """Call the named one of `forms` on `operands`, or what suits the platform the program is lowered for.

    That is "partitioned" on GPUs and where XLA spreads the program over devices, else the kernel of the platform where
    `KERNELS` has one, `trial.SWITCH` allows it and it compiles (`trial.kernel_or`), else "xla".

    Raises:
      ValueError: unknown name; blocks or interpret without the name of a kernel, which is what they belong
      to; the switch is neither 0 nor 1.
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
    # Decisions have no gradient; without this a loss over a program that decodes could not be differentiated.
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
