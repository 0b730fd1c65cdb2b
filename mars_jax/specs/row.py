"""Parts of the table of rules: settings that rows share, and two kinds of rows. Does not import jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mars_jax.core.errors import MarsError
from mars_jax.core.settings import LARGEST_FLOAT, LARGEST_INT, Range, Setting, by_name

UNLIMITED_RUN = 1 << 30
"""Default of `max_relaxed_run`: longer than any draft."""
MARGINS = {
    "ratio": "second logit / best > theta",
    "gap": "nats between them < theta",
}
"""Margins that a threshold may bound; `kernels_pallas.MARGINS` computes them."""
NEEDS = {
    "draft": "a draft",
    "q": "the draft's true probabilities",
    "chain": "chains, no trees",
    "weights": "weights of its own, as NAME:PATH",
    "draft_hidden": "hidden states of the draft, if its head reads them",
    "long": "drafts of a fixed length: no ngram, no draft_stop",
}
"""Descriptions of the needs of rules."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleRow:
    """A row of `rules.RULES`, or one made from the signature of a user's factory."""

    name: str
    factory: str  # "module:function"
    help: str
    lossless: bool
    needs: tuple[str, ...] = ()  # keys of NEEDS
    paper: str = ""
    bases: tuple[RuleRow, ...] = ()  # choices of its setting `base`
    settings: Mapping[str, Setting] = dataclasses.field(default_factory=dict)

    @property
    def reader(self) -> str:
        """Reader of a rule with weights, "module:function": (path, target) -> weights, in the module of the factory.

        >>> from mars_jax import specs
        >>> specs.rule("learned").reader
        'mars_jax.contrib.rules.learned:read'
        """
        return self.factory.partition(":")[0] + ":read"

    def options(self, **chosen: Any) -> dict[str, Setting]:
        """Return its settings and those of its base.

        >>> from mars_jax import specs
        >>> list(specs.rule("mars").options(base="rejection"))
        ['base', 'margin', 'theta', 'max_relaxed_run', 'exact_prefix', 'block']
        """
        merged = dict(self.settings)
        for base in self.bases:
            if base.name == chosen.get("base", merged["base"].default):
                merged |= {k: v for k, v in base.settings.items() if k not in merged}
        return merged

    def setting(self, name: str, **chosen: Any) -> Setting:
        """Return one of `options`.

        Raises:
          MarsError: there is no setting of that name.
        """
        options = self.options(**chosen)
        if name not in options:
            available = f"it has {', '.join(options)}" if options else "it has none"
            raise MarsError(f"the rule {self.name} has no setting '{name}': {available}.")
        return options[name]

    def check(self, name: str, value: Any, **chosen: Any) -> None:
        """Raise MarsError unless `value` is in the range of a setting; see `Setting.check`.

        >>> from mars_jax import specs
        >>> specs.rule("mars").check("theta", [0.8, float("inf")], margin="ratio")
        """
        structure = self._structure(chosen)
        self.setting(name, **chosen).check(value, **structure)

    def _structure(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return its structural choices, with defaults for those not in `chosen`."""
        for name in self.settings.keys() & chosen.keys():
            self.settings[name].check(chosen[name])
        return {name: s.default for name, s in self.settings.items() if s.choices} | dict(chosen)

    def settle(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings: the given ones, checked, and the defaults of the others.

        Raises:
          MarsError: an unknown name, a value out of range, or a setting that must be given and is not.

        >>> from mars_jax import specs
        >>> specs.rule("mars").settle({"theta": 0.8})["margin"]
        'ratio'
        """
        # Check choices first, because they determine the other settings and their ranges.
        choices = {name: given[name] for name, s in self.settings.items() if s.choices and name in given}
        for name, value in choices.items():
            self.settings[name].check(value)
        for name, value in given.items():
            self.check(name, value, **choices)
        settled = {name: s.default for name, s in self.options(**choices).items()} | dict(given)
        for name, value in settled.items():
            setting = self.setting(name, **choices)
            if value is None and not setting.optional:
                expected = setting.expected(**self._structure(choices))
                raise MarsError(f"the rule {self.name} needs a {name}: give {expected}.")
        return settled

    def as_json(self) -> dict[str, Any]:
        """Return the row for `--list-rules --json`."""
        return {
            "name": self.name,
            "help": self.help,
            "lossless": self.lossless,
            "needs": list(self.needs),
            "paper": self.paper or None,
            "factory": self.factory,
            "settings": [s.as_json() for s in self.settings.values()],
        }


def number(name: str, default: float | None, ranges: Any, help: str, **more: Any) -> Setting:
    """Make a numeric setting, one for all prompts or one for each; `ranges` and `more` as in `Setting`."""
    return Setting(
        name=name, default=default, ranges=ranges, help=help, **{"kind": float, "per_row": True, **more}
    )


def share(words: str, grid: tuple[float, ...]) -> Range:
    """Return the range (0, 1] and inf."""
    return Range(words, 0, 1, above=True, inf=True, grid=grid)


def nats(words: str, grid: tuple[float, ...]) -> Range:
    """Return the range of finite numbers of at least 0."""
    return Range(words, 0, LARGEST_FLOAT, grid=grid)


# Thresholds that `calibrate` and `benchmark` try, from strict to loose.
RATIOS = (0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.86, 0.84, 0.82, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
ODDS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.01)
HARMS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
NATS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0)
WHOLE = Range("a whole number of at least 0", 0, LARGEST_INT)


