"""Declarations of settings: their names, types, ranges, defaults and descriptions. This module does not import jax.

Tests: tests/test_tables.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mars_jax.utils.errors import MarsError, did_you_mean, short_repr
from mars_jax.utils.limits import BATCH_ROWS, DRAFT_TOKENS, SAMPLES, TOP_LOG_PROBS
from mars_jax.utils.types import JsonObject

LARGEST_INT = 2**31 - 1
"""Largest value of an integer setting. On devices, integers are int32 and other numbers float32."""
LARGEST_FLOAT = 3e38


@dataclasses.dataclass(frozen=True)
class Range:
    """A range of numbers from `low` to `high`, with a description. No range contains NaN.

    >>> share = Range("a number above 0 and at most 1", 0, 1, above=True)
    >>> 1.0 in share, 0.0 in share, math.nan in share
    (True, False, False)
    """

    words: str  # description
    low: float = -math.inf  # minimum
    high: float = math.inf  # maximum
    above: bool = False  # True if `low` is excluded
    inf: bool = False  # True if math.inf is included, even if `high` is finite
    grid: tuple[float, ...] = ()  # values that `calibrate` tries, from strict to loose

    def __contains__(self, value: float) -> bool:
        # Comparisons with NaN are False, so no range contains NaN.
        above_low = value > self.low or (value == self.low and not self.above)
        return above_low and (value <= self.high or (self.inf and value == math.inf))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of a request, a batch or a rule.

    `ranges` is either a single range, or a range for each value of the setting that `by` names. For example, the
    threshold of the rule `mars` has different units for each margin.

    Bools, settings with `choices`, and numbers that are not `per_row` are structural: the compiled program depends on
    them. Numbers that are `per_row` are stored on the device, as one value for all rows or one value per row.
    """

    name: str
    kind: type  # float, int, bool or str
    help: str
    default: Any = None  # None if there is no default
    optional: bool = False
    ranges: Range | Mapping[str, Range] = Range("a number")
    by: str | None = None
    choices: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name -> description
    per_row: bool = False  # True if each row may have a different value
    flag: bool = False  # True if the setting has a command-line flag; others are passed with --rule-option
    word: str | None = None  # description of the default, if the number alone would be unclear

    @property
    def metavar(self) -> str:
        """Placeholder for the value in the help text."""
        return "N" if self.kind is int else "X"

    def range(self, **structural: object) -> Range:
        """Return the range of the setting, given the structural settings on which it may depend."""
        return self.ranges if isinstance(self.ranges, Range) else self.ranges[str(structural[self.by or ""])]

    def expected(self, **structural: object) -> str:
        """Describe the allowed values, for use in messages."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words_by_type = {bool: "true or false", str: "a string"}
        return words_by_type.get(self.kind) or self.range(**structural).words

    @property
    def default_words(self) -> str:
        """Description of the default, for use in the help text."""
        if self.default is None:
            return "none" if self.optional else "must be given"
        return self.word or format(self.default, "g" if self.kind is float else "").lower()

    def check(self, value: Any, *, shown: str | None = None, **structural: object) -> None:
        """Raise MarsError unless `value` is valid. Traced values are not checked.

        Args:
          value: one value, or an array or list with one value per row.
          shown: name of the setting, used in the message. Default: `name`.
          structural: the structural settings on which the range may depend.

        >>> Setting(name="top_k", kind=int, help="", ranges=Range("at least 0", 0), per_row=True).check([0, 5])
        """
        items = _each(value)
        is_sequence = isinstance(value, list | tuple) or getattr(value, "ndim", 0)
        if is_sequence and (self.choices or not self.per_row):
            items = [value]  # a structural setting has only one value
        for item in items:
            if not self._is_valid(item, structural):
                text = f"{item:g}" if type(item) is float else short_repr(item)
                raise self._refusal(text, shown, structural)

    def _refusal(self, text: str, shown: str | None, structural: Mapping[str, object]) -> MarsError:
        suggestion = did_you_mean(text.strip("'"), self.choices)
        return MarsError(
            f"{shown or self.name} is {text}{suggestion}: expected {self.expected(**structural)}."
        )

    def _is_valid(self, value: object, structural: Mapping[str, object]) -> bool:
        if self.choices:
            return isinstance(value, str) and value in self.choices
        if self.kind in (bool, str):
            return isinstance(value, self.kind)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.kind is int and isinstance(value, float) and not value.is_integer():
            return False
        # Python can compare a huge integer with a float but cannot convert it to a float.
        if self.kind is float and isinstance(value, int) and abs(value) > LARGEST_FLOAT:
            return False
        return value in self.range(**structural)

    def from_text(self, text: str, *, shown: str | None = None, **structural: object) -> Any:
        """Parse the text of a command-line flag.

        Raises:
          MarsError: the text cannot be converted to the setting's type, or the value is out of range.

        >>> Setting(name="theta", kind=float, help="").from_text("inf")
        inf
        """
        value: Any = text
        if self.kind is bool:
            value = {"true": True, "false": False}.get(text.lower())
        with contextlib.suppress(ValueError):
            value = self.kind(value) if self.kind in (int, float) else value
        return self._valid(value, text, shown, structural)

    def from_json(self, value: object, **structural: object) -> Any:
        """Convert a JSON value from a prompts file, or an argument of `generate`, to the setting's type.

        Raises:
          MarsError: the value has the wrong type, or is out of range.

        >>> Setting(name="temperature", kind=float, help="").from_json(1)
        1.0
        """
        # JSON may contain 1 for 1.0. Compare types exactly, because a Python bool is an int.
        if self.kind is float and type(value) is int and abs(value) <= LARGEST_FLOAT:
            value = float(value)
        return self._valid(value, short_repr(value), None, structural)

    def _valid(self, value: Any, text: str, shown: str | None, structural: Mapping[str, object]) -> Any:
        if type(value) is not self.kind or not self._is_valid(value, structural):
            raise self._refusal(text, shown, structural)
        return value

    def as_json(self) -> JsonObject:
        """Describe the setting as JSON for `--list-rules --json`. Non-finite numbers become strings."""

        def range_as_json(limits: Range) -> JsonObject:
            low, high = (x if math.isfinite(x) else str(x) for x in (limits.low, limits.high))
            range_ends = {"low": low, "high": high, "low_included": not limits.above}
            return {"expected": limits.words, **range_ends, "inf_included": math.inf in limits}

        entry: JsonObject = {"name": self.name, "type": self.kind.__name__, "default": self.default}
        if self.choices:
            entry["choices"] = dict(self.choices)
        elif self.kind in (float, int):
            if isinstance(self.ranges, Range):
                entry["range"] = range_as_json(self.ranges)
            else:
                ranges = {choice: range_as_json(limits) for choice, limits in self.ranges.items()}
                entry["range_by"] = {"setting": self.by, **ranges}
        return entry | {"per_row": self.per_row, "help": self.help}


def _each(value: Any) -> list[Any]:
    """Flatten an array, list or number into a list of numbers. Return an empty list for a traced value."""
    # Values cannot be traced unless JAX has been imported.
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.core.Tracer):
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return [value]
    part_lengths = {len(part) if isinstance(part, list | tuple) else None for part in value}
    if len(part_lengths) > 1:  # a list of lists with different lengths
        return [value]
    return [item for part in value for item in _each(part)]


def by_name(*settings: Setting) -> dict[str, Setting]:
    """Return a dictionary of settings by name, in the order of the arguments."""
    return {setting.name: setting for setting in settings}


def setting(
    *,
    help: str,
    ranges: Range | Mapping[str, Range] = Range("a number"),
    kind: type | None = None,
    default: Any = dataclasses.MISSING,
    kw_only: bool = True,
    choices: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """Declare a dataclass field that users can set with a flag, in a prompts file or as an argument.

    In a rule, numbers are leaves of the pytree, with one value for all rows or one value per row. Choices and bools are
    static.

    Args:
      help, ranges, default, choices, **options: see `Setting`. A field without a default is required.
      kind: see `Setting`. Default: str if there are choices, the type of the default if it is a bool or an int,
        otherwise float.
      kw_only: True if the field is a keyword-only argument of the constructor.

    Example:
      >>> @dataclasses.dataclass
      ... class Rule:
      ...     theta: float = setting(default=0.9, help="threshold", ranges=Range("0 to 1", 0, 1))
      >>> settings_of(Rule)["theta"].expected()
      '0 to 1'
    """
    if choices:
        kind = str
    elif kind is None:
        kind = type(default) if isinstance(default, bool | int) else float
    is_leaf = kind in (float, int)
    declared_setting = Setting(
        name="",  # `settings_of` sets the name, which is not known yet
        kind=kind,
        help=help,
        default=None if default is dataclasses.MISSING else default,
        ranges=ranges,
        choices=choices or {},
        **{"per_row": is_leaf, **options},
    )
    return dataclasses.field(
        default=default,
        kw_only=kw_only,
        metadata={"pytree_node": is_leaf, "setting": declared_setting},
    )


@functools.cache
def settings_of(cls: type) -> dict[str, Setting]:
    """Return the settings that the fields of a class declare, by name. Inherited settings come last."""
    setting_fields = {f.name: f for f in dataclasses.fields(cls) if "setting" in f.metadata}
    # Take the order from the MRO, which begins with the class itself: `dataclasses.fields` lists inherited fields
    # first.
    ordered_names = [name for owner in cls.__mro__ for name in inspect.get_annotations(owner)]
    return {
        name: dataclasses.replace(setting_fields[name].metadata["setting"], name=name)
        for name in dict.fromkeys(ordered_names)
        if name in setting_fields
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestSettings:
    """The numeric and boolean settings of a request.

    Each field defines a key of prompts files, with its checks and its default. Each field except `strict` also defines
    a flag.
    """

    # sampling temperature; 0 selects greedy decoding
    temperature: float = setting(
        default=0.0,
        ranges=Range("a finite number of at least 0 (0 is greedy)", 0, LARGEST_FLOAT),
        help="sampling temperature, 0 for greedy (default: 0)",
    )
    # sample from this many of the most probable tokens; 0 disables the filter
    top_k: int = setting(
        default=0,
        ranges=Range("a whole number of at least 0 (0 is off)", 0, LARGEST_INT),
        help="sample from the N most probable tokens (default: off)",
    )
    # sample from the most probable tokens up to this total probability; 1 disables the filter
    top_p: float = setting(
        default=1.0,
        ranges=Range("a number above 0 and at most 1 (1 is off)", 0, 1, above=True),
        help="sample from the top X of probability (default: off)",
    )
    # drop tokens below this fraction of the highest probability; 0 disables the filter
    min_p: float = setting(
        default=0.0,
        ranges=Range("a number between 0 and 1 (0 is off)", 0, 1),
        help="drop tokens below X times the highest probability (default: off)",
    )
    # penalty on tokens that occur in the prompt or the completion; 1 disables it
    repetition_penalty: float = setting(
        default=1.0,
        ranges=Range("a finite number above 0 (1 is off)", 0, LARGEST_FLOAT, above=True),
        help="divide positive and multiply negative logits of tokens in the prompt or output by X (default: off)",
    )
    # penalty on tokens that occur in the completion; 0 disables it
    presence_penalty: float = setting(
        default=0.0,
        ranges=Range("a finite number (0 is off)", -LARGEST_FLOAT, LARGEST_FLOAT),
        help="subtract X from the logit of every token that is in the output (default: off)",
    )
    # penalty on a token for each of its occurrences in the completion; 0 disables it
    frequency_penalty: float = setting(
        default=0.0,
        ranges=Range("a finite number (0 is off)", -LARGEST_FLOAT, LARGEST_FLOAT),
        help="subtract X from the logit of a token for every occurrence in the output (default: off)",
    )
    # seed of the request's random numbers; `make_requests` increments it for each request
    seed: int = setting(
        default=0,
        ranges=Range("a whole number from 0 to 4294967295", 0, 2**32 - 1),
        help="prompt i draws with seed N + i (default: 0)",
    )
    # maximum number of tokens in the completion
    max_new_tokens: int = setting(
        default=256,
        ranges=Range("a whole number of at least 1", 1, LARGEST_INT),
        help="maximum number of new tokens per prompt (default: 256)",
    )
    # stop tokens, but not stop strings, are banned until the completion has this many tokens
    min_new_tokens: int = setting(
        default=0,
        ranges=Range("a whole number of at least 0 (0 is off)", 0, LARGEST_INT),
        help="allow stop tokens only after N new tokens (default: off)",
    )
    # True disables relaxed acceptance
    strict: bool = setting(
        default=False,
        per_row=True,
        help="disable the rule's relaxed acceptance",
    )
    # see `Controls.draft_stop`
    draft_stop: float = setting(
        default=math.inf,
        ranges=Range("a number of at least 0 (inf is off)", 0),
        help="stop drafting after a token at which model, eagle, medusa or dflash is unsure: the square root of the "
        "draft's entropy in nats, or a DSpark head's rejection probability, is above X (default: inf, which is off)",
    )


REQUEST = settings_of(RequestSettings)
"""The settings of a request by name, which each row of a prompts file may contain."""
FILTERS = ("top_k", "top_p", "min_p")
"""Names of the settings that filter the tokens to sample from. All of these filters are off by default."""


def _count(name: str, most: int, help: str) -> Setting:
    range_words = f"a whole number from 1 to {most}"
    return Setting(name=name, kind=int, ranges=Range(range_words, 1, most), help=help)


BATCH = by_name(
    _count("batch_size", BATCH_ROWS, "prompts decoded at once (default: 1 to stream, else 8)"),
    _count(
        "num_draft_tokens",
        DRAFT_TOKENS,
        "length of drafted chains (default: 5, or 8 for ngram); at most 3 by default for a mixture of experts; heads "
        "draft a tree by default, or with rejection the longest chain that they can",
    ),
    _count("refine_every", 2**16, "with --refine: number of completions between updates (default: 32)"),
    _count(
        "samples",
        SAMPLES,
        "number of completions of each prompt, one after another; values above 1 require a temperature (default: 1)",
    ),
    _count(
        "top_log_probs",
        TOP_LOG_PROBS,
        "with --json or --output: report the target's N most probable tokens at the position of every token",
    ),
    _count(
        "prefill_chunk",
        2**16,
        "number of prompt tokens that target and draft model read at a time (default: 64 on a CPU, or 256 for long "
        "buffers; 512 on accelerators)",
    ),
)
"""The settings of a batch by name."""
STORED_DTYPES = ("float32", "bfloat16", "int8")
"""Dtypes of keys and values in caches, and of converted weights."""
DTYPES = (*STORED_DTYPES, "int4")
"""Dtypes of weights."""
BITS = {"int8": 8, "int4": 4}
"""Bits per weight of each quantised dtype."""
ATTENTION = ("auto", "xla", "pallas")
"""Implementations of the target's attention that users can select; see `models.language_model`."""


def check_dtype(dtype: str | None, *, shown: str = "dtype", known: Sequence[str] = DTYPES) -> None:
    """Raise MarsError if a dtype of weights or of a cache is unknown. None is valid and selects the default.

    >>> check_dtype("bfloat16")
    """
    if dtype is not None and not (isinstance(dtype, str) and dtype in known):
        raise MarsError(f"{shown} {short_repr(dtype)} is not supported: choose one of {', '.join(known)}.")
