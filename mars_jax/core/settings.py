"""Settings as data: a name with its type, its range, its default, and all of them in words. Nothing here imports jax.

Oracle: tests/test_specs.py.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

from mars_jax.core.errors import MarsError, did_you_mean, short_repr

LARGEST_INT = 2**31 - 1
"""Settings travel as int32 and float32."""
LARGEST_FLOAT = 3e38


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, and what they are in words. NaN is in none.

    >>> share = Range("a number above 0 and at most 1", 0, 1, above=True)
    >>> 1.0 in share, 0.0 in share, math.nan in share
    (True, False, False)
    """

    words: str
    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # `low` itself is not in it
    inf: bool = False  # math.inf is in it, whatever `high` says
    grid: tuple[float, ...] = ()  # values worth trying, from strict to loose

    def __contains__(self, value: Any) -> bool:
        # A comparison with NaN is False, so every range refuses it.
        reached = self.low < value if self.above else self.low <= value
        return reached and (value <= self.high or (self.inf and value == math.inf))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting: of a request, or of a rule.

    `ranges` is one range, or one for each value of the choice `by`: the threshold of mars means something else for each
    margin. A setting with `choices`, and every bool, is structural: it decides what is compiled; so does a number that
    is not `per_row`. Numbers that are `per_row` are values on the device, one for all rows or one for each.
    """

    name: str
    kind: type  # float, int, bool or str
    help: str
    default: Any = None  # None: it must be given, unless it is optional
    optional: bool = False
    ranges: Range | Mapping[str, Range] = Range("a number")
    by: str | None = None
    choices: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by name, what each means
    per_row: bool = False  # a row of a prompts file may choose its own
    flag: bool = False  # has a flag of its own on command lines; the others are given by --rule-option
    metavar: str = "X"
    word: str | None = None  # of the default, where the number itself says little

    def range(self, **chosen: Any) -> Range:
        """The range under the structural choices of a rule."""
        return self.ranges if isinstance(self.ranges, Range) else self.ranges[chosen[self.by or ""]]

    def expected(self, **chosen: Any) -> str:
        """The allowed values, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "true or false"
        return "a text" if self.kind is str else self.range(**chosen).words

    @property
    def default_words(self) -> str:
        """The default, in words."""
        if self.default is None:
            return "none" if self.optional else "must be given"
        return self.word or (f"{self.default:g}" if self.kind is float else str(self.default).lower())

    def check(self, value: Any, *, shown: str | None = None, **chosen: Any) -> None:
        """Raise MarsError unless `value` is in range: a number, a choice, or an array or a list of them, one per row.

        A value that jax is tracing is not looked at.

        Args:
          value: to check.
          shown: how the setting is called in the message; default: by its name.
          chosen: the structural choices that ranges depend on.

        >>> Setting(name="top_k", kind=int, help="", ranges=Range("at least 0", 0), per_row=True).check([0, 5])
        """
        # A setting that decides the structure has one value for all rows.
        single = bool(self.choices) or not self.per_row
        several = isinstance(value, list | tuple) or getattr(value, "ndim", 0)
        for one in [value] if single and several else _each(value):
            if not self._holds(one, chosen):
                text = f"{one:g}" if type(one) is float else short_repr(one)
                suggestion = did_you_mean(one if isinstance(one, str) else short_repr(one), self.choices)
                raise MarsError(
                    f"{shown or self.name} is {text}{suggestion}: expected {self.expected(**chosen)}."
                )

    def _holds(self, value: Any, chosen: Mapping[str, Any]) -> bool:
        if self.choices:
            return isinstance(value, str) and value in self.choices
        if self.kind in (bool, str):
            return isinstance(value, self.kind)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.kind is int and isinstance(value, float) and not value.is_integer():
            return False
        if self.kind is float and isinstance(value, int) and abs(value) > LARGEST_FLOAT:
            return False
        return value in self.range(**chosen)

    def from_text(self, text: str, *, shown: str | None = None, **chosen: Any) -> Any:
        """The value that a flag's text names.

        Raises:
          MarsError: not of the setting's type, or out of range.

        >>> Setting(name="theta", kind=float, help="").from_text("inf")
        inf
        """
        value: Any
        if self.kind is bool:
            value = {"true": True, "false": False}.get(text.lower())
        else:
            try:
                value = self.kind(text)
            except ValueError:
                value = None
        if value is None or not self._holds(value, chosen):
            near = did_you_mean(text, self.choices)
            raise MarsError(f"{shown or self.name} is {text}{near}: expected {self.expected(**chosen)}.")
        return value

    def from_json(self, value: Any, **chosen: Any) -> Any:
        """The value of a key in a row of a prompts file, or of an option of `generate`, in the setting's type.

        Raises:
          MarsError: of another type, or out of range.

        >>> Setting(name="temperature", kind=float, help="").from_json(1)
        1.0
        """
        # JSON writes 1.0 as 1; but true is no number, though Python's bool is an int.
        if self.kind is float and type(value) is int and abs(value) <= LARGEST_FLOAT:
            value = float(value)
        if type(value) is not self.kind or not self._holds(value, chosen):
            raise MarsError(f"{self.name} is {short_repr(value)}: expected {self.expected(**chosen)}.")
        return value

    def as_json(self) -> dict[str, Any]:
        """For `--list-rules --json`: numbers that are not finite as texts."""

        def plain(found: Range) -> dict[str, Any]:
            ends = {"low": found.low, "high": found.high}
            return {
                "expected": found.words,
                **{k: v if math.isfinite(v) else str(v) for k, v in ends.items()},
                "low_included": not found.above,
                "inf_included": math.inf in found,
            }

        made: dict[str, Any] = {"name": self.name, "type": self.kind.__name__, "default": self.default}
        if self.choices:
            made["choices"] = dict(self.choices)
        elif self.kind in (float, int):
            if isinstance(self.ranges, Range):
                made["range"] = plain(self.ranges)
            else:
                made["range_by"] = {"setting": self.by, **{k: plain(r) for k, r in self.ranges.items()}}
        return made | {"per_row": self.per_row, "help": self.help}


