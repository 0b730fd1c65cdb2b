"""The arms of a benchmark: the measured rule at each of its thresholds, and the controls it is compared with.

B batch, N nodes, V vocabulary. Tests: tests/lab/evaluate/test_arms.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import MARGINS
from mars_jax import verify
from mars_jax.core import struct
from mars_jax.core.controls import is_stop
from mars_jax.core.rule import Evidence, LoadedRule
from mars_jax.core.sampling import divisor, node_uniforms, sample
from mars_jax.core.tree import at_parent, walk
from mars_jax.core.types import Verdict
from mars_jax.hub.pretrained import Pretrained
from mars_jax.verify import RuleChoice, is_own

MARS = RuleChoice("mars", {})
"""The default rule to measure."""
AUTOREGRESSIVE = "autoregressive"
"""Name of the baseline arm: the target without a draft."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One of the decoding methods that a benchmark compares on the same prompts with the same seeds."""

    name: str
    loaded_rule: LoadedRule
    role: str = ""  # "rule" for the measured rule; "alone", "strict", "control" or "refined" for the others
    drafts: bool  # if False, each token takes one forward pass of the target
    refines: bool = False  # whether the draft is trained on its rejected tokens during the run
    top_k: int = 0
    theta: float | None = None  # the threshold; None for a rule without one
    meaning: str  # for the legend of a table

    def legend(self) -> dict[str, str]:
        """Return the entry for the legend of a table."""
        return {"arm": self.name, "role": self.role, "meaning": self.meaning}


@struct.dataclass(kw_only=True)
class LowMarginSampling(verify.Lossy):
    """The control that `low_margin_sampling` returns."""

    theta: Array  # f32[] or [B]
    margin: str = struct.field(pytree_node=False, default="ratio")
    name: ClassVar[str] = "low-margin sampling"

    def __call__(self, evidence: Evidence) -> tuple[Verdict, LowMarginSampling]:
        tree, controls, stats = evidence.tree, evidence.controls, evidence.stats
        theta = jnp.broadcast_to(self.theta[:, None], stats.top1.shape)
        # The token chosen at a node is one level deeper than the node.
        is_relaxable = tree.depths >= self.strict_edges(evidence)[:, None]
        is_low = MARGINS[self.margin](stats.top1, stats.top2, theta) & is_relaxable
        # As in `mars`, the margin never counts as low if one of the two tokens is a stop token.
        is_low &= ~is_stop(stats.id1, controls.stop_tokens) & ~is_stop(stats.id2, controls.stop_tokens)
        # The runner-up's share of the combined probability of the two best tokens.
        runner_up_share = jax.nn.sigmoid((stats.top2 - stats.top1) / divisor(controls)[:, None])
        takes_runner_up = node_uniforms(evidence.keys, evidence.positions) < runner_up_share
        # y[b, n] is the token that the target itself samples after node n.
        y = sample(evidence.keys, evidence.positions, evidence.logits, controls)
        y = jnp.where(is_low, jnp.where(takes_runner_up, stats.id2, stats.id1), y)
        path, num_accepted, relaxed = walk(tree, tree.tokens == at_parent(tree, y), None)
        next_token = jnp.take_along_axis(y, path[:, -1:], axis=1)[:, 0]
        verdict = Verdict(path=path, num_accepted=num_accepted, next_token=next_token, relaxed=relaxed)
        return verdict, self


def low_margin_sampling(
    margin: str = "ratio", *, theta: float = 0.9, exact_prefix: int = 0
) -> LowMarginSampling:
    """Return a control in which the target samples from the tokens that `verify.mars` would accept.

    If the margin of the two best tokens is low, the target draws one of these two, in proportion to their probabilities
    at the row's temperature (1 in a greedy row). If the margin is not low, if one of the two is a stop token, or within
    the first `exact_prefix` tokens, it emits the token that `verify.exact` would emit. A difference in quality between
    mars and this control is therefore due to the draft. The control works with any tree, but is meant to run without a
    draft.

    Args:
      margin, theta, exact_prefix: as for `verify.mars`, which validates them.

    Raises:
      MarsError: the margin is unknown or a number is out of range.

    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[0.0, 9.99, 10.0]], [[0.0, 5.0, 10.0]]])
    >>> draw, tree = verify.for_rows(low_margin_sampling(theta=0.9), 2), chain(jnp.zeros((2, 1), jnp.int32))
    >>> drawn = {tuple(draw(verify.evidence(tree, z, seeds=[i, i]))[0].next_token.tolist()) for i in range(20)}
    >>> sorted(drawn)
    [(1, 2), (2, 2)]
    """
    checked_mars = verify.mars(margin=margin, theta=theta, exact_prefix=exact_prefix)
    return LowMarginSampling(margin=margin, theta=checked_mars.theta, exact_prefix=checked_mars.exact_prefix)


def margin_of(choice: RuleChoice) -> str | None:
    """Return the margin that a rule's threshold bounds, or None if it does not bound a margin.

    >>> margin_of(RuleChoice("mars", {})), margin_of(RuleChoice("learned:PATH", {}))
    ('ratio', None)
    """
    margin = choice.settled().get("margin")
    if is_own(choice.spec) or margin not in MARGINS:
        return None
    return margin


