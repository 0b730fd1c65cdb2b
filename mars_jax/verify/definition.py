"""Registry of rules. Each rule has a name, and a definition that is derived from the rule's class.

The fields of a class declare the settings of the rule. Flags, keys of prompts files, lists of rules and checks are
derived from the definitions. Other packages can provide rules as plugins: an entry point in the group
`mars_jax.plugins` refers to a module that registers rules when it is imported.

Tests: tests/verify/test_definition.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mars_jax.core.struct import settings_of
from mars_jax.utils.errors import MarsError, did_you_mean
from mars_jax.utils.plugins import load_plugins
from mars_jax.utils.settings import Setting
from mars_jax.utils.types import JsonObject
from mars_jax.utils.user_code import summary

T = TypeVar("T")
NEEDS = {
    "draft": "a draft",
    "q": "the draft's true probabilities",
    "chain": "a chain, not a tree",
    "weights": "weights, given as NAME:PATH",
    "draft_hidden": "hidden states of the draft, if its head reads them",
    "long": "drafts of a fixed length: no ngram, no draft_stop",
}
"""The possible requirements of a rule, with their descriptions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Definition:
    """Definition of a rule that users can select: a registered class, or a user's function that returns a rule."""

    name: str  # must not contain a colon
    make: Callable[..., Any]  # returns the rule, given its settings as keyword arguments
    help: str  # description, one sentence without a period
    lossless: bool = False  # True if the output follows the target's distribution
    needs: tuple[str, ...] = ()  # requirements, as keys of NEEDS
    paper: str = ""  # source of the rule, such as an arXiv number
    settings: Mapping[str, Setting]  # settings by name, first those of the class itself, then inherited ones

    def options(self, **chosen: Any) -> dict[str, Setting]:
        """Return the settings of the rule and of its base, by name. `chosen` may contain the name of the base.

        >>> list(rule("mars").options(base="rejection"))
        ['theta', 'margin', 'base', 'max_relaxed_run', 'exact_prefix', 'block']
        """
        options = dict(self.settings)
        if "base" in self.settings:
            base = chosen.get("base", self.settings["base"].default)
            # In a user's rule, the setting `base` may have a different meaning.
            if base in _RULES:
                for name, setting in _RULES[base].settings.items():
                    options.setdefault(name, setting)
        return options

    def setting(self, name: str, **chosen: Any) -> Setting:
        """Return the setting with this name. `chosen` may contain the name of the base.

        Raises:
          MarsError: there is no setting of that name.
        """
        options = self.options(**chosen)
        if name not in options:
            available = ", ".join(options) or "none"
            raise MarsError(f"the rule {self.name} has no setting '{name}': it has {available}.")
        return options[name]

    def structure(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the structural settings (those with choices), with defaults for the missing ones.

        Raises:
          MarsError: a value is not one of the choices.
        """
        structural_settings = {name: s for name, s in self.settings.items() if s.choices}
        for name in structural_settings.keys() & settings.keys():
            structural_settings[name].check(settings[name])
        return {name: settings.get(name, s.default) for name, s in structural_settings.items()}

    def settle(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Check the given settings and return the values of all settings, with defaults for the missing ones.

        Raises:
          MarsError: a name is unknown, a value is out of range, or a required setting is missing.

        >>> rule("mars").settle({"theta": 0.8})["margin"]
        'ratio'
        """
        # Structural settings determine which other settings exist, and their ranges.
        structure = self.structure(settings)
        for name, value in settings.items():
            self.setting(name, **structure).check(value, **structure)
        settled = {name: s.default for name, s in self.options(**structure).items()} | dict(settings)
        for name, value in settled.items():
            setting = self.setting(name, **structure)
            if value is None and not setting.optional:
                expected = setting.expected(**structure)
                raise MarsError(f"the rule {self.name} needs a {name}: give {expected}.")
        return settled

    def as_json(self) -> JsonObject:
        """Return the definition as JSON, for `--list-rules --json`."""
        return {
            "name": self.name,
            "help": self.help,
            "lossless": self.lossless,
            "needs": list(self.needs),
            "paper": self.paper or None,
            "factory": f"{self.make.__module__}:{self.make.__qualname__}",
            "settings": [s.as_json() for s in self.settings.values()],
        }


_RULES: dict[str, Definition] = {}


def register(name: str, *, paper: str = "") -> Callable[[type[T]], type[T]]:
    """Return a class decorator that registers a rule. Lists of rules show the first line of the class's docstring.

    Args:
      name: name of the rule, without a colon.
      paper: source of the rule, such as an arXiv number.
    """

    def add(cls: type[T]) -> type[T]:
        rule_class: Any = cls
        _RULES[name] = Definition(
            name=name,
            make=rule_class,
            help=summary(rule_class),
            lossless=rule_class.lossless,
            needs=rule_class.needs,
            paper=paper,
            settings=settings_of(cls),
        )
        return cls

    return add


def rules() -> Mapping[str, Definition]:
    """Return the definitions of all registered rules, by name. Rules from plugins come last.

    >>> [*rules()][:3], "fly" in rules()
    (['exact', 'rejection', 'mars'], True)
    """
    # Plugins register their rules when they are imported.
    load_plugins()
    return {name: _RULES[name] for name in ("exact", "rejection", "mars")} | _RULES


def rule(name: str) -> Definition:
    """Return the definition of a registered rule. If the name is unknown, load the plugins first.

    Raises:
      MarsError: there is no rule of that name.

    >>> rule("exact").lossless
    True
    """
    if name not in _RULES and name not in rules():
        raise MarsError(
            f"there is no rule '{name}'{did_you_mean(name, _RULES)}: choose one of {', '.join(rules())}, or "
            "name your own, as FILE.py:NAME or package.module:NAME."
        )
    return _RULES[name]
