"""Plans for a pair of models on a TPU slice: whether the pair fits, the time of a step, and alternatives that fit.

Tested against the TPU compiler (libtpu), and against the byte counts in tests/lab/planning.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mars_jax.core.drafter import Drafter
from mars_jax.core.types import Params, PyTree
from mars_jax.drafters.tree_shapes import Dynamic
from mars_jax.lab.planning.chips import Topology
from mars_jax.lab.planning.estimate import StepBytes, StepTime, Work, step_time
from mars_jax.lab.planning.pair_programs import (
    OutOfMemory,
    PlannedDraft,
    Programs,
    compile_program,
    held_bytes,
    local_bytes,
)
from mars_jax.models import shardings
from mars_jax.models.config import ModelConfig
from mars_jax.models.heads import HeadConfig, LayeredHead
from mars_jax.models.shardings import AnyConfig
from mars_jax.models.weights import weights
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import BITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The compiler's report on the decode loop, and estimates of the time of a step. All byte counts are per device."""

    topology: str
    chips: int
    mesh: dict[str, int]
    fits: bool
    # Memory capacity of a device.
    hbm_bytes: int
    # Weights, caches and temporaries of the compiled program.
    held_bytes: int
    # Weights of both models.
    weight_bytes: int
    # Caches of both models, and all other state.
    cache_bytes: int
    # Minimum number of bytes that a step reads, with full contexts.
    read_bytes: int
    # The larger of (bytes read / bandwidth) and (operations / peak FLOP/s).
    floor_seconds: float
    # The same quantity for a step without a draft.
    autoregressive_floor_seconds: float
    # Numbers of collectives in the loop, keyed by kind and shape.
    collectives: dict[str, int]
    compile_seconds: float
    # The two ends of the estimated range, keyed by "low_seconds" and "high_seconds"; None if the table of overheads
    # does not cover the step.
    step: dict[str, float] | None
    autoregressive_step: dict[str, float] | None
    # Notes on the arrays that every device stores unsharded and, if there is no estimate, the reason why.
    notes: tuple[str, ...]


def make_plan(
    pair: Programs, autoregressive: Programs, topology: Topology, dump: Callable[[str, str], object]
) -> Plan:
    """Compile the decode loop for a slice and estimate the time of a step.

    Args:
      pair: the pair on the slice's devices.
      autoregressive: the same target without a draft.
      topology: from `topology(name)`.
      dump: called with a file name and the text of the program, once before and once after XLA compiles it.
    """
    lowered = pair.lower()
    dump("decode.stablehlo.txt", lowered.as_text())
    try:
        report = compile_program(lowered, read=lambda text: dump("decode.hlo.txt", text))
        used_bytes = held_bytes(report)
        fits = used_bytes <= topology.device.hbm_bytes
    except OutOfMemory as error:
        report = {"collectives": {}, "seconds": 0.0}
        used_bytes, fits = error.used, False
    pair_work, pair_time = planned_time(pair, topology)
    _, autoregressive_time = planned_time(autoregressive, topology)
    notes = shardings.replication_notes(pair.target, pair.mesh)
    if pair_time.missing:
        notes.append(f"no estimate: {pair_time.missing}; the times are lower bounds")
    return Plan(
        topology=topology.name,
        chips=topology.chips,
        mesh={name: int(size) for name, size in pair.mesh.shape.items()},
        fits=fits,
        hbm_bytes=topology.device.hbm_bytes,
        held_bytes=used_bytes,
        weight_bytes=local_bytes(pair.params),
        cache_bytes=local_bytes(pair.state),
        read_bytes=pair_work.bytes.total,
        floor_seconds=pair_time.floor_seconds,
        autoregressive_floor_seconds=autoregressive_time.floor_seconds,
        collectives=report["collectives"],
        compile_seconds=report["seconds"],
        step=_range(pair_time),
        autoregressive_step=_range(autoregressive_time),
        notes=tuple(notes),
    )


def _range(time: StepTime) -> dict[str, float] | None:
    if time.missing:
        return None
    return {"low_seconds": time.low_seconds, "high_seconds": time.high_seconds}


def planned_time(pair: Programs, topology: Topology) -> tuple[Work, StepTime]:
    """Return the work and the estimated time of a step with full contexts, without compiling."""
    work = count_work(pair)
    return work, step_time(work, topology.generation, topology.device)


