"""The memory that a recipe needs on the local devices, computed from configs before any weights are read.

Tested against the arrays of loaded models, in tests/lab/evaluate/test_recipes.py.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import jax

from mars_jax import hub
from mars_jax.drafters.registry import parse_draft
from mars_jax.lab.planning.pair_programs import wide_dtype
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.mtp_head import MtpConfig
from mars_jax.models.quantize import num_bytes
from mars_jax.models.shardings import AnyConfig, abstract_params, parse_mesh
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import BITS

ROOM = 0.85
"""Share of the device memory that weights may fill. The remainder is reserved for caches and temporary arrays."""


def check_memory(args: argparse.Namespace, name: str, topology: str = "") -> str:
    """Check that the weights of a pair fit on the devices, and return a message with the size of the weights.

    The message also contains the size of the memory, if it is known.

    Args:
      args: parsed flags of `mars-jax benchmark`.
      name: name of the recipe, for the error message.
      topology: a TPU slice on which the pair fits, to suggest in the error message; "" if none is known.

    Raises:
      MarsError: the weights do not fit on the devices; see also `hub.outline`.
    """
    needed_bytes = weight_bytes(args)
    device_bytes = _memory(jax.local_devices()[0])
    if device_bytes is None:
        return f"{_gib(needed_bytes)} of weights"
    weight_room = ROOM * device_bytes
    if args.mesh is not None:
        weight_room *= parse_mesh(args.mesh).size
    if needed_bytes > weight_room:
        suggestion = "give a smaller --dtype"
        if topology:
            suggestion = f"run it on a slice such as {topology}, or {suggestion}"
        raise MarsError(
            f"the recipe {name} has {_gib(needed_bytes)} of weights, and the devices here have room for "
            f"{_gib(weight_room)}: {suggestion}."
        )
    return f"{_gib(needed_bytes)} of weights for {_gib(weight_room)} of memory"


def weight_bytes(args: argparse.Namespace) -> int:
    """Return the number of bytes of the weights of the target and the draft, assuming published shapes for heads."""
    draft = parse_draft(args.draft)
    target = hub.outline(args.target).config
    configs: list[AnyConfig] = [target]
    if draft.kind == "model" and draft.path != args.target:
        configs.append(hub.outline(draft.path).config)
    elif draft.kind in ("eagle", "mtp"):
        configs.append({"eagle": EagleConfig, "mtp": MtpConfig}[draft.kind].outline(target))
    # Without --dtype, assume that the checkpoint stores two bytes per number.
    dtype = wide_dtype(args.dtype or "bfloat16")
    params = [abstract_params(config, dtype, bits=BITS.get(args.dtype or "")) for config in configs]
    return sum(map(num_bytes, jax.tree.leaves(params)))


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def _memory(device: Any) -> int | None:
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (device.memory_stats() or {}).get("bytes_limit")
