"""The rules by name, with their settings, ranges, defaults and needs. No jax.

A new rule is one file in `mars_jax/verify`, one row of `RULES` and one row of the tests; see docs/rules.md.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from mars_jax.core.errors import MarsError
from mars_jax.core.settings import LARGEST_INT, Range, Setting, by_name

UNLIMITED_RUN = 1 << 30
"""Default of `max_relaxed_run`: longer than any draft."""
MARGINS = {
    "ratio": "second logit / best > theta",
    "gap": "nats between them < theta",
    "prob_ratio": "second probability / best > theta",
}
"""What a threshold may bound, as `kernels_pallas.MARGINS` computes it."""
NEEDS = {
    "draft": "a draft, about which it decides",
    "chain": "chains, no trees",
    "weights": "weights of its own, as NAME:PATH",
    "long": "drafts of a sure length: no ngram, no draft_stop",
}
"""What a rule may need, in words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of `RULES`, or what the signature of a user's own factory says."""

    name: str
    factory: str  # "module:function"
    help: str
    lossless: bool
    needs: tuple[str, ...] = ()  # of NEEDS
    paper: str = ""
    settings: Mapping[str, Setting] = dataclasses.field(default_factory=dict)

    def options(self, **chosen: Any) -> dict[str, Setting]:
        """Its settings, and those of the rule that `base` names.

        >>> list(rule("mars").options(base="rejection"))
        ['base', 'margin', 'theta', 'max_relaxed_run', 'block']
        """
        made = dict(self.settings)
        if "base" in made and made["base"].choices:
            base = RULES[chosen.get("base", made["base"].default)]
            made |= {k: v for k, v in base.settings.items() if k not in made}
        return made

    def setting(self, name: str, **chosen: Any) -> Setting:
        """One of `options`.

        Raises:
          MarsError: it has none of that name.
        """
        options = self.options(**chosen)
        if name not in options:
            has = f"it has {', '.join(options)}" if options else "it has none"
            raise MarsError(f"the rule {self.name} has no setting '{name}': {has}.")
        return options[name]

    def check(self, name: str, value: Any, **chosen: Any) -> None:
        """Raise MarsError unless `value` is in the range of a setting; see `Setting.check`.

        >>> rule("mars").check("theta", [0.8, float("inf")], margin="ratio")
        """
        structure = self._structure(chosen)
        self.setting(name, **chosen).check(value, **structure)

    def _structure(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Its structural choices, those that are not in `chosen` by their defaults."""
        for name in self.settings.keys() & chosen.keys():
            self.settings[name].check(chosen[name])
        return {name: s.default for name, s in self.settings.items() if s.choices} | dict(chosen)

    def settle(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All settings: what is given, checked, and the defaults of the others.

        Raises:
          MarsError: an unknown name, a value out of range, or a setting that must be given and is not.

        >>> rule("mars").settle({"theta": 0.8})["margin"]
        'ratio'
        """
        # Choices first, since what else there is, and in which range, depends on them.
        chosen = {name: given[name] for name, s in self.settings.items() if s.choices and name in given}
        for name, value in chosen.items():
            self.settings[name].check(value)
        for name, value in given.items():
            self.check(name, value, **chosen)
        settled = {name: s.default for name, s in self.options(**chosen).items()} | dict(given)
        for name, value in settled.items():
            setting = self.setting(name, **chosen)
            if value is None and not setting.optional:
                expected = setting.expected(**self._structure(chosen))
                raise MarsError(f"the rule {self.name} needs a {name}: give {expected}.")
        return settled

    def as_json(self) -> dict[str, Any]:
        """The row, for `--list-rules --json`."""
        return {
            "name": self.name,
            "help": self.help,
            "lossless": self.lossless,
            "needs": list(self.needs),
            "paper": self.paper or None,
            "factory": self.factory,
            "settings": [s.as_json() for s in self.settings.values()],
        }


def _share(words: str, grid: tuple[float, ...]) -> Range:
    return Range(words, 0, 1, above=True, inf=True, grid=grid)


_BASE = Setting(
    name="base",
    kind=str,
    default="exact",
    choices={"exact": "what the target would say", "rejection": "speculative sampling"},
    flag=True,
    help="the strict rule that is relaxed",
)
_MAX_RELAXED_RUN = Setting(
    name="max_relaxed_run",
    kind=int,
    default=UNLIMITED_RUN,
    word="any",
    ranges=Range("a whole number of at least 0", 0, LARGEST_INT),
    per_row=True,
    flag=True,
    metavar="N",
    help="relaxed tokens in a row that are allowed",
)
_RATIOS = (0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.86, 0.84, 0.82, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
_GAPS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
_ODDS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.01)
_HARMS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_STRICT = "above 0 and at most 1 for the margin {}, or inf, which is strict"

RULES: dict[str, Rule] = {
    row.name: row
    for row in (
        Rule(
            name="exact",
            factory="mars_jax.verify.exact:exact",
            help="keeps what the target itself would say",
            lossless=True,
        ),
        Rule(
            name="rejection",
            factory="mars_jax.verify.rejection:rejection",
            help="speculative sampling with the draft's true probabilities",
            lossless=True,
            needs=("draft", "chain"),
            paper="2211.17192, 2302.01318; block: 2403.10444",
            settings=by_name(
                Setting(
                    name="block", kind=bool, default=False, flag=True, help="by whole blocks, not by tokens"
                )
            ),
        ),
        Rule(
            name="mars",
            factory="mars_jax.verify.mars:mars",
            help="also keeps the target's runner-up where its two best tokens are nearly tied",
            lossless=False,
            needs=("draft",),
            paper="2601.15498",
            settings=by_name(
                _BASE,
                Setting(
                    name="margin",
                    kind=str,
                    default="ratio",
                    choices=MARGINS,
                    flag=True,
                    help="what theta bounds",
                ),
                Setting(
                    name="theta",
                    kind=float,
                    default=0.9,
                    by="margin",
                    ranges={
                        "ratio": _share("a number " + _STRICT.format("ratio"), grid=_RATIOS),
                        "gap": Range(
                            "a number above 0 for the margin gap (inf is strict)", 0, above=True, grid=_GAPS
                        ),
                        "prob_ratio": _share("a number " + _STRICT.format("prob_ratio"), grid=_ODDS),
                    },
                    per_row=True,
                    flag=True,
                    help="how near a tie must be; inf never relaxes",
                ),
                _MAX_RELAXED_RUN,
            ),
        ),
        Rule(
            name="learned",
            factory="mars_jax.verify.learned:learned",
            help="also keeps the runner-up where a trained head says that the outcome would not change",
            lossless=False,
            needs=("draft", "weights"),
            paper="after 2501.19309",
            settings=by_name(
                _BASE,
                Setting(
                    name="theta",
                    kind=float,
                    default=0.1,
                    ranges=_share(
                        "a probability, a number above 0 and at most 1, or inf, which is strict", grid=_HARMS
                    ),
                    per_row=True,
                    flag=True,
                    help="chance of another outcome below which a token is relaxed; inf never relaxes",
                ),
                _MAX_RELAXED_RUN,
            ),
        ),
        Rule(
            name="simulated",
            factory="mars_jax.verify.simulated:simulated",
            help="accepts by chance, to size hardware; its text means nothing",
            lossless=False,
            needs=("draft", "long"),
            paper="the rate: 2211.17192, equation 1",
            settings=by_name(
                Setting(
                    name="tau",
                    kind=float,
                    ranges=Range("a number of at least 1, the token that every step gives", 1, 1024),
                    flag=True,
                    per_row=True,
                    help="tokens per target forward, in the mean over steps",
                )
            ),
        ),
    )
}
"""The rules by name."""


def rule(name: str) -> Rule:
    """A row of `RULES`.

    Raises:
      MarsError: there is none of that name.

    >>> rule("exact").lossless
    True
    """
    if name not in RULES:
        near = difflib.get_close_matches(name, RULES, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise MarsError(
            f"there is no rule '{name}'{hint}: choose one of {', '.join(RULES)}, or name your own, as FILE.py:NAME or "
            "package.module:NAME."
        )
    return RULES[name]


def check_setting(rule_name: str, name: str, value: Any, **chosen: Any) -> None:
    """Raise MarsError unless `value` is in the range that the table gives a setting of a rule.

    Args:
      rule_name: of `RULES`.
      name: of the setting.
      value: one value, or an array or a list of one per row; a value that jax is tracing is not looked at.
      chosen: structural choices that the range depends on; default: their defaults.

    >>> check_setting("mars", "theta", 1.5, margin="gap")
    """
    rule(rule_name).check(name, value, **chosen)
