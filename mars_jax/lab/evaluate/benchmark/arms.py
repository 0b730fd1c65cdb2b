"""The arms of an evaluation: the rule at its thresholds, and the controls without which its figures say little.

B batch, N nodes, V vocabulary. Oracle: tests/lab/evaluate/test_arms.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from kernels_pallas import MARGINS
from mars_jax import contrib, specs, verify
from mars_jax.core import struct
from mars_jax.core.controls import is_stop
from mars_jax.core.evidence import Evidence
from mars_jax.core.rule import LoadedRule, facts
from mars_jax.core.sampling import divisor, node_uniforms, sample
from mars_jax.core.tree import at_parent, walk
from mars_jax.core.types import Verdict
from mars_jax.specs import RuleChoice

MARS = RuleChoice("mars", {})
"""The rule that is measured unless told otherwise."""
AUTOREGRESSIVE = "autoregressive"
"""The arm that every other one is measured against."""
LEFT_OUT = {"none": ("strict", "infinite"), "paper": ("infinite",), "all": ()}
"""The roles that a choice of controls leaves out; all but "all" also do without "matched" and "control"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to decode the same prompts with the same seeds."""

    name: str
    rule: LoadedRule
    # The rule that is measured ("rule"), or what it is measured against: "alone", "strict", "infinite", "matched",
    # "control", "simulated", "refined".
    role: str = ""
    drafts: bool  # False: a target forward for every token
    refines: bool = False  # the draft learns from its failures as the arm goes on
    top_k: int = 0
    theta: float | None = None  # the threshold, or None for a rule that has none
    meaning: str  # for the legend of a table

    def legend(self) -> dict[str, str]:
        """Return what a table says of it."""
        return {"arm": self.name, "role": self.role, "meaning": self.meaning}


@struct.dataclass(kw_only=True)
class LowMarginSampling(verify.Lossy):
    """See `low_margin_sampling`."""

    theta: Any  # f32[] or [B]
    margin: str = struct.field(pytree_node=False, default="ratio")
    name: ClassVar[str] = "low-margin sampling"

    def __call__(self, evidence: Evidence) -> tuple[Verdict, LowMarginSampling]:
        tree, controls, stats = evidence.tree, evidence.controls, evidence.stats
        theta = jnp.broadcast_to(self.theta[:, None], stats.top1.shape)
        # A node decides on the token after it, which is one deeper.
        free = tree.depths >= self.strict_edges(evidence)[:, None]
        low = MARGINS[self.margin](stats.top1, stats.top2, theta) & free
        low &= ~is_stop(stats.id1, controls.stop_tokens) & ~is_stop(stats.id2, controls.stop_tokens)
        # Of the runner-up, among the two.
        share = jax.nn.sigmoid((stats.top2 - stats.top1) / divisor(controls)[:, None])
        second = node_uniforms(evidence.keys, evidence.positions) < share
        y = sample(evidence.keys, evidence.positions, evidence.logits, controls)
        y = jnp.where(low, jnp.where(second, stats.id2, stats.id1), y)
        path, accepted, relaxed = walk(tree, tree.tokens == at_parent(tree, y), None)
        next_token = jnp.take_along_axis(y, path[:, -1:], axis=1)[:, 0]
        verdict = Verdict(path=path, num_accepted=accepted, next_token=next_token, relaxed=relaxed)
        return verdict, self


def low_margin_sampling(
    margin: str = "ratio", *, theta: float = 0.9, exact_prefix: Any = 0
) -> LowMarginSampling:
    """Control: the target itself draws from the set that `verify.mars` lets a draft choose from.

    Where the margin of its two best tokens is low, y is one of these two, drawn by the target's own odds (at the
    row's temperature, at 1 in a greedy row); elsewhere, wherever one of the two is a stop token, and among the first
    `exact_prefix` tokens, y is what `verify.exact` would name. So a quality that mars has and this has not comes from
    the draft, and the other way round. For a tree of any size, though its use is without a draft.

    Args:
      margin, theta, exact_prefix: as for `verify.mars`, which checks them.

    Raises:
      MarsError: unknown margin, or a number out of its range.

    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[0.0, 9.99, 10.0]], [[0.0, 5.0, 10.0]]])
    >>> draw, tree = verify.for_rows(low_margin_sampling(theta=0.9), 2), chain(jnp.zeros((2, 1), jnp.int32))
    >>> drawn = {tuple(draw(verify.evidence(tree, z, seeds=[i, i]))[0].next_token.tolist()) for i in range(20)}
    >>> sorted(drawn)
    [(1, 2), (2, 2)]
    """
    checked = verify.mars(margin=margin, theta=theta, exact_prefix=exact_prefix)
    return LowMarginSampling(margin=margin, theta=checked.theta, exact_prefix=checked.exact_prefix)


def other_margin(margin: str | None) -> str:
    """The margin of the matched control: gap for the paper's ratio; ratio for gap, and for rules that have no
    margin."""
    return "gap" if margin == "ratio" else "ratio"


def margin_of(choice: RuleChoice) -> str | None:
    """The margin that the threshold of a rule bounds; None for a rule that bounds no margin.

    >>> margin_of(RuleChoice("mars", {})), margin_of(RuleChoice("learned:PATH", {}))
    ('ratio', None)
    """
    margin = None if specs.is_own(choice.spec) else choice.settled().get("margin")
    return margin if margin in specs.MARGINS else None


def default_thetas(rule: RuleChoice) -> list[float]:
    """The threshold of a rule of the table, by its settings or by default; none for a rule that has none.

    >>> default_thetas(MARS), default_thetas(RuleChoice("exact", {}))
    ([0.9], [])
    """
    if specs.is_own(rule.spec) or "theta" not in rule.options:
        return []
    return [rule.settled()["theta"]]


def make_arms(
    choice: RuleChoice,
    thetas: Sequence[float],
    *,
    temperature: float,
    matched: float | None,
    target: Any = None,
    simulated_taus: Sequence[float] = (),
    refined: bool = False,
    controls: str = "all",
) -> list[Arm]:
    """All arms at one temperature: autoregression first, the strict rule second, then the rule and its controls.

    Args:
      choice: the rule that is measured.
      thetas: of the rule, an arm for each; the first is the one that the controls are matched to. None for a rule
        without a threshold, or that keeps its own: it is one arm.
      temperature: at 0 the simple control, which samples, would be autoregression itself, and is left out.
      matched: threshold of `mars` with `other_margin` that has the tau of the rule; None for a lossless rule, which has
        no quality to control for, and where `controls` are not all.
      target: from `mars_jax.load`, for a rule with weights.
      simulated_taus: of arms that accept by chance, which come last but one.
      refined: add the strict rule with a draft that learns as it decodes, which comes last.
      controls: "all"; "paper" for the target alone, the strict rule and the rule; "none" for the first and the last.

    Raises:
      MarsError: as `verify.load`.

    >>> [arm.name for arm in make_arms(RuleChoice("mars", {}), [0.9], temperature=0.0, matched=1.2)]
    ['autoregressive', 'exact', 'mars theta=inf', 'mars theta=0.9', 'mars(gap) matched', 'low-margin sampling']
    """
    measured = _measured(choice, thetas, target)
    strict = base_of(measured[-1].rule)
    arms = [
        ALONE,
        Arm(
            name=facts(strict.rule).name,
            rule=strict,
            role="strict",
            drafts=True,
            meaning="the strict rule, which is lossless",
        ),
        *(arm for arm in measured if arm.name != facts(strict.rule).name),
    ]
    if matched is not None:
        arms += _controls(choice, measured[-1 - len(thetas[1:])], matched, temperature)
    simulated = "acceptance by chance with this tau, to size hardware: its text and its score mean nothing"
    for tau in simulated_taus:
        rule = LoadedRule(contrib.simulated(tau))
        arms.append(
            Arm(name=f"simulated tau={tau:g}", rule=rule, role="simulated", drafts=True, meaning=simulated)
        )
    if refined:
        arms.append(
            Arm(
                name=f"{facts(strict.rule).name} refined",
                rule=strict,
                role="refined",
                drafts=True,
                refines=True,
                meaning="the strict rule with a draft that learns from its failures after every group of problems, "
                "whose time counts",
            )
        )
    # A rule that is strict itself has the strict arm for its own.
    asked = any(arm.role == "rule" for arm in arms)
    return [arm for arm in arms if not asked or arm.role not in LEFT_OUT[controls]]


def _measured(choice: RuleChoice, thetas: Sequence[float], target: Any) -> list[Arm]:
    """The rule at its thresholds; one of the table also at inf, which is strict."""
    if not thetas:
        rule = verify.load(choice.spec, target, **choice.settings)
        return [Arm(name=label(choice, rule), rule=rule, role="rule", drafts=True, meaning="the rule")]
    infinite = () if specs.is_own(choice.spec) else (math.inf,)
    arms = []
    for theta in (*infinite, *thetas):
        rule = verify.load(choice.spec, target, **{**choice.settings, "theta": theta})
        arms.append(
            Arm(
                name=f"{label(choice, rule)} theta={theta:g}",
                rule=rule,
                role="infinite" if theta == math.inf else "rule",
                drafts=True,
                theta=theta,
                meaning="the relaxed rule switched off by its threshold: the strict rule again"
                if theta == math.inf
                else "the relaxed rule",
            )
        )
    return arms


def label(choice: RuleChoice, rule: LoadedRule) -> str:
    """A rule in the name of its arms, with the settings that were given for it and that its own name leaves out."""
    own = specs.is_own(choice.spec)
    given = (
        choice.settings.items()
        if own
        else [(k, v) for k, v in choice.settings.items() if type(v) in (int, float)]
    )
    words = [f"{k}={format(v, 'g') if type(v) in (int, float) else v}" for k, v in given if k != "theta"]
    return " ".join([choice.row.name if own else facts(rule.rule).name, *words])


def _controls(choice: RuleChoice, first: Arm, matched: float, temperature: float) -> list[Arm]:
    """The controls, which tell the rule's own merit from speed and from sampling among two tokens."""
    margin = margin_of(choice)
    strict = base_of(first.rule).rule
    prefix = facts(first.rule.rule).exact_prefix
    other = verify.mars(base=strict, theta=matched, margin=other_margin(margin), exact_prefix=prefix)
    at = f"theta={first.theta:g}" if first.theta is not None else first.name
    arms = [
        Arm(
            name=f"{other.name} matched",
            rule=LoadedRule(other),
            role="matched",
            drafts=True,
            theta=matched,
            meaning=f"another margin, its threshold set so that tau is that of {at}",
        )
    ]
    if temperature > 0:
        simple = "the target alone, sampling among its two best tokens everywhere: the simple control"
        arms.append(
            Arm(
                name=f"{AUTOREGRESSIVE} top_k=2",
                rule=_EXACT,
                role="control",
                drafts=False,
                top_k=2,
                meaning=simple,
            )
        )
    # A rule without a margin is compared with what its matched margin lets a draft choose from.
    if margin is None or first.theta is None:
        margin, theta, at = other_margin(margin), matched, f"the matched theta={matched:g}"
    else:
        theta = first.theta
    control = low_margin_sampling(margin, theta=theta, exact_prefix=prefix)
    meaning = f"the target alone, sampling among its two best tokens where the margin is low at {at}"
    return [
        *arms,
        Arm(
            name=control.name,
            rule=LoadedRule(control),
            role="control",
            drafts=False,
            theta=theta,
            meaning=meaning,
        ),
    ]


def base_of(rule: LoadedRule) -> LoadedRule:
    """The strict rule under a rule; of a rule that is over none, and lossless or not, `exact`.

    >>> base_of(verify.load("mars", base="rejection")).rule.name
    'rejection'
    """
    return LoadedRule(facts(rule.rule).base or verify.exact())


_EXACT = LoadedRule(verify.exact())
ALONE = Arm(name=AUTOREGRESSIVE, rule=_EXACT, role="alone", drafts=False, meaning="the target alone")
"""The target without a draft."""