BASE = Setting(
    name="base",
    kind=str,
    default="exact",
    choices={"exact": "what the target would say", "rejection": "speculative sampling"},
    flag=True,
    help="the strict rule that is relaxed",
)
BLOCK = Setting(
    name="block", kind=bool, default=False, flag=True, help="by whole blocks, not by tokens; chains only"
)
MAX_RELAXED_RUN = number(
    "max_relaxed_run",
    UNLIMITED_RUN,
    Range("a whole number of at least 0", 0, LARGEST_INT),
    "relaxed tokens in a row that are allowed",
    kind=int,
    word="any",
    flag=True,
    metavar="N",
)
EXACT_PREFIX = number(
    "exact_prefix",
    0,
    Range("a whole number of at least 0", 0, LARGEST_INT),
    "tokens at the start of each answer that are verified strictly",
    kind=int,
    flag=True,
    metavar="N",
)

EXACT = RuleRow(
    name="exact",
    factory="mars_jax.verify.exact:exact",
    help="keeps what the target itself would say",
    lossless=True,
)
REJECTION = RuleRow(
    name="rejection",
    factory="mars_jax.verify.rejection:rejection",
    help="speculative sampling with the draft's true probabilities",
    lossless=True,
    needs=("draft", "q"),
    paper="2211.17192, 2302.01318; siblings: 2305.09781; block: 2403.10444",
    settings=by_name(BLOCK),
)


def edges(
    name: str,
    help: str,
    paper: str,
    *settings: Setting,
    base: Setting | None = BASE,
    needs: tuple[str, ...] = (),
    home: str = "mars_jax.verify",
) -> RuleRow:
    """Make the row of a rule that relaxes edges of a strict base; if `base` is None, only of `exact`."""
    return RuleRow(
        name=name,
        factory=f"{home}.{name}:{name}",
        help=help,
        lossless=False,
        needs=("draft", *needs),
        paper=paper,
        bases=() if base is None else (EXACT, REJECTION),
        settings=by_name(*(() if base is None else (base,)), *settings, MAX_RELAXED_RUN, EXACT_PREFIX),
    )


def distributions(
    name: str,
    help: str,
    paper: str,
    *settings: Setting,
    chain: bool = False,
    needs: tuple[str, ...] = (),
    home: str = "mars_jax.verify",
) -> RuleRow:
    """Make the row of a rule that verifies a changed target distribution by rejection; `chain`: only on chains."""
    return RuleRow(
        name=name,
        factory=f"{home}.{name}:{name}",
        help=help,
        lossless=False,
        needs=("draft", "q", *(("chain",) if chain else ()), *needs),
        paper=paper,
        settings=by_name(*settings, EXACT_PREFIX),
    )
