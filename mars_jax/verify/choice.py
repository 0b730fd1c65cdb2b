"""The name and settings of a rule that a user has chosen by flags, in a file or in a benchmark arm.

Call `verify.load(choice.spec, target, **choice.settings)` to build the rule of a `RuleChoice`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from mars_jax.utils.errors import MarsError, did_you_mean
from mars_jax.utils.settings import Setting
from mars_jax.utils.types import JsonObject
from mars_jax.verify.definition import Definition, rules
from mars_jax.verify.own import find, is_own


class Given(NamedTuple):
    """The value of a setting as a string, and the name of the setting in error messages."""

    text: str  # the value as the user wrote it
    shown: str  # the name to show in messages, such as --theta


@dataclasses.dataclass(frozen=True)
class RuleChoice:
    """A rule and the settings that a user chose for it; see `choose`."""

    spec: str  # name of the rule; see `find`
    settings: Mapping[str, Any]  # checked values of the settings that the user set

    @property
    def definition(self) -> Definition:
        """Definition of the rule."""
        return find(self.spec)

    @property
    def name(self) -> str:
        """Name of the rule in messages.

        >>> choose("mars", {"base": Given("rejection", "--base")}).name
        'mars over rejection'
        """
        base = self._structure().get("base", "exact")
        if base == "exact" or is_own(self.spec):
            return self.definition.name
        return f"{self.definition.name} over {base}"

    @property
    def needs(self) -> frozenset[str]:
        """Requirements of the rule and its base, as keys of `NEEDS`. The setting `block` adds "chain".

        >>> sorted(choose("mars", {"base": Given("rejection", "--base"), "block": Given("true", "--block")}).needs)
        ['chain', 'draft', 'q']
        """
        needs = {*self.definition.needs}
        # A user's rule may have a setting with the same name but a different meaning.
        if not is_own(self.spec):
            base = self._structure().get("base")
            if base in ("exact", "rejection"):
                needs |= {*rules()[base].needs}
            if self.settings.get("block"):
                needs.add("chain")
        return frozenset(needs)

    @property
    def options(self) -> dict[str, Setting]:
        """Settings that users can set, by name, including those of the base rule."""
        return self.definition.options(**self._structure())

    def settled(self) -> dict[str, Any]:
        """Return the values of all settings, with defaults for those that the user did not set."""
        return self.definition.settle(self.settings)

    def as_json(self, *, but: Collection[str] = ()) -> JsonObject:
        """Return the spec and all settings not in `but`, for the JSON record of a run. Infinities become strings.

        >>> RuleChoice("rejection", {}).as_json()
        {'verify': 'rejection', 'settings': {'block': False}}
        """
        settings = {name: value for name, value in self.settled().items() if name not in but}
        for name, value in settings.items():
            if isinstance(value, float) and math.isinf(value):
                settings[name] = str(value)
        return {"verify": self.spec, "settings": settings}

    def but(self, **settings: Any) -> RuleChoice:
        """Return a copy of this choice with some settings changed.

        Raises:
          MarsError: a changed setting is invalid; see `Definition.settle`.
        """
        changed = RuleChoice(self.spec, {**self.settings, **settings})
        changed.settled()
        return changed

    def setting(self, name: str) -> tuple[Setting, dict[str, Any]]:
        """Return a setting, and the values of the structural settings that determine its range.

        Raises:
          MarsError: there is no setting of that name.
        """
        structure = self._structure()
        return self.definition.setting(name, **structure), structure

    def _structure(self) -> dict[str, Any]:
        return self.definition.structure(self.settings)


def choose(spec: str, given: Mapping[str, Given]) -> RuleChoice:
    """Choose a rule by name, and parse and check its settings.

    Args:
      spec: name of the rule; see `find`.
      given: settings as strings, by name.

    Raises:
      MarsError: the rule does not exist, the rule lacks one of the settings (the message lists rules that have it), or
        a value is out of range.

    >>> dict(choose("mars", {"theta": Given("0.8", "--theta")}).settings)
    {'theta': 0.8}
    """
    row = find(spec)
    settings: dict[str, Any] = {}
    # Parse the structural settings (those with choices) first, because they determine the other settings and their
    # ranges.
    for name in sorted(given, key=lambda name: not (name in row.settings and row.settings[name].choices)):
        choice = RuleChoice(spec, settings)
        setting_text, label = given[name]
        if name not in choice.options:
            # Suggest a similar name only if no rule has a setting of this name.
            is_known = any(name in other.settings for other in rules().values())
            suggestion = "" if is_known else did_you_mean(name, choice.options)
            raise MarsError(f"{label}{suggestion} does not apply to {not_in(choice, name)}.")
        setting, structural_settings = choice.setting(name)
        settings[name] = setting.from_text(setting_text, shown=label, **structural_settings)
    return RuleChoice(spec, settings)


def not_in(choice: RuleChoice, name: str) -> str:
    """Return the reason and the fix, for an error message about a setting that does not apply to a rule.

    >>> not_in(RuleChoice("exact", {}), "tau")
    'the rule exact, which has no settings: leave it out, or verify with simulated'
    """
    option_names = ", ".join(choice.options) or "no settings"
    fix = "leave it out"
    rules_with_it = [row.name for row in rules().values() if name in row.settings]
    bases = getattr(choice.definition.settings.get("base"), "choices", {})
    bases_with_it = [rule for rule in rules_with_it if rule in bases]
    if rules_with_it:
        fix += f", or verify with {' or '.join(bases_with_it or rules_with_it[:3])}"
    if bases_with_it:
        fix += f", or set base to {bases_with_it[0]}"
    return f"the rule {choice.name}, which has {option_names}: {fix}"
