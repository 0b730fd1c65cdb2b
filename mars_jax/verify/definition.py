"""Definitions of rules by name. The class of a rule is its definition: its fields declare its settings.

Flags, prompts-file keys, lists, pages and checks use the definitions. Rules from other packages are plugins: an entry
point in the group `mars_jax.plugins` refers to a module that registers rules when it is imported.

Oracle: tests/verify/test_definition.py.
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
    "chain": "chains, no trees",
    "weights": "weights of its own, as NAME:PATH",
    "draft_hidden": "hidden states of the draft, if its head reads them",
    "long": "drafts of a fixed length: no ngram, no draft_stop",
}
"""Descriptions of the possible needs of a rule."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Definition:
    """A rule that users can name: a registered class, or a user's function that returns a rule."""

    name: str  # contains no colon
    make: Callable[..., Any]  # takes the settings as keywords
    help: str  # one sentence without a period
    lossless: bool = False  # whether the output follows the target's distribution
    needs: tuple[str, ...] = ()  # keys of NEEDS
    paper: str = ""  # the source, such as an arXiv number
    settings: Mapping[str, Setting]  # by name; the class's own settings precede inherited ones

    def options(self, **chosen: Any) -> dict[str, Setting]:
        """Return the rule's settings and those of its base.

        >>> list(rule("mars").options(base="rejection"))
        ['theta', 'margin', 'base', 'max_relaxed_run', 'exact_prefix', 'block']
        """
        options = dict(self.settings)
        if "base" in self.settings:
            base = chosen.get("base", self.settings["base"].default)
            # A user's rule may have a setting of this name that is no rule.
            if base in _RULES:
                for name, setting in _RULES[base].settings.items():
                    options.setdefault(name, setting)
        return options

    def setting(self, name: str, **chosen: Any) -> Setting:
        """Return one of `options`.

        Raises:
          MarsError: there is no setting of that name.
        """
        options = self.options(**chosen)
        if name not in options:
            available = ", ".join(options) or "none"
            raise MarsError(f"the rule {self.name} has no setting '{name}': it has {available}.")
        return options[name]

    def structure(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rule's structural choices, checked, with defaults for those not in `settings`.

        Raises:
          MarsError: there is no such choice.
        """
        structural_settings = {name: s for name, s in self.settings.items() if s.choices}
        for name in structural_settings.keys() & settings.keys():
            structural_settings[name].check(settings[name])
        return {name: settings.get(name, s.default) for name, s in structural_settings.items()}

    def settle(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings: the given ones, checked, and the defaults of the others.

        Raises:
          MarsError: an unknown name, a value out of range, or a required setting that is missing.

        >>> rule("mars").settle({"theta": 0.8})["margin"]
        'ratio'
        """
        # Choices determine the other settings and their ranges.
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
        """Return the definition for `--list-rules --json`."""
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
    """Return a decorator that makes a rule available by `name`. Lists show the first line of its docstring.

    Args:
      name: without a colon.
      paper: its source, such as an arXiv number.
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
    """Return the definitions of all rules by name, those of plugins last.

    >>> [*rules()][:3], "fly" in rules()
    (['exact', 'rejection', 'mars'], True)
    """
    # Plugins register when they are imported.
    load_plugins()
    return {name: _RULES[name] for name in ("exact", "rejection", "mars")} | _RULES


def rule(name: str) -> Definition:
    """Return the definition of a rule. Looking up an unknown name loads the plugins first.

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
