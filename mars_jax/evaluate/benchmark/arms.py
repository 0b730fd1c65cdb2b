"""The arms of an evaluation: the rule at its thresholds, and the controls without which its figures say little.

B batch, N nodes, V vocabulary. Oracle: tests/evaluate/test_arms.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import MARGINS
from mars_jax import verify
from mars_jax.core.controls import is_stop
from mars_jax.core.evidence import Evidence
from mars_jax.core.sampling import is_greedy, node_uniforms, sample
from mars_jax.core.tree import at_parent, walk
from mars_jax.core.types import Verdict, Verifier

AUTOREGRESSIVE = "autoregressive"
"""The arm that every other one is measured against."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to decode the same prompts with the same seeds."""

    name: str
    rule: Verifier
    drafts: bool  # False: a target forward for every token
    top_k: int = 0
    meaning: str  # for the legend of a table

    @property
    def theta(self) -> float | None:
        """The threshold, or None for a rule that has none."""
        theta = getattr(self.rule, "theta", None)
        return (
            None if theta is None else float(f"{float(theta):.7g}")
        )  # as it was given, not as f32 widens it


@flax.struct.dataclass
class LowMarginSampling:
    """See `low_margin_sampling`."""

    theta: Any  # f32[] or [B]
    margin: str = flax.struct.field(pytree_node=False, default="ratio")
    name: ClassVar[str] = "low-margin sampling"
    lossless: ClassVar[bool] = False

    def __call__(self, evidence: Evidence) -> tuple[Verdict, LowMarginSampling]:
        tree, controls, stats = evidence.tree, evidence.controls, evidence.stats
        theta = jnp.broadcast_to(self.theta[:, None], stats.top1.shape)
        low = MARGINS[self.margin](stats.top1, stats.top2, theta) & ~controls.strict[:, None]
        low &= ~is_stop(stats.id1, controls.stop_tokens) & ~is_stop(stats.id2, controls.stop_tokens)
        temperature = jnp.where(is_greedy(controls), 1.0, controls.temperature)[:, None]
        share = jax.nn.sigmoid((stats.top2 - stats.top1) / temperature)  # of the runner-up, among the two
        second = node_uniforms(evidence.keys, evidence.positions) < share
        y = sample(evidence.keys, evidence.positions, evidence.logits, controls)
        y = jnp.where(low, jnp.where(second, stats.id2, stats.id1), y)
        path, accepted, relaxed = walk(tree, tree.tokens == at_parent(tree, y), None)
        next_token = jnp.take_along_axis(y, path[:, -1:], axis=1)[:, 0]
        verdict = Verdict(path=path, num_accepted=accepted, next_token=next_token, relaxed=relaxed)
        return verdict, self


def low_margin_sampling(margin: str = "ratio", *, theta: float = 0.9) -> LowMarginSampling:
    """Control: the target itself draws from the set that `verify.mars` lets a draft choose from.

    Where the margin of its two best tokens is low, y is one of these two, drawn by the target's own odds (at the
    row's temperature, at 1 in a greedy row); elsewhere, and wherever one of the two is a stop token, y is what
    `verify.exact` would name. So a quality that mars has and this has not comes from the draft, and the other way
    round. For a tree of any size, though its use is without a draft.

    Args:
      margin, theta: as for `verify.mars`, which checks them.

    Raises:
      MarsError: unknown margin, or theta out of its range.

    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[0.0, 9.99, 10.0]], [[0.0, 5.0, 10.0]]])
    >>> draw, tree = verify.for_rows(low_margin_sampling(theta=0.9), 2), chain(jnp.zeros((2, 1), jnp.int32))
    >>> drawn = {tuple(draw(verify.evidence(tree, z, seeds=[i, i]))[0].next_token.tolist()) for i in range(20)}
    >>> sorted(drawn)
    [(1, 2), (2, 2)]
    """
    verify.mars(margin=margin, theta=theta)
    return LowMarginSampling(margin=margin, theta=np.float32(theta))


def other_margin(margin: str) -> str:
    """The margin of the matched control: gap for the paper's ratio, and ratio for gap and what is one in disguise."""
    return "gap" if margin == "ratio" else "ratio"


def make_arms(
    thetas: Sequence[float],
    *,
    temperature: float,
    matched: float,
    base: str = "exact",
    margin: str = "ratio",
    simulated_taus: Sequence[float] = (),
) -> list[Arm]:
    """All arms at one temperature, autoregression first and the strict rule second.

    Args:
      thetas: of the relaxed rule; the first is the one that the controls are matched to.
      temperature: at 0 the simple control, which samples, would be autoregression itself, and is left out.
      matched: threshold of the rule with `other_margin` that has the tau of the first theta.
      base: "exact" or "rejection".
      margin: one of `verify.MARGINS`.
      simulated_taus: of arms that accept by chance, which come last.

    Raises:
      MarsError: unknown margin, or a threshold out of its range.

    >>> [arm.name for arm in make_arms([0.9], temperature=0.0, matched=1.2)]
    ['autoregressive', 'exact', 'mars theta=inf', 'mars theta=0.9', 'mars(gap) matched', 'low-margin sampling']
    """
    strict = base_rule(base)
    relaxed = verify.mars(strict, theta=math.inf, margin=margin).name
    other = verify.mars(strict, theta=matched, margin=other_margin(margin))
    arms = [
        Arm(name=AUTOREGRESSIVE, rule=verify.exact(), drafts=False, meaning="the target alone"),
        Arm(name=base, rule=strict, drafts=True, meaning="the strict rule, which is lossless"),
        *(
            Arm(
                name=f"{relaxed} theta={theta:g}",
                rule=verify.mars(strict, theta=theta, margin=margin),
                drafts=True,
                meaning="the relaxed rule switched off by its threshold: the strict rule again"
                if theta == math.inf
                else "the relaxed rule",
            )
            for theta in (math.inf, *thetas)
        ),
        Arm(
            name=f"{other.name} matched",
            rule=other,
            drafts=True,
            meaning=f"another margin, its threshold set so that tau is that of theta={thetas[0]:g}",
        ),
    ]
    if temperature > 0:
        simple = "the target alone, sampling among its two best tokens everywhere: the simple control"
        arms.append(
            Arm(name=f"{AUTOREGRESSIVE} top_k=2", rule=verify.exact(), drafts=False, top_k=2, meaning=simple)
        )
    control = low_margin_sampling(margin, theta=thetas[0])
    meaning = (
        f"the target alone, sampling among its two best tokens where the margin is low at theta={thetas[0]:g}"
    )
    arms.append(Arm(name=control.name, rule=control, drafts=False, meaning=meaning))
    simulated = "acceptance by chance with this tau, to size hardware: its text and its score mean nothing"
    for tau in simulated_taus:
        rule = verify.simulated(tau)
        arms.append(Arm(name=rule.name, rule=rule, drafts=True, meaning=simulated))
    return arms


def base_rule(base: str) -> verify.Exact | verify.Rejection:
    """The strict rule by its name."""
    return verify.rejection() if base == "rejection" else verify.exact()
