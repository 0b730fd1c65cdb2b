"""The needs of a recipe on the devices at hand, from configs alone, before any weights are read.

Oracle: the arrays of loaded models, in tests/lab/evaluate/test_recipes.py.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mars_jax import hub, specs
from mars_jax.core.errors import MarsError
from mars_jax.lab.evaluate.answers import turns_asked
from mars_jax.lab.evaluate.benchmark.tuned import SHARE
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.models.quantize import num_bytes
from mars_jax.placement.shardings import AnyConfig, abstract_params, parse_mesh

ROOM = 0.85
"""Share of the memory that weights may have; the rest is for rows and for a step's arrays."""
ARMS, TUNED_ARMS = {"none": 2, "paper": 3, "all": 6}, {True: 5, False: 2}
"""Arms at a temperature, by the controls, and of a tuned run by whether it samples."""
COPIED = 2**26
"""Numbers that are copied to see how fast memory is."""


class Needs(NamedTuple):
    """See `needs`."""

    weights: int  # bytes of target and draft
    room: int | None  # bytes of memory for them, on all devices; None: unknown
    download: int  # bytes that are not here yet, at most
    free: int  # bytes of the disk that they go to
    hours: (
        float  # where every token takes a forward of the target, and a forward the time to read its weights
    )

    def describe(self) -> str:
        """
        >>> Needs(16 * 2**30, 64 * 2**30, 0, 2**40, 2.5).describe()
        '16.0 GiB of weights for 64.0 GiB of memory, nothing to download, and about 2.5 hours if drafts save nothing'
        """
        room = "memory of unknown size" if self.room is None else f"{_gib(self.room)} of memory"
        load = f"{_gib(self.download)} to download" if self.download else "nothing to download"
        taken = f"{self.hours:.1f} hours" if self.hours >= 1 else f"{60 * self.hours:.0f} minutes"
        return f"{_gib(self.weights)} of weights for {room}, {load}, and about {taken} if drafts save nothing"

    def check(self, name: str, slice_: str) -> None:
        """Raise MarsError where the devices or the disk have no room."""
        cure = (
            f": run it on a slice such as {slice_}, or give a smaller --dtype"
            if slice_
            else ": give a smaller --dtype"
        )
        if self.room is not None and self.weights > self.room:
            raise MarsError(
                f"the recipe {name} has {_gib(self.weights)} of weights, and the devices here have room for "
                f"{_gib(self.room)}{cure}."
            )
        if self.download > self.free:
            raise MarsError(
                f"the recipe {name} downloads up to {_gib(self.download)}, and the disk of the hub's cache has "
                f"{_gib(self.free)}: free some, or let HF_HOME name another disk."
            )


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def needs(args: argparse.Namespace, controls: str, problems: Sequence[Problem]) -> Needs:
    """The memory and disk that target and draft of a benchmark take, and the time of both parts of a recipe.

    Args:
      args: of `mars-jax benchmark` with --tune.
      controls: of the other part.
      problems: of all tasks.

    Raises:
      MarsError: as `hub.outline`.
    """
    kind, path = specs.parse_draft(args.draft)
    target = hub.outline(args.target).config
    weights = {args.target: bytes_of(target, args.dtype)}
    if kind == "model":
        weights[path] = bytes_of(hub.outline(path).config, args.dtype)
    elif kind == "eagle":  # of its published shape: the file is not read, which may be on the hub
        from mars_jax.models.eagle_head import EagleConfig

        weights[path] = bytes_of(EagleConfig.outline(target), args.dtype)
    devices = 1 if args.mesh is None else parse_mesh(args.mesh).size
    room = _memory(jax.local_devices()[0])
    cache = Path(os.environ.get("HF_HOME") or Path.home())
    turns = sum(len(turns_asked(problem, args.chat)) for problem in problems)
    decodes = sum(
        ARMS[controls] + TUNED_ARMS[temperature > 0] * (len(args.tune) / SHARE + 1)
        for temperature in args.temperatures
    )
    steps = decodes * turns * args.max_new_tokens / args.batch_size
    # A layer of experts reads some of its weights; this counts all of them.
    seconds = weights[args.target] / devices / bandwidth()
    return Needs(
        weights=sum(weights.values()),
        room=None if room is None else int(ROOM * room * devices),
        download=sum(size for name, size in weights.items() if not hub.is_here(name)),
        free=shutil.disk_usage(next(p for p in (cache, *cache.parents) if p.exists())).free,
        hours=steps * seconds / 3600,
    )


def bytes_of(config: AnyConfig, dtype: str | None) -> int:
    """The bytes of the params of a config; of a checkpoint's own dtype, two a number."""
    wide = "bfloat16" if dtype is None or dtype in specs.BITS else dtype
    params = abstract_params(config, wide, bits=specs.BITS.get(dtype or ""))
    return sum(map(num_bytes, jax.tree.leaves(params)))


def _memory(device: Any) -> int | None:
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (device.memory_stats() or {}).get("bytes_limit")


def bandwidth() -> float:
    """Bytes a second that a device's memory gives, by the best of five copies."""
    numbers = jnp.zeros(COPIED, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    copy(numbers).block_until_ready()
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        copy(numbers).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * numbers.nbytes / best
