"""Advice on pairs of models that do not fit on a slice, and on the draft that pays: only what was compiled counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from mars_jax.core.errors import MarsError
from mars_jax.core.rule import Rule
from mars_jax.lab.planning.chips import Topology
from mars_jax.lab.planning.compiled_program import OutOfMemory, compile_program, held_bytes
from mars_jax.lab.planning.pair_programs import PlannedDraft, local_bytes, programs
from mars_jax.models.config import ModelConfig
from mars_jax.specs import BITS, Dynamic


class Attempt(NamedTuple):
    """A trial of a pair of models on a slice, and whether it fits. Bytes are of one device."""

    topology: str
    dtype: str
    mesh: dict[str, int]
    fits: bool
    held_bytes: int  # by the compiler, or at least: of weights alone, where these do not fit already
    hbm_bytes: int


def try_fit(
    target: ModelConfig,
    draft: PlannedDraft,
    topology: Topology,
    *,
    mesh: Mesh,
    verify: Rule,
    batch: int,
    context: int,
    dtype: str,
) -> Attempt:
    """Try to fit the decode loop: `make_plan` without its figures. It compiles only what may fit by its arrays."""
    made = programs(target, draft, mesh, verify, batch=batch, context=context, dtype=dtype)
    held, fits = local_bytes(made.params), False
    if held <= topology.hbm_bytes:
        state, lowered = made.lower(made.drafter, made.params)
        held += local_bytes(state)
        try:
            held = held_bytes(compile_program(lowered))
            fits = held <= topology.hbm_bytes
        except OutOfMemory as error:
            held = max(held, error.used)
    axes = {name: int(size) for name, size in mesh.shape.items()}
    return Attempt(topology.name, dtype, axes, fits, held, topology.hbm_bytes)


class Shape(NamedTuple):
    """A draft of a drafter: a chain of `length`, or `tree`."""

    length: int | None
    tree: Dynamic | None

    @property
    def flags(self) -> str:
        """The arguments of the commands.

        >>> Shape(3, None).flags, Shape(None, Dynamic()).flags
        ('--num-draft-tokens 3', '--tree dynamic:10-7-60')
        """
        if self.tree is None:
            return f"--num-draft-tokens {self.length}"
        return f"--tree dynamic:{self.tree.top_k}-{self.tree.depth}-{self.tree.nodes}"

    def tau(self, acceptance: Sequence[float]) -> float:
        """Tokens a step where a drafted token is accepted with the chance of its depth; the last is of all below.

        Of a tree a level is accepted where the likeliest child or the next one is, each with that chance. That is a
        model: `1 + a + ... + a^length` for a chain (Leviathan et al. 2211.17192, equation 1), and with
        `1 - (1 - a)^2` for `a` over the levels of a tree.

        >>> round(Shape(3, None).tau([0.5]), 3), round(Shape(None, Dynamic(depth=3)).tau([0.5]), 3)
        (1.875, 2.734)
        >>> Shape(3, None).tau([0.5, 0.25])
        1.65625
        """
        depth = self.length if self.tree is None else self.tree.depth
        assert depth is not None
        held, tokens = 1.0, 1.0
        for level in range(depth):
            a = acceptance[min(level, len(acceptance) - 1)]
            held *= a if self.tree is None else 1 - (1 - a) ** 2
            tokens += held
        return tokens


SHAPES = (Shape(3, None), Shape(5, None), Shape(None, Dynamic()))
"""Drafts that are tried for a mixture of experts, for which a large one is dear."""
DEEPER = (Shape(5, None), Shape(None, Dynamic()), Shape(None, Dynamic(depth=10)))
"""Drafts that are tried for other targets, whose steps take little longer with more nodes or levels."""


class Draft(NamedTuple):
    """The cost of a step with a draft by the compiler's schedule, and its tokens where drafts hold as assumed."""

    flags: str
    low_seconds: float
    high_seconds: float
    pays_above: tuple[float, float]  # tau at which it is as quick as no draft, by the two estimates
    tau: float  # expected
    gain: float  # tokens/s over those without a draft, by the middle of the estimates


def compare(
    step: Callable[[Shape], dict[str, Any] | None],
    alone: dict[str, Any],
    acceptance: Sequence[float],
    shapes: Sequence[Shape] = SHAPES,
) -> list[Draft]:
    """The drafts that could be compiled, the one with the most tokens/s first.

    Args:
      step: the estimate (`planning.estimate`) of a step with a draft, None where it does not fit.
      alone: the estimate of a step without one.
      acceptance: the chances that a drafted token is accepted, by depth; see `Shape.tau`.
      shapes: of the drafts.
    """
    found = []
    for shape in shapes:
        made = step(shape)
        if made is None:
            continue
        low, high = made["low_seconds"], made["high_seconds"]
        ratios = sorted((low / alone["low_seconds"], high / alone["high_seconds"]))
        tau = shape.tau(acceptance)
        gain = tau * (alone["low_seconds"] + alone["high_seconds"]) / (low + high)
        found.append(Draft(shape.flags, low, high, (ratios[0], ratios[1]), tau, gain))
    return sorted(found, key=lambda draft: -draft.gain)


def advise(attempt: Callable[[str | None, str], Attempt], dtype: str, larger: Sequence[str]) -> list[Attempt]:
    """Try fewer bits on the same slice, and find the next slice on which the weights fit as they are.

    Args:
      attempt: from a slice, None for the same, and a dtype.
      dtype: that does not fit.
      larger: slices in the order in which they are tried.

    Returns:
      What was tried, fitting or not: fewer bits up to the first that fit, and slices up to the first that fits.
    """
    found: list[Attempt] = []
    for fewer, bits in BITS.items():
        if bits >= BITS.get(dtype, 16):
            continue
        found.append(attempt(None, fewer))
        if found[-1].fits:
            break
    for name in larger:
        try:
            found.append(attempt(name, dtype))
        except MarsError:  # the models do not divide over so many chips
            continue
        if found[-1].fits:
            break
    return found
