"""The decode step of a pair of models on a slice that is not there: what fits, what travels, what it takes at least.

B batch, N nodes, V vocabulary. Oracle: the TPU compiler (libtpu), and the byte counts of tests/planning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from mars_jax import drafters
from mars_jax.core.controls import make_controls
from mars_jax.core.decode import run, speculative_decoder
from mars_jax.core.types import Decoder, DecodeState, Drafter, Params, PyTree, Verifier, keys_from_seeds
from mars_jax.models import transformer
from mars_jax.models.config import ModelConfig
from mars_jax.models.eagle import EagleConfig
from mars_jax.models.medusa import MedusaConfig
from mars_jax.placement import shardings
from mars_jax.placement.shardings import AnyConfig
from mars_jax.planning import dump
from mars_jax.planning.chips import Topology
from mars_jax.planning.constants import SPEEDS
from mars_jax.planning.cost import read_step
from mars_jax.planning.estimate import estimate, figures
from mars_jax.planning.program import OutOfMemory, compile_program, held_bytes


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


class PlannedDraft(NamedTuple):
    """A drafter without weights."""

    make: Callable[[Any], Drafter]  # (target's LanguageModel) -> drafter
    config: AnyConfig | None = None


def draft_of(
    config: AnyConfig | str,
    *,
    num_draft_tokens: int | None = None,
    tree: Any = None,
    dtype: str = "bfloat16",
) -> PlannedDraft:
    """The drafter of a config, or "none" or "ngram", with the defaults of `drafters.load`.

    Args:
      config: of a small model, an EAGLE head or Medusa heads.
      num_draft_tokens: length of a chain.
      tree: children per node at each depth, or `drafters.Dynamic(...)`.
      dtype: of the weights and the cache.
    """
    dtype = "bfloat16" if dtype == "int8" else dtype
    if config == "none":
        return PlannedDraft(lambda _: drafters.none())
    if config == "ngram":
        return PlannedDraft(lambda _: drafters.ngram(num_draft_tokens or 8))
    if isinstance(config, ModelConfig):
        small = transformer.language_model(config, dtype=dtype)
        length = num_draft_tokens or 5
        return PlannedDraft(
            lambda target: drafters.language_model(small, length, tree=tree, vocab_size=target.vocab_size),
            config,
        )
    if isinstance(config, EagleConfig):
        if tree is None and num_draft_tokens is None:
            tree = drafters.Dynamic()
        length = num_draft_tokens or 5
        return PlannedDraft(
            lambda target: drafters.eagle(config, target, length, tree=tree, cache_dtype=dtype), config
        )
    assert isinstance(config, MedusaConfig)
    return PlannedDraft(lambda target: drafters.medusa(config, target, num_draft_tokens, tree=tree), config)


def default_mesh(config: ModelConfig, count: int, batch: int) -> dict[str, int]:
    """Axes for so many devices: as many as the key-value heads divide over go to `model`, the rest to `data` where
    the batch divides, and else to `model` as well.

    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=8)
    >>> default_mesh(config, 16, 2), default_mesh(config, 16, 1)
    ({'data': 2, 'model': 8}, {'model': 16})
    """
    model = math.gcd(config.num_kv_heads, count)
    if count > model and batch % (count // model) == 0:
        return {"data": count // model, "model": model}
    return {"model": count}


def make_plan(
    target: ModelConfig,
    draft: PlannedDraft,
    topology: Topology,
    *,
    mesh: Mesh,
    verify: Verifier,
    batch: int = 1,
    context: int = 4096,
    dtype: str = "bfloat16",
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
      dtype: of weights and caches; "int8" is the target's matrices in 8 bits, and bfloat16 for the rest.

    Raises:
      MarsError: the parts do not fit each other or the mesh.
    """
    wide = "bfloat16" if dtype == "int8" else dtype
    model = transformer.language_model(target, dtype=wide)
    drafter = draft.make(model)

    def placed(config: AnyConfig, *, int8: bool = False) -> PyTree:
        places = shardings.params_shardings(config, mesh)
        return shardings.abstract_params(config, wide, int8=int8, shardings=places)

    params = Params(target=placed(target, int8=dtype == "int8"))
    if draft.config is not None:
        params = params._replace(draft=placed(draft.config))

    def compiled(drafter: Drafter, params: Params) -> tuple[DecodeState, dict[str, Any], int]:
        decoder = speculative_decoder(model, drafter, verify)
        state, lowered = lower_loop(decoder, params, verify, mesh, batch=batch, context=context)
        try:
            report = compile_program(lowered, read=functools.partial(_estimated, topology, context))
        except OutOfMemory as error:
            return state, {"collectives": {}, "seconds": 0.0, "read": None}, error.used
        return state, report, held_bytes(report)

    with dump.fresh() if dump.is_on() else contextlib.nullcontext():
        state, report, held = compiled(drafter, params)
        step = alone_step = report["read"]
        if step is not None and drafter.num_nodes > 1:
            alone_step = compiled(drafters.none(), Params(target=params.target))[1]["read"]

    cache = _local_bytes(state.cache)
    drafted = _local_bytes(state.draft)
    own = read_once(target, params.target, tokens=batch * drafter.num_nodes)
    alone = read_once(target, params.target, tokens=batch)
    extra = 0
    if draft.config is not None:
        # A level each: a chain begins with two tokens at once, and EAGLE reads the accepted path once more instead of
        # extending the last level. Medusa's heads all read one feature.
        passes = 1 if isinstance(draft.config, MedusaConfig) else drafter.max_depth
        extra = passes * (read_once(draft.config, params.draft, tokens=batch) + drafted)
        if isinstance(draft.config, EagleConfig) and draft.config.version == 3:
            # Only what the target gives goes through `fc`, once a step.
            extra -= (passes - 1) * _local_bytes({k: v for k, v in params.draft.items() if k in FUSED})
    read = own + cache + extra
    return Plan(
        topology=topology.name,
        chips=topology.chips,
        mesh={name: int(size) for name, size in mesh.shape.items()},
        fits=bool(report["seconds"]) and held <= topology.hbm_bytes,
        hbm_bytes=topology.hbm_bytes,
        held_bytes=held,
        weight_bytes=_local_bytes(params),
        cache_bytes=_local_bytes(state),
        read_bytes=read,
        floor_seconds=read / topology.bandwidth,
        autoregressive_floor_seconds=(alone + cache) / topology.bandwidth,
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


def lower_loop(
    decoder: Decoder, params: Params, rule: Verifier, mesh: Mesh, *, batch: int, context: int
) -> tuple[DecodeState, jax.stages.Lowered]:
    """The abstract state of a batch on a mesh, and `decode.run` lowered for it."""

    def start(params: Params) -> DecodeState:
        seeds = keys_from_seeds(jnp.arange(batch, dtype=jnp.uint32))
        prompts, lengths = jnp.zeros((batch, context), jnp.int32), jnp.full((batch,), 2, jnp.int32)
        return decoder.init(params, prompts, lengths, make_controls(batch, limit=context), rule, seeds)

    with jax.set_mesh(mesh):
        state = jax.eval_shape(start, params)
        state = _placed(state, shardings.state_shardings(state, mesh))
        return state, run.lower(decoder, params, state)


FUSED = ("fc", "fc_bias", "fc_norm")
"""Weights of an EAGLE-3 head that fuse the target's features."""


def _placed(shapes: PyTree, where: PyTree) -> PyTree:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)


def _local_bytes(tree: PyTree) -> int:
    """Bytes of one device's part of abstract arrays."""

    def of(x: Any) -> int:
        place = x.sharding
        shape = place.shard_shape(x.shape) if isinstance(place, NamedSharding) else x.shape
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(of, jax.tree.leaves(tree)))


def read_once(config: AnyConfig, params: PyTree, *, tokens: int) -> int:
    """Bytes of weights that one device reads in a forward of so many tokens.

    An embedding is looked up in and not read, unless it unembeds too. Of E experts of which a token takes k, tokens
    that choose evenly and alone need the share 1 - (1 - k / E) ** tokens.
    """
    total = _local_bytes(params)
    if "embed" in params and not (isinstance(config, ModelConfig) and config.tie_embeddings):
        total -= _local_bytes(params["embed"])
    if isinstance(config, ModelConfig) and config.num_experts:
        share = 1 - (1 - config.experts_per_token / config.num_experts) ** tokens
        experts = sum(
            _local_bytes(value)
            for layer in params["layers"]
            for name, value in layer.items()
            if name.startswith("expert_")
        )
        total -= round((1 - share) * experts)
    return total
