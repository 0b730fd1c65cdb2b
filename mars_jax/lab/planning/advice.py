"""Advice on slices for pairs that do not fit, and on drafts that pay off. Every recommendation has been compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mars_jax.drafters.tree_shapes import Dynamic
from mars_jax.lab.planning.chips import Topology
from mars_jax.lab.planning.compiled_program import OutOfMemory, compile_program, held_bytes
from mars_jax.lab.planning.estimate import StepTime
from mars_jax.lab.planning.pair_programs import Programs, local_bytes
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import BITS


class Attempt(NamedTuple):
    """An attempt to fit a pair of models on a slice. Bytes are per device."""

    topology: str
    dtype: str
    mesh: dict[str, int]
    fits: bool
    # Reported by the compiler, or the size of the weights if they already exceed the memory.
    held_bytes: int
    hbm_bytes: int


def try_fit(pair: Programs, topology: Topology) -> Attempt:
    """Compile the decode loop, unless its weights already exceed the memory, and return whether it fits."""
    used_bytes, fits = local_bytes(pair.params), False
    if used_bytes <= topology.hbm_bytes:
        used_bytes += local_bytes(pair.state)
        try:
            used_bytes = held_bytes(compile_program(pair.lower()))
            fits = used_bytes <= topology.hbm_bytes
        except OutOfMemory as error:
            used_bytes = max(used_bytes, error.used)
    axes = {name: int(size) for name, size in pair.mesh.shape.items()}
    return Attempt(topology.name, pair.dtype, axes, fits, used_bytes, topology.hbm_bytes)


class DraftShape(NamedTuple):
    """The shape of a draft: a chain of `length`, or `tree`."""

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

        The last probability applies to all deeper levels. A chain gives `1 + a + ... + a^length` (Leviathan et al.
        2211.17192, equation 1). A level of a tree is accepted if one of its two likeliest children is, so its `a` is
        `1 - (1 - a)^2`.

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
    """The time of a step with a draft, and its tokens at the assumed acceptance."""

    flags: str
    low_seconds: float
    high_seconds: float
    # The range of tau above which the draft is faster than no draft.
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
    """Return the drafts that fit, fastest in tokens per second first.

    Args:
      step: returns the time of a step with a draft, or None if it does not fit.
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
            # Compare lower bounds with lower bounds.
            low = high = draft_time.floor_seconds
            base_low = base_high = autoregressive.floor_seconds
        # A draft pays if tau exceeds the ratio of the two step times.
        ratios = low / base_low, high / base_high
        tau = shape.tau(acceptance)
        # Compare the middles of the two ranges.
        gain = tau * (base_low + base_high) / (low + high)
        estimates.append(DraftEstimate(shape.flags, low, high, (min(ratios), max(ratios)), tau, gain))
    return sorted(estimates, key=lambda draft: -draft.gain)


def advise(attempt: Callable[[str | None, str], Attempt], dtype: str, larger: Sequence[str]) -> list[Attempt]:
    """Try fewer bits on the same slice, then larger slices with the same dtype. Each series ends at the first fit.

    Args:
      attempt: maps a slice (None for the same) and a dtype to an attempt.
      dtype: the dtype that does not fit.
      larger: larger slices in the order to try.

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
            # The models cannot be divided over this number of chips.
            continue
        if attempts[-1].fits:
            break
    return attempts