def count_work(pair: Programs) -> Work:
    """Count the work of a step on one device of the mesh."""
    target, drafter, draft = pair.target, pair.drafter, pair.draft
    cache_bytes, draft_cache_bytes = local_bytes(pair.state.cache), local_bytes(pair.state.draft)
    # Number of devices that share a layer. The `data` axis does not count, because it divides only rows.
    devices_per_layer = math.prod(size for name, size in pair.mesh.shape.items() if name != "data")
    rows_per_device = pair.batch * devices_per_layer // pair.mesh.size
    # The table of overheads has one row for all chains and one for all trees.
    draft_layers, draft_kind = 0, draft.kind
    if isinstance(draft.config, ModelConfig):
        draft_layers, draft_kind = draft.config.num_layers, "eagle"
    if draft_kind in ("eagle", "mtp"):
        draft_kind = "chain" if drafter.num_nodes == drafter.max_depth + 1 else "tree"
    return Work(
        bytes=step_bytes(target, draft, drafter, pair.params, pair.batch, cache_bytes, draft_cache_bytes),
        flops=2 * product_weights(target) * pair.batch * drafter.num_nodes / pair.mesh.size,
        dtype=pair.dtype,
        tokens=rows_per_device * drafter.num_nodes,
        context=pair.context,
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        num_experts=target.num_experts,
        devices=devices_per_layer,
        draft=draft_kind,
        passes=_passes(draft, drafter),
        draft_layers=draft_layers,
    )


def product_weights(config: ModelConfig) -> int:
    """Return the number of weights that the matrix products for one token use."""
    num_weights = 0.0
    for row in weights(config):
        used_weights = math.prod(row.shape)
        if isinstance(row.path[-1], int) or row.path[-1].startswith("expert_"):
            # Each token uses `experts_per_token` of the experts.
            used_weights *= config.experts_per_token / config.num_experts
        if row.path != ("embed",) or config.tie_embeddings:
            num_weights += used_weights
    return round(num_weights)


def step_bytes(
    target: ModelConfig,
    draft: PlannedDraft,
    drafter: Drafter,
    params: Params,
    batch: int,
    cache_bytes: int,
    draft_cache_bytes: int,
) -> StepBytes:
    """Return the bytes that one device reads in a step: the weights and the live cache, once per pass.

    Args:
      target, draft, drafter, params: those of the pair.
      batch: number of rows.
      cache_bytes, draft_cache_bytes: bytes of the live caches of target and drafter.
    """
    target_bytes = read_once(target, params.target, tokens=batch * drafter.num_nodes)
    unembed_bytes = local_bytes(params.target.get("unembed", params.target["embed"]))
    draft_bytes = 0
    if draft.config is not None:
        passes = _passes(draft, drafter)
        draft_bytes = passes * (read_once(draft.config, params.draft, tokens=batch) + draft_cache_bytes)
        if isinstance(draft.config, HeadConfig):
            once_weights = [params.draft[name] for name in draft.config.read_once if name in params.draft]
            draft_bytes -= (passes - 1) * local_bytes(once_weights)
    return StepBytes(
        layers=target_bytes - unembed_bytes + cache_bytes, unembed=unembed_bytes, draft=draft_bytes
    )


def _passes(draft: PlannedDraft, drafter: Drafter) -> int:
    """Return how many passes over the draft's weights a step takes. A small model's first pass reads two tokens."""
    if draft.config is None:
        return 0
    if isinstance(draft.config, HeadConfig):
        return draft.config.passes(drafter.max_depth)
    return drafter.max_depth


def read_once(config: AnyConfig, params: PyTree, *, tokens: int) -> int:
    """Return the bytes of weights that one device reads in a forward pass over `tokens` tokens.

    An untied embedding is not counted, since only a few of its rows are looked up. Each token is assumed to choose k of
    E experts uniformly and independently, so the expected share of experts that the tokens use is 1 - (1 - k / E) **
    tokens.
    """
    read_bytes = local_bytes(params)
    if "embed" in params and not (isinstance(config, ModelConfig) and config.tie_embeddings):
        read_bytes -= local_bytes(params["embed"])
    layers = config.layer if isinstance(config, LayeredHead) else config
    if isinstance(layers, ModelConfig) and layers.num_experts:
        expert_share = 1 - (1 - layers.experts_per_token / layers.num_experts) ** tokens
        expert_bytes = sum(
            local_bytes(value)
            for layer in params.get("layers") or (params["layer"],)
            for name, value in layer.items()
            if name.startswith("expert_")
        )
        read_bytes -= round((1 - expert_share) * expert_bytes)
    return read_bytes


class Attempt(NamedTuple):
    """An attempt to fit a pair of models on a slice. Bytes are per device."""

    topology: str
    dtype: str
    mesh: dict[str, int]
    fits: bool
    # Memory use reported by the compiler, or the size of the weights if they already exceed the memory.
    held_bytes: int
    hbm_bytes: int


def try_fit(pair: Programs, topology: Topology) -> Attempt:
    """Compile the decode loop, unless its weights already exceed the memory, and return whether it fits."""
    used_bytes, fits = local_bytes(pair.params), False
    if used_bytes <= topology.device.hbm_bytes:
        used_bytes += local_bytes(pair.state)
        try:
            used_bytes = held_bytes(compile_program(pair.lower()))
            fits = used_bytes <= topology.device.hbm_bytes
        except OutOfMemory as error:
            used_bytes = max(used_bytes, error.used)
    axes = {name: int(size) for name, size in pair.mesh.shape.items()}
    return Attempt(topology.name, pair.dtype, axes, fits, used_bytes, topology.device.hbm_bytes)


