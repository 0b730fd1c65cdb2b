"""Hypothesis strategies that damage valid input: JSON values in their leaves and keys, files in their bytes."""

import copy
import json
import math
import struct
from typing import Any, NamedTuple

from hypothesis import strategies as st


class Raw(NamedTuple):
    """JSON that no Python value represents, such as lists nested 100,000 deep."""

    text: str


class Twice(NamedTuple):
    """The values of a key that occurs twice in an object."""

    first: Any
    second: Any


NUMBERS = (
    *(0, -1, 1, 2, 3, 7, 2**16, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**9, 10**30, 10**400),
    *(0.0, -0.0, 0.5, -0.5, 1e-320, 1e308, math.inf, -math.inf, math.nan),
)  # fmt: skip
TEXTS = (
    *("", "0", "1", "x", "true", "null", "inf", "nan", "-1", "1e999", "\0", "\n", "a\r\nb", "\ud800", "é\u2028\u202e"),
    *("../../etc/passwd", "/etc/passwd", "..", ".", "~", "a" * 300, "{{", "%s", "\x1b[31m"),
)  # fmt: skip
DEEP = [Raw(b * n + "1" + e * n) for n in (100, 900, 980, 100_000) for b, e in (("[", "]"), ('{"a":', "}"))]
HOSTILE = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from((None, True, False)),
    st.sampled_from(((), (None,), ((),), (1, 1, 1), (-1,), ("",), (math.nan,))).map(list),
    st.sampled_from(({}, {"": None}, {"a": {}}, {"type": "x"})).map(dict),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)
"""Values that are invalid in most places, or valid but extreme."""
_RAW = st.sampled_from((*DEEP, Raw("1e999"), Raw("-"), Raw("0x1")))
HOSTILE_JSON = st.one_of(HOSTILE, HOSTILE, HOSTILE, _RAW)


def paths(value: Any, prefix: tuple = ()) -> list[tuple]:
    """Return the paths of all parts of a JSON value, including the value itself."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix, *(path for key, part in inside for path in paths(part, (*prefix, key)))]


@st.composite
def damaged(draw: st.DrawFn, value: Any, *, max_edits: int = 3) -> Any:
    """Replace, remove or add up to `max_edits` leaves, keys or lists of a JSON value."""
    edited = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, max_edits))):
        candidates = [path for path in paths(edited) if path]
        if not candidates:
            return draw(HOSTILE_JSON)
        *parents, key = draw(st.sampled_from(candidates))
        holder = edited
        for step in parents:
            holder = holder[step]
        edit = draw(st.sampled_from(("put", "put", "put", "drop", "wrap", "twice", "rename", "add")))
        if edit == "put":
            holder[key] = draw(HOSTILE_JSON)
        elif edit == "drop":
            del holder[key]
        elif edit == "wrap":
            holder[key] = draw(st.sampled_from(([holder[key]], {"a": holder[key]}, [holder[key]] * 3)))
        elif edit == "twice" and isinstance(holder, dict):
            holder[key] = Twice(holder[key], draw(HOSTILE_JSON))
        elif isinstance(holder, dict):
            name = draw(st.sampled_from(TEXTS))
            holder[name] = holder.pop(key) if edit == "rename" else draw(HOSTILE_JSON)
    return edited


def to_text(value: Any) -> str:
    """Return the value as JSON, with `Raw` and `Twice`."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        parts = []
        for key, entry in value.items():
            for occurrence in entry if isinstance(entry, Twice) else (entry,):
                parts.append(f"{json.dumps(str(key))}: {to_text(occurrence)}")
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_text, value)) + "]"
    return json.dumps(value)


def damaged_json(value: Any, *, max_edits: int = 3) -> st.SearchStrategy[bytes]:
    """Return the bytes of a JSON file of a damaged `value`, or of `value` with damaged bytes."""
    text = damaged(value, max_edits=max_edits).map(lambda edited: to_text(edited).encode())
    return st.one_of(text, text, text, damaged_bytes(json.dumps(value).encode()))


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes, *, last: int | None = None) -> bytes:
    """Return a file with some bytes flipped, cut off, inserted, duplicated or overwritten by large numbers.

    Damage begins before the byte `last`; by default anywhere.
    """
    edited = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        end = min(len(edited), len(data) if last is None else last)
        if end == 0:
            break
        start = draw(st.integers(0, end - 1))
        edit = draw(st.sampled_from(("flip", "flip", "number", "number", "cut", "drop", "put", "double")))
        if edit == "flip":
            edited[start] ^= 1 << draw(st.integers(0, 7))
        elif edit == "number":
            number = draw(st.sampled_from((0, 1, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)))
            width = draw(st.sampled_from(("<B", "<I", "<Q")))
            packed = struct.pack(width, number % (1 << 8 * struct.calcsize(width)))
            edited[start : start + len(packed)] = packed
        elif edit == "cut":
            del edited[start:]
        elif edit == "drop":
            del edited[start : start + draw(st.integers(1, 64))]
        elif edit == "put":
            edited[start:start] = draw(st.binary(min_size=1, max_size=16))
        else:
            edited[start:start] = edited[start : start + draw(st.integers(1, 64))]
    return bytes(edited)
