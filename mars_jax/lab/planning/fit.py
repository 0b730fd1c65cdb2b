"""The decode step of a pair of models on a slice that is not there: what fits, what travels, what it takes at least.

B batch, N nodes, V vocabulary. Oracle: the TPU compiler (libtpu), and the byte counts of tests/lab/planning.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from mars_jax import drafters
from mars_jax.core.drafter import Drafter
from mars_jax.core.rule import Rule
from mars_jax.core.types import DecodeState, Params, PyTree
from mars_jax.lab.planning import dump
from mars_jax.lab.planning.chips import Topology
from mars_jax.lab.planning.compiled_program import OutOfMemory, compile_program, held_bytes
from mars_jax.lab.planning.constants import SPEEDS
from mars_jax.lab.planning.cost import read_step
from mars_jax.lab.planning.estimate import estimate, figures
from mars_jax.lab.planning.pair_programs import (
    PlannedDraft,
    default_mesh,
    draft_of,
    local_bytes,
    lower_loop,
    programs,
)
from mars_jax.models.config import ModelConfig
from mars_jax.models.heads import HeadConfig
from mars_jax.placement import shardings
from mars_jax.placement.shardings import AnyConfig

__all__ = ["Plan", "default_mesh", "draft_of", "lower_loop", "make_plan", "read_once"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The compiler's report, and the arithmetic beside it. Bytes are of one device."""

    topology: str
    chips: int
    mesh: dict[str, int]
    fits: bool
    hbm_bytes: int  # that a device has
    held_bytes: int  # that the program holds: weights, caches and temporaries
    weight_bytes: int  # of both models
    cache_bytes: int  # of both models, and the rest of the state
    read_bytes: int  # that a step has to read at least, from rows whose contexts are full
    floor_seconds: float  # read_bytes over the published bandwidth
    autoregressive_floor_seconds: float  # of a step of the target alone
    collectives: dict[str, int]  # of the loop, by kind and shape
    compile_seconds: float
    step: dict[str, Any] | None  # from `planning.estimate`, where libtpu was told to keep its schedule
    autoregressive_step: dict[str, Any] | None
    notes: tuple[str, ...]  # arrays that every device holds whole

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def make_plan(
    target: ModelConfig,
    draft: PlannedDraft,
    topology: Topology,
    *,
    mesh: Mesh,
    verify: Rule,
    batch: int = 1,
    context: int = 4096,
    dtype: str = "bfloat16",
    keep: Callable[[str, str], Any] | None = None,
) -> Plan:
    """Compile the decode loop for a slice and add up what a step must read.

    Args:
      target: of the target model.
      draft: from `draft_of`.
      topology: from `topology(name)`.
      mesh: over its devices.
      verify: the rule.
      batch: B.
      context: tokens of prompt and output together.
      dtype: of weights and caches; "int8" and "int4" are of the target's matrices, and bfloat16 for the rest.
      keep: given the name of a file and the text of a program, before XLA compiled it and after.

    Raises:
      MarsError: the parts do not fit each other or the mesh.
    """
    made = programs(target, draft, mesh, verify, batch=batch, context=context, dtype=dtype)
    drafter, params = made.drafter, made.params

    def compiled(name: str, drafter: Drafter, params: Params) -> tuple[DecodeState, dict[str, Any], int]:
        state, lowered = made.lower(drafter, params)
        if keep is not None:
            keep(f"{name}.stablehlo.txt", lowered.as_text())

        def read(text: str) -> dict[str, Any] | None:
            if keep is not None:
                keep(f"{name}.hlo.txt", text)
            return _estimated(topology, context, text)

        try:
            report = compile_program(lowered, read=read)
        except OutOfMemory as error:
            return state, {"collectives": {}, "seconds": 0.0, "read": None}, error.used
        return state, report, held_bytes(report)

    with dump.fresh() if dump.is_on() else contextlib.nullcontext():
        state, report, held = compiled("decode", drafter, params)
        step = alone_step = report["read"]
        if step is not None and drafter.num_nodes > 1:
            undrafted = Params(target=params.target)
            alone_step = compiled("autoregression", drafters.none(), undrafted)[1]["read"]

    cache = local_bytes(state.cache)
    alone = read_once(target, params.target, tokens=batch) + cache
    read = step_bytes(
        target, draft, drafter, params, batch=batch, cache=cache, drafted=local_bytes(state.draft)
    )
    return Plan(
        topology=topology.name,
        chips=topology.chips,
        mesh={name: int(size) for name, size in mesh.shape.items()},
        fits=bool(report["seconds"]) and held <= topology.hbm_bytes,
        hbm_bytes=topology.hbm_bytes,
        held_bytes=held,
        weight_bytes=local_bytes(params),
        cache_bytes=local_bytes(state),
        read_bytes=read,
        floor_seconds=read / topology.bandwidth,
        autoregressive_floor_seconds=alone / topology.bandwidth,
        collectives=report["collectives"],
        compile_seconds=report["seconds"],
        step=step,
        autoregressive_step=alone_step,
        notes=tuple(shardings.whole(target, mesh)),
    )


def _estimated(where: Topology, context: int, text: str) -> dict[str, Any] | None:
    """The estimate of a compiled decode loop."""
    found = dump.recorded(text)
    if found is None:
        return None
    speed = SPEEDS[where.name.partition(":")[0]]
    made = figures(read_step(*found, live=context), speed, where.bandwidth)
    return estimate(made, speed, where.bandwidth)


def step_bytes(
    target: ModelConfig,
    draft: PlannedDraft,
    drafter: Drafter,
    params: Params,
    *,
    batch: int,
    cache: int,
    drafted: int,
) -> int:
    """Bytes that one device reads in a step: in each pass the weights and the live cache once.

    Args:
      target, draft, drafter, params: of the pair.
      batch: B.
      cache: bytes of the target's live cache.
      drafted: of the drafter's.
    """
    read = read_once(target, params.target, tokens=batch * drafter.num_nodes) + cache
    if draft.config is None:
        return read
    # A level each: a chain of a model begins with two tokens at once.
    passes, once = drafter.max_depth, 0
    if isinstance(draft.config, HeadConfig):
        passes = draft.config.passes(drafter.max_depth)
        once = local_bytes([params.draft[name] for name in draft.config.read_once if name in params.draft])
    return (
        read + passes * (read_once(draft.config, params.draft, tokens=batch) + drafted) - (passes - 1) * once
    )


def read_once(config: AnyConfig, params: PyTree, *, tokens: int) -> int:
    """Bytes of weights that one device reads in a forward of so many tokens.

    An embedding is looked up in and not read, unless it unembeds too. Tokens that choose k of E experts evenly and
    alone need the share 1 - (1 - k / E) ** tokens of them.
    """
    total = local_bytes(params)
    if "embed" in params and not (isinstance(config, ModelConfig) and config.tie_embeddings):
        total -= local_bytes(params["embed"])
    if isinstance(config, ModelConfig) and config.num_experts:
        share = 1 - (1 - config.experts_per_token / config.num_experts) ** tokens
        experts = sum(
            local_bytes(value)
            for layer in params["layers"]
            for name, value in layer.items()
            if name.startswith("expert_")
        )
        total -= round((1 - share) * experts)
    return total