class DraftShape(NamedTuple):
    """The shape of a draft: a chain of `length` tokens, or a dynamic tree. The unused field is None."""

    length: int | None
    tree: Dynamic | None

    @property
    def flags(self) -> str:
        """Command-line flags that select this shape.

        >>> DraftShape(3, None).flags, DraftShape(None, Dynamic()).flags
        ('--num-draft-tokens 3', '--tree dynamic:10-7-60')
        """
        if self.tree is None:
            return f"--num-draft-tokens {self.length}"
        return f"--tree dynamic:{self.tree.top_k}-{self.tree.depth}-{self.tree.nodes}"

    def tau(self, acceptance: Sequence[float]) -> float:
        """Return the expected tokens per step, given the acceptance probability of a drafted token at each depth.

        The last probability applies to all deeper levels. For a chain, tau is `1 + a + ... + a^length` (Leviathan et
        al. 2211.17192, equation 1). For a tree, the estimate counts the two likeliest candidates of each level and
        assumes that each is accepted with probability `a`, so `a` becomes `1 - (1 - a)^2`.

        >>> round(DraftShape(3, None).tau([0.5]), 3), round(DraftShape(None, Dynamic(depth=3)).tau([0.5]), 3)
        (1.875, 2.734)
        >>> DraftShape(3, None).tau([0.5, 0.25])
        1.65625
        """
        depth = self.length or 0
        if self.tree is not None:
            depth = self.tree.depth
        # `reach_prob` is the probability that the draft is accepted down to this level.
        reach_prob, expected_tokens = 1.0, 1.0
        for level in range(depth):
            a = acceptance[min(level, len(acceptance) - 1)]
            if self.tree is not None:
                a = 1 - (1 - a) ** 2
            reach_prob *= a
            expected_tokens += reach_prob
        return expected_tokens


SHAPES = (DraftShape(3, None), DraftShape(5, None), DraftShape(None, Dynamic()))
"""Drafts to compare for a mixture of experts, where large drafts are expensive."""
DEEPER = (DraftShape(5, None), DraftShape(None, Dynamic()), DraftShape(None, Dynamic(depth=10)))
"""Drafts to compare for other targets, whose steps slow down only slightly with more nodes or levels."""


class DraftEstimate(NamedTuple):
    """The estimated time of a step with a draft, and the number of tokens it yields at the assumed acceptance rate."""

    flags: str
    low_seconds: float
    high_seconds: float
    # The range of the break-even tau. If tau is above this range, drafting is faster than not drafting.
    pays_above: tuple[float, float]
    # Expected tokens per step.
    tau: float
    # Tokens per second relative to decoding without a draft.
    gain: float


def compare_drafts(
    step: Callable[[DraftShape], StepTime | None],
    autoregressive: StepTime,
    acceptance: Sequence[float],
    shapes: Sequence[DraftShape] = SHAPES,
) -> list[DraftEstimate]:
    """Return the drafts that fit, sorted by estimated tokens per second, fastest first.

    Args:
      step: function that returns the time of a step with a given draft, or None if the draft does not fit.
      autoregressive: the time of a step without a draft.
      acceptance: probability that a drafted token is accepted, by depth; see `DraftShape.tau`.
      shapes: shapes of the drafts.
    """
    estimates = []
    for shape in shapes:
        draft_time = step(shape)
        if draft_time is None:
            continue
        low, high = draft_time.low_seconds, draft_time.high_seconds
        base_low, base_high = autoregressive.low_seconds, autoregressive.high_seconds
        if draft_time.missing or autoregressive.missing:
            # Unless both steps have an estimate, compare their lower bounds.
            low = high = draft_time.floor_seconds
            base_low = base_high = autoregressive.floor_seconds
        # A draft pays off if tau exceeds the ratio of the two step times.
        ratios = low / base_low, high / base_high
        tau = shape.tau(acceptance)
        # Compare the midpoints of the two ranges.
        gain = tau * (base_low + base_high) / (low + high)
        estimates.append(DraftEstimate(shape.flags, low, high, (min(ratios), max(ratios)), tau, gain))
    return sorted(estimates, key=lambda draft: -draft.gain)


def advise(attempt: Callable[[str | None, str], Attempt], dtype: str, larger: Sequence[str]) -> list[Attempt]:
    """Try fewer bits on the same slice, then larger slices with the same dtype. Each search stops at the first fit.

    Args:
      attempt: function that maps a slice (None for the same slice) and a dtype to an attempt.
      dtype: the dtype that does not fit.
      larger: larger slices, in the order in which to try them.

    Returns:
      All attempts, successful or not.
    """
    attempts: list[Attempt] = []
    for narrower_dtype, bits in BITS.items():
        if bits < BITS.get(dtype, 16):
            attempts.append(attempt(None, narrower_dtype))
            if attempts[-1].fits:
                break
    for name in larger:
        try:
            attempts.append(attempt(name, dtype))
        except MarsError:
            # The models cannot be divided over the chips of this slice.
            continue
        if attempts[-1].fits:
            break
    return attempts