def _each(value: Any) -> list[Any]:
    """Return the numbers in an array or a list, or one number; none of a value that jax is tracing."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.core.Tracer):
        return []
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        return [value]
    lengths = {len(part) if isinstance(part, list | tuple) else None for part in value}
    if len(lengths) > 1:  # ragged lists, which are no array
        return [value]
    return [one for part in value for one in _each(part)]


def by_name(*settings: Setting) -> dict[str, Setting]:
    """Settings by their names, in their order."""
    return {setting.name: setting for setting in settings}


CONTROLS = by_name(
    Setting(
        name="temperature",
        kind=float,
        default=0.0,
        ranges=Range("a finite number of at least 0 (0 is greedy)", 0, LARGEST_FLOAT),
        per_row=True,
        help="0 is greedy (default: 0)",
    ),
    Setting(
        name="top_k",
        kind=int,
        default=0,
        ranges=Range("a whole number of at least 0 (0 is off)", 0, LARGEST_INT),
        per_row=True,
        metavar="N",
        help="sample among the N best tokens (default: off)",
    ),
    Setting(
        name="top_p",
        kind=float,
        default=1.0,
        ranges=Range("a number above 0 and at most 1 (1 is off)", 0, 1, above=True),
        per_row=True,
        help="sample among the top X of probability (default: off)",
    ),
    Setting(
        name="min_p",
        kind=float,
        default=0.0,
        ranges=Range("a number between 0 and 1 (0 is off)", 0, 1),
        per_row=True,
        help="drop tokens below X times the best probability (default: off)",
    ),
    Setting(name="strict", kind=bool, default=False, per_row=True, help="switch the rule's relaxation off"),
    Setting(
        name="draft_stop",
        kind=float,
        default=math.inf,
        ranges=Range("a number of at least 0 (inf is off)", 0),
        per_row=True,
        help="draft nothing after a token where a model, eagle, medusa or dflash is unsure: where the square root of "
        "its entropy in nats, or a DSpark head's chance of a rejection, is above X (default: inf, which is off)",
    ),
)
"""The numbers and switches of `Controls`, each of which a request chooses for itself."""

EDITS = by_name(
    Setting(
        name="repetition_penalty",
        kind=float,
        default=1.0,
        ranges=Range("a finite number above 0 (1 is off)", 0, LARGEST_FLOAT, above=True),
        per_row=True,
        help="divide positive and multiply negative logits of tokens that are in prompt or text by X (default: off)",
    ),
    Setting(
        name="presence_penalty",
        kind=float,
        default=0.0,
        ranges=Range("a finite number (0 is off)", -LARGEST_FLOAT, LARGEST_FLOAT),
        per_row=True,
        help="take X from the logit of every token that is in the new text (default: off)",
    ),
    Setting(
        name="frequency_penalty",
        kind=float,
        default=0.0,
        ranges=Range("a finite number (0 is off)", -LARGEST_FLOAT, LARGEST_FLOAT),
        per_row=True,
        help="take X from the logit of a token for every time that it is in the new text (default: off)",
    ),
)
"""The numbers of `edits.Edits`, which change the target's logits."""
