"""The bundles that a kernel executes: its scalar program, carried out.

A Pallas kernel is one loop over its grid, and parts of it run in some turns only, such as the first. Its counters say
which, and those follow from constants: all scalars are known but for what is read from memory. A branch on one that is
not known falls through, so a loop whose end was read runs once.

Oracle: tests/lab/planning/test_walk.py, on schedules that libtpu wrote.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from kernels_pallas.blocks import LANES
from mars_jax.lab.planning.bundles import BRANCH_DELAY, Routine, unknown

_MOST = 1 << 22
"""Bundles that are carried out at most."""


def _signed(x: int) -> int:
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "sadd.s32": operator.add,
    "ssub.s32": operator.sub,
    "smul.u32": operator.mul,
    "smin.u32": lambda a, b: min(a % (1 << 32), b % (1 << 32)),
    "smax.u32": lambda a, b: max(a % (1 << 32), b % (1 << 32)),
    "sand.u32": operator.and_,
    "sor.u32": operator.or_,
    "sxor.u32": operator.xor,
    "sshll.u32": lambda a, b: a << (b & 31),
    "sshrl.u32": lambda a, b: a % (1 << 32) >> (b & 31),
    "sshra.s32": lambda a, b: a >> (b & 31),
    "por": operator.or_,
    "pand": operator.and_,
    "pnand": lambda a, b: 1 - (a & b),
    "pneg": lambda a: 1 - a,
} | {f"scmp.{name}.s32.totalorder": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def executed(routine: Routine, table: Sequence[Sequence[int]] = ()) -> int:
    """Return how many bundles a kernel executes.

    Args:
      routine: the kernel's.
      table: the rows of the numbers that are brought into scalar memory before the grid begins; of up to 128 each.

    Raises:
      MarsError: they are too many to be carried out.
    """
    bundles = [_statements(bundle) for bundle in routine.bundles]
    starts: dict[str, int] = {}
    for k, bundle in enumerate(routine.bundles):
        for region in re.findall(r"(?:Start|Start/End empty) region (\d+)", bundle):
            starts.setdefault(region, k)
    values: dict[str, int | None] = {}
    memory: dict[int | None, int | None] = {}
    looped: set[int] = set()  # the beginnings of loops that are in a turn after their first
    count, at, jump = 0, 0, (-1, -1)  # a jump: the bundle after which it is made, and its aim
    while at < len(bundles):
        count += 1
        for kind, name, operands in bundles[at]:
            if kind == "sbr.rel":
                aim = starts.get(operands[1])
                taken = _read(values, operands[0])
                if aim is not None and taken:
                    jump = at + BRANCH_DELAY, aim
                if aim is not None and aim <= at:
                    (looped.add if taken else looped.discard)(aim)
            elif kind == "sst":
                memory[_address(values, name)] = _read(values, operands[0])
            elif kind == "sld":
                place = _address(values, operands[0])
                values[name] = None if place is None else memory.get(place)
            elif kind == "dma":
                place = _read(values, operands[0])
                if place is not None:
                    memory |= {
                        place + LANES * i + k: x for i, row in enumerate(table) for k, x in enumerate(row)
                    }
            elif kind == "sphi":
                values[name] = _read(values, operands[at in looped])
            else:
                values[name] = _computed(kind, [_read(values, text) for text in operands])
        if count == _MOST:
            raise unknown("a kernel does not end")
        at, jump = (jump[1], (-1, -1)) if at == jump[0] else (at + 1, jump)
    return count


def _computed(kind: str, operands: list[int | None]) -> int | None:
    if kind == "smov" and len(operands) == 1:
        return operands[0]
    if kind in ("smov", "scalar_select"):  # a predicate, and what holds where it is true and where not
        return None if operands[0] is None else operands[1 if operands[0] else 2]
    if kind not in _OPERATIONS or None in operands:
        # Of two predicates one may be enough.
        known = {"por": 1, "pand": 0, "pnand": 0}.get(kind)
        return (1 if kind == "pnand" else known) if known is not None and known in operands else None
    return _signed(int(_OPERATIONS[kind](*operands)))


def _address(values: dict[str, int | None], text: str) -> int | None:
    """Return the place in scalar memory that a sum names."""
    if text.endswith("_spill"):
        return -int(re.sub(r"\D", "", text))
    parts = [_read(values, part.strip(" $")) for part in text.split("+")]
    return None if None in parts else sum(part for part in parts if part is not None)


def _read(values: dict[str, int | None], text: str) -> int | None:
    if place := re.fullmatch(r"\[?#allocation(\d+)\]?", text):
        return int(place[1]) << 18  # far from one another
    if text.startswith("!"):
        found = _read(values, text[1:])
        return None if found is None else 1 - found
    if text.startswith("%"):
        return values.get(text[1:])
    return _signed(int(text, 0)) if re.fullmatch(r"-?(?:0x[0-9a-f]+|\d+)", text) else None


def _statements(bundle: str) -> list[tuple[str, str, list[str]]]:
    """The scalar statements of a bundle as operation, name of the result, and operands; those of loops first."""
    found = []
    for text in re.sub(r"/\*.*?\*/", "", bundle, flags=re.S).strip(" {}\n").split(";;"):
        text = text.strip(" {}\n")
        if branch := re.match(r"%\w+ = sbr\.rel (?:\((!?%\w+)\) )?target = \$region(\d+)", text):
            found.append(("sbr.rel", "", [branch[1] or "1", branch[2]]))
        elif stored := re.match(r"%\w+ = sst \[smem:\[([^]]*)\]\] (?:\([^)]*\), )?(%\w+)", text):
            found.append(("sst", stored[1], [stored[2]]))
        elif moved := re.match(
            r"%\w+ = dma\.\w+_to_smem .*?(%\w+|\[#allocation\d+\]), \[#allocation\d+\]$", text, re.S
        ):
            found.append(("dma", "", [moved[1]]))
        elif loaded := re.match(r"%(\w+) = sld \[smem:\[([^]]*)\]\]", text):
            found.append(("sld", loaded[1], [loaded[2]]))
        elif made := re.match(r"%(\w+) = (s\w+(?:\.\w+)*|p\w+) (.*)", text, re.S):
            name, kind, rest = made.groups()
            if kind == "smov":  # `(p, a), b`: b where p holds, else a
                rest = re.sub(r"\((!?%\w+), ([^)]*)\), (.*)", r"\1, \3, \2", rest)
            rest = re.sub(
                r"^\(!?%\w+\), ", "", rest
            )  # a predicate of the whole: it is needed there or nowhere
            found.append((kind, name, [part.strip() for part in rest.split(",")]))
    return sorted(found, key=lambda statement: statement[0] != "sphi")