def default_thetas(rule: RuleChoice) -> list[float]:
    """Return a list with a built-in rule's threshold, or [] for a user's rule or a rule without a threshold.

    >>> default_thetas(MARS), default_thetas(RuleChoice("exact", {}))
    ([0.9], [])
    """
    if is_own(rule.spec) or "theta" not in rule.options:
        return []
    return [rule.settled()["theta"]]


def make_arms(
    choice: RuleChoice,
    thetas: Sequence[float],
    *,
    temperature: float,
    target: Pretrained | None = None,
    refined: bool = False,
    controls: str = "all",
) -> list[Arm]:
    """Return all arms at one temperature: autoregression, the strict rule, then the rule and its controls.

    Args:
      choice: the rule to measure.
      thetas: thresholds of the rule, one arm each; the first also sets the threshold of the controls. Empty for a rule
        without a threshold, which gets one arm.
      temperature: at 0, the control that samples from the two best tokens at every position is identical to
        autoregression and is omitted.
      target: from `mars_jax.load`, for a rule with weights.
      refined: whether to append an arm that uses the strict rule and trains its draft during the run.
      controls: "none" returns only autoregression and the rule. "paper" adds the strict rule. "all" also adds controls
        in which the target samples from the tokens that a relaxed rule would accept from a draft.

    Raises:
      MarsError: see `verify.load`.

    >>> [arm.name for arm in make_arms(RuleChoice("mars", {}), [0.9], temperature=0.0)]
    ['autoregressive', 'exact', 'mars theta=0.9', 'low-margin sampling']
    """
    measured_arms = [_measured(choice, theta, target) for theta in thetas or [None]]
    base = base_of(measured_arms[0].loaded_rule)
    meaning = "the strict rule, which is lossless"
    strict_arm = Arm(name=base.rule.name, loaded_rule=base, role="strict", drafts=True, meaning=meaning)
    # If the measured rule is the strict rule itself, one arm serves as both.
    rule_arms = [arm for arm in measured_arms if arm.name != strict_arm.name]
    arms = [ALONE]
    if controls != "none" or not rule_arms:
        arms.append(strict_arm)
    arms += rule_arms
    if controls == "all" and rule_arms and not choice.definition.lossless:
        arms += _controls(choice, measured_arms[0], temperature)
    if refined:
        name = f"{strict_arm.name} refined"
        meaning = "the strict rule with a draft that is trained on its rejected tokens; training time counts"
        arms.append(dataclasses.replace(strict_arm, name=name, role="refined", refines=True, meaning=meaning))
    return arms


def _measured(choice: RuleChoice, theta: float | None, target: Pretrained | None) -> Arm:
    """Return the arm for the measured rule at threshold `theta`, which is None if the rule has no threshold."""
    settings, suffix, meaning = dict(choice.settings), "", "the rule"
    if theta is not None:
        settings["theta"], suffix, meaning = theta, f" theta={theta:g}", "the relaxed rule"
    rule = verify.load(choice.spec, target, **settings)
    name = label(choice, rule) + suffix
    return Arm(name=name, loaded_rule=rule, role="rule", drafts=True, theta=theta, meaning=meaning)


def label(choice: RuleChoice, rule: LoadedRule) -> str:
    """Return the name of a rule with the settings that its own name omits, except theta."""
    is_users_rule = is_own(choice.spec)
    name_parts = [choice.definition.name if is_users_rule else rule.rule.name]
    for name, value in choice.settings.items():
        if name == "theta":
            continue
        if type(value) in (int, float):
            name_parts.append(f"{name}={value:g}")
        elif is_users_rule:
            name_parts.append(f"{name}={value}")
    return " ".join(name_parts)


def _controls(choice: RuleChoice, first: Arm, temperature: float) -> list[Arm]:
    """Return the controls that show how much of a rule's benefit comes from sampling between the two best tokens."""
    arms, sampling_meaning = [], "the target alone, sampling from its two best tokens"
    control = functools.partial(dataclasses.replace, ALONE, role="control")
    if temperature > 0:
        name, meaning = f"{AUTOREGRESSIVE} top_k=2", f"{sampling_meaning} everywhere"
        arms.append(control(name=name, top_k=2, meaning=meaning))
    margin, theta = margin_of(choice), first.theta
    if margin is not None and theta is not None:
        rule = low_margin_sampling(margin, theta=theta, exact_prefix=first.loaded_rule.rule.exact_prefix)
        meaning = f"{sampling_meaning} where their margin is low at theta={theta:g}"
        arms.append(control(name=rule.name, loaded_rule=LoadedRule(rule), theta=theta, meaning=meaning))
    return arms


def base_of(rule: LoadedRule) -> LoadedRule:
    """Return the strict rule that a rule relaxes, or `exact` if the rule has no base.

    >>> base_of(verify.load("mars", base="rejection")).rule.name
    'rejection'
    """
    return LoadedRule(rule.rule.base or verify.exact())


_EXACT = LoadedRule(verify.exact())
ALONE = Arm(name=AUTOREGRESSIVE, loaded_rule=_EXACT, role="alone", drafts=False, meaning="the target alone")
"""The target without a draft."""
