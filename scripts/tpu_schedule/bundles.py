"""Final schedules dumped by libtpu, with one VLIW bundle per line. Without stalls, a bundle takes one cycle of the
core.

libtpu writes a file for the whole program, `...-TLP-NN-final_bundles.txt`, which mostly calls routines, and a file for
each routine, named after the first HLO instruction that calls it.

`Routine.executed` interprets the scalar instructions of a routine, so that a loop counts once per iteration and a
predicated region counts only if it runs. Values that are read from memory are unknown, unless the routine has stored
them there. A branch on an unknown value is not taken, so a loop with an unknown end, such as the attention kernel's
loop over cache blocks, runs once.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

LIBTPU_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
)
"""Value of LIBTPU_INIT_ARGS, which libtpu reads when it is loaded."""
BRANCH_DELAY = 4
"""Number of bundles after a branch that still run before the jump."""
MOST_BUNDLES = 1 << 22

# Each bundle is preceded by an address, sometimes a label (LB: loop body, PF: fall through, ...), and one '>' for each
# enclosing loop.
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*>*\s*(\{)", re.M)


@dataclasses.dataclass(frozen=True, eq=False)
class Routine:
    """The bundles of one file, in the order of their addresses."""

    bundles: list[str]

    def calls(self) -> list[tuple[str, int]]:
        """Return the called HLO instructions, each with the number of bundles since the previous call."""
        calls, since = [], 0
        for bundle in self.bundles:
            since += 1
            call = re.search(r"= \w*call (.*)", bundle, re.S)
            if call and not call[1].startswith("/* <late-"):
                instruction = re.search(r"/\* %([\w.\-]+) = ", call[1])
                if instruction is None:
                    raise ValueError(f"a call does not name its instruction: {bundle.strip()[:80]}")
                calls.append((instruction[1], since))
                since = 0
        return calls

    @functools.cached_property
    def executed(self) -> int:
        """Number of executed bundles.

        Raises:
          ValueError: the routine does not end within `MOST_BUNDLES` bundles.
        """
        return _Interpreter(self).run()


class Schedule(NamedTuple):
    """The schedule of one program."""

    top: Routine
    # Keyed by the name of the HLO instruction, which is part of the file's name.
    routines: dict[str, Routine]


def parse(text: str) -> Routine:
    """Parse the text of a `final_bundles` file."""
    matches = list(_BUNDLE.finditer(text))
    ends = [match.start() for match in matches[1:]] + [len(text)]
    return Routine([text[match.start(1) : end] for match, end in zip(matches, ends, strict=True)])


def read(folder: Path) -> Schedule:
    """Read the schedule of the program in a folder, or of the longest program if there are several.

    Raises:
      FileNotFoundError: the folder contains no schedule.
    """
    tops, routines = [], {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        match = re.match(r"\d+-(.+)-\d+-final_bundles\.txt$", path.name)
        if match is None or match[1].endswith("schedule-analysis_final_bundles"):
            continue
        if match[1] == "TLP":
            tops.append(path)
        elif not match[1].startswith("<"):
            routines[match[1]] = parse(path.read_text())
    if not tops:
        raise FileNotFoundError(f"no *-TLP-*-final_bundles.txt in {folder}")
    longest = max(tops, key=lambda path: path.stat().st_size)
    return Schedule(parse(longest.read_text()), routines)


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


class _Statement(NamedTuple):
    operation: str
    result: str
    operands: list[str]


class _Interpreter:
    def __init__(self, routine: Routine):
        self.bundles = [_statements(bundle) for bundle in routine.bundles]
        self.regions: dict[str, int] = {}
        for k, bundle in enumerate(routine.bundles):
            for region in re.findall(r"(?:Start|Start/End empty) region (\d+)", bundle):
                self.regions.setdefault(region, k)
        self.registers: dict[str, int | None] = {}
        self.memory: dict[int | None, int | None] = {}
        # Position of the first bundle of each running loop that has completed its first iteration.
        self.looped: set[int] = set()

    def run(self) -> int:
        count, position = 0, 0
        jump_at, jump_to = -1, -1
        while position < len(self.bundles):
            count += 1
            if count == MOST_BUNDLES:
                raise ValueError("a routine does not end")
            for statement in self.bundles[position]:
                if statement.operation == "sbr.rel":
                    destination = self._branch(statement, position)
                    if destination is not None:
                        jump_at, jump_to = position + BRANCH_DELAY, destination
                else:
                    self._execute(statement, position)
            if position == jump_at:
                position, jump_at = jump_to, -1
            else:
                position += 1
        return count

    def _branch(self, statement: _Statement, position: int) -> int | None:
        """Return the target bundle of a branch, or None if the branch is not taken."""
        destination = self.regions.get(statement.operands[1])
        is_taken = bool(self._value(statement.operands[0]))
        if destination is not None and destination <= position:
            (self.looped.add if is_taken else self.looped.discard)(destination)
        return destination if is_taken else None

    def _execute(self, statement: _Statement, position: int) -> None:
        operation, result, operands = statement
        if operation == "sst":
            self.memory[self._address(result)] = self._value(operands[0])
        elif operation == "sld":
            address = self._address(operands[0])
            self.registers[result] = None if address is None else self.memory.get(address)
        elif operation == "sphi":
            self.registers[result] = self._value(operands[position in self.looped])
        else:
            self.registers[result] = _compute(operation, [self._value(text) for text in operands])

    def _address(self, text: str) -> int | None:
        """Return the value of a scalar memory address, which is a sum of terms, or None if a term is unknown."""
        if text.endswith("_spill"):
            return -int(re.sub(r"\D", "", text))
        total = 0
        for part in text.split("+"):
            value = self._value(part.strip(" $"))
            if value is None:
                return None
            total += value
        return total

    def _value(self, text: str) -> int | None:
        if allocation := re.fullmatch(r"\[?#allocation(\d+)\]?", text):
            # Place allocations far apart in the simulated memory, so that their addresses do not overlap.
            return int(allocation[1]) << 18
        if text.startswith("!"):
            value = self._value(text[1:])
            return None if value is None else 1 - value
        if text.startswith("%"):
            return self.registers.get(text[1:])
        return _signed(int(text, 0)) if re.fullmatch(r"-?(?:0x[0-9a-f]+|\d+)", text) else None


def _compute(operation: str, operands: list[int | None]) -> int | None:
    if operation == "smov" and len(operands) == 1:
        return operands[0]
    if operation in ("smov", "scalar_select"):
        # The operands are a predicate, the value if it is true, and the value if it is false.
        return None if operands[0] is None else operands[1 if operands[0] else 2]
    if operation not in _OPERATIONS:
        return None
    if None in operands:
        # One known operand may be enough to determine the result.
        deciding = {"por": 1, "pand": 0, "pnand": 0}.get(operation)
        if deciding is None or deciding not in operands:
            return None
        return 1 if operation == "pnand" else deciding
    return _signed(int(_OPERATIONS[operation](*operands)))


def _statements(bundle: str) -> list[_Statement]:
    """Return the scalar statements of a bundle. Phi statements, which begin a loop, come first."""
    statements = []
    for text in re.sub(r"/\*.*?\*/", "", bundle, flags=re.S).strip(" {}\n").split(";;"):
        text = text.strip(" {}\n")
        if branch := re.match(r"%\w+ = sbr\.rel (?:\((!?%\w+)\) )?target = \$region(\d+)", text):
            statements.append(_Statement("sbr.rel", "", [branch[1] or "1", branch[2]]))
        elif stored := re.match(r"%\w+ = sst \[smem:\[([^]]*)\]\] (?:\([^)]*\), )?(%\w+)", text):
            statements.append(_Statement("sst", stored[1], [stored[2]]))
        elif loaded := re.match(r"%(\w+) = sld \[smem:\[([^]]*)\]\]", text):
            statements.append(_Statement("sld", loaded[1], [loaded[2]]))
        elif computed := re.match(r"%(\w+) = (s\w+(?:\.\w+)*|p\w+) (.*)", text, re.S):
            result, operation, operands = computed.groups()
            if operation == "smov":
                # `(p, a), b` means b if p holds, else a.
                operands = re.sub(r"\((!?%\w+), ([^)]*)\), (.*)", r"\1, \3, \2", operands)
            # Remove a predicate that applies to the whole statement: the result is used only if the predicate holds.
            operands = re.sub(r"^\(!?%\w+\), ", "", operands)
            statements.append(_Statement(operation, result, [part.strip() for part in operands.split(",")]))
    return sorted(statements, key=lambda statement: statement.operation != "sphi")
