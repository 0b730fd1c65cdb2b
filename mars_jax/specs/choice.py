"""A rule with the settings that a user chose for it, by name: what flags, files and arms of a benchmark hand on.

No jax; `verify.load(choice.spec, target, **choice.settings)` makes the rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from mars_jax.core.errors import MarsError, did_you_mean
from mars_jax.core.settings import Setting
from mars_jax.specs.own import find, is_own
from mars_jax.specs.row import RuleRow
from mars_jax.specs.rules import RULES


class Given(NamedTuple):
    """The text of a setting, and how the setting was called where it was given."""

    text: str
    shown: str  # such as --theta


@dataclasses.dataclass(frozen=True)
class RuleChoice:
    """See `choose`."""

    spec: str
    settings: Mapping[str, Any]  # what was given, as values in range

    @property
    def row(self) -> RuleRow:
        """The row of the table, or one made of the user's factory."""
        return find(self.spec)

    @property
    def name(self) -> str:
        """The name in messages.

        >>> choose("mars", {"base": Given("rejection", "--base")}).name
        'mars over rejection'
        """
        base = self._structure().get("base", "exact")
        return self.row.name if base == "exact" or is_own(self.spec) else f"{self.row.name} over {base}"

    @property
    def needs(self) -> frozenset[str]:
        """The needs of the rule and of its base, as far as the table knows; blocks are chains.

        >>> sorted(choose("mars", {"base": Given("rejection", "--base"), "block": Given("true", "--block")}).needs)
        ['chain', 'draft', 'q']
        """
        base = self._structure().get("base")
        of_base = RULES[base].needs if base in RULES and not is_own(self.spec) else ()
        of_block = ("chain",) if not is_own(self.spec) and self.settings.get("block") else ()
        return frozenset((*self.row.needs, *of_base, *of_block))

    @property
    def options(self) -> dict[str, Setting]:
        """The settings that can be given, those of its base among them."""
        return self.row.options(**self._structure())

    def settled(self) -> dict[str, Any]:
        """All settings, with the defaults of those that were not given."""
        return self.row.settle(self.settings)

    def as_json(self, *, but: Collection[str] = ()) -> dict[str, Any]:
        """For the records of a run: the spec and every setting, `but` some; infinities as texts.

        >>> RuleChoice("rejection", {}).as_json()
        {'verify': 'rejection', 'settings': {'block': False}}
        """
        settings = {name: value for name, value in self.settled().items() if name not in but}
        json_settings = {
            k: str(v) if isinstance(v, float) and math.isinf(v) else v for k, v in settings.items()
        }
        return {"verify": self.spec, "settings": json_settings}

    def but(self, **settings: Any) -> RuleChoice:
        """The same rule with other settings.

        Raises:
          MarsError: as `Rule.settle`.
        """
        changed = RuleChoice(self.spec, {**self.settings, **settings})
        changed.settled()
        return changed

    def setting(self, name: str) -> tuple[Setting, dict[str, Any]]:
        """A setting, and the structural choices that its range depends on.

        Raises:
          MarsError: there is none of that name.
        """
        structure = self._structure()
        return self.row.setting(name, **structure), structure

    def _structure(self) -> dict[str, Any]:
        defaults = {name: s.default for name, s in self.row.settings.items() if s.choices}
        return defaults | {name: self.settings[name] for name in defaults.keys() & self.settings.keys()}


def choose(spec: str, given: Mapping[str, Given]) -> RuleChoice:
    """A rule by its name, with settings as texts.

    Args:
      spec: as for `find`.
      given: by the names of settings.

    Raises:
      MarsError: no such rule; a setting that it does not have, with the rules that do; a value out of range.

    >>> dict(choose("mars", {"theta": Given("0.8", "--theta")}).settings)
    {'theta': 0.8}
    """
    row = find(spec)
    settings: dict[str, Any] = {}
    # Choices first, since what else there is, and in which range, depends on them.
    for name in sorted(given, key=lambda name: not (name in row.settings and row.settings[name].choices)):
        choice = RuleChoice(spec, settings)
        text, label = given[name]
        if name not in choice.options:
            suggestion = did_you_mean(name, choice.options)
            raise MarsError(f"{label}{suggestion} does not apply to {not_in(choice, name)}.")
        setting, structure = choice.setting(name)
        settings[name] = setting.from_text(text, shown=label, **structure)
    return RuleChoice(spec, settings)


def not_in(choice: RuleChoice, name: str) -> str:
    """The rest of a sentence: why a setting does not apply, and what to do.

    >>> not_in(RuleChoice("exact", {}), "tau")
    'the rule exact, which has no settings: leave it out, or verify with simulated'
    """
    option_names = ", ".join(choice.options)
    rules_with_it = [row.name for row in RULES.values() if name in row.settings]
    based = [
        b for b in rules_with_it if "base" in choice.row.settings and b in choice.row.settings["base"].choices
    ]
    cure = f", or verify with {' or '.join(based or rules_with_it[:3])}" if rules_with_it else ""
    if based:
        cure += f", or set base to {based[0]}"
    return f"the rule {choice.name}, which has {option_names or 'no settings'}: leave it out{cure}"
