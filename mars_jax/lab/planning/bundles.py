"""The final schedules that libtpu dumps: a line is a bundle, and a bundle is a cycle of the core without stalls.

A program is dumped in several files: one of the whole, `...-TLP-NN-final_bundles.txt`, in which most instructions are
calls, and one for each routine that is called, named after the first HLO instruction that calls it. A call is an
`inlined_call`, or a `call` in programs that are too long to be inlined.

Oracle: tests/lab/planning/test_bundles.py, on schedules that libtpu wrote.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from mars_jax.core.errors import MarsError

LIBTPU_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
)
"""For the environment variable LIBTPU_INIT_ARGS, before libtpu is loaded: the final schedules, and no other pass."""

# A bundle's address, its label (LB: loop body, PF: fall through, ...), the depth of its loop as so many '>', its text.
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*(>*)\s*\{", re.M)
BRANCH_DELAY = 4  # bundles after a branch, which run before it jumps


@dataclasses.dataclass(frozen=True)
class Loop:
    """The bundles first .. last, run `trips` times; None where the schedule does not say."""

    first: int
    last: int
    trips: int | None


@dataclasses.dataclass(frozen=True)
class Routine:
    """One file: its bundles in the order of their addresses."""

    bundles: list[str]
    loops: list[Loop]

    @property
    def executed(self) -> int:
        """Bundles that run, by the trip counts: predicated regions as if they always ran, loops without a known count
        once."""
        return sum(self.times())

    def times(self) -> list[int]:
        """The number of runs of each bundle."""
        times = [1] * len(self.bundles)
        for loop in self.loops:
            for k in range(loop.first, loop.last + 1):
                times[k] *= loop.trips or 1
        return times

    def calls(self) -> list[tuple[str, int]]:
        """The HLO instructions that it calls in order, each with the bundles since the call before: its arguments,
        the trace markers around it, and the small instructions that have no routine of their own.

        Raises:
          MarsError: a call names no instruction.
        """
        found, since = [], 0
        for bundle in self.bundles:
            since += 1
            call = re.search(r"= \w*call (.*)", bundle, re.S)
            if call and not call[1].startswith("/* <late-"):
                named = re.search(r"/\* %([\w.\-]+) = ", call[1])
                if named is None:
                    raise unknown(f"a call names no instruction ({bundle.strip()[:80]})")
                found.append((named[1], since))
                since = 0
        return [*found, ("", since)]


def unknown(what: str) -> MarsError:
    """The error of a program that would be read as less than it is."""
    return MarsError(
        f"the schedule of this program cannot be read whole, since {what}: use the libtpu that mars-jax is tested with "
        "(its extra 'test'), or another batch or number of drafted tokens."
    )


def parse(text: str) -> Routine:
    """The routine of a `final_bundles` file.

    >>> routine = parse('''
    ...      0   :  { %s1_s0 = smov 0 } /* Start region 1 */
    ...    0x1 LB: > { %s3_s2 = sphi %s1_s0, %s4_s0 } /* Start region 7 */
    ...    0x2   : > { %s4_s0 = sadd.s32 1, %s3_s2 }
    ...    0x3   : > { %p5_p0 = scmp.ge.s32.totalorder %s4_s0, 10 /* loop exit test */ }
    ...    0x4   : > { %8 = sbr.rel (!%p5_p0) target = $region7 }
    ...    0x5   :  {}
    ...    0x6   :  {}
    ...    0x7   :  {}
    ...    0x8   :  {} /* End region 7 */
    ...    0x9   :  { %9 = vtrace 1 }
    ... ''')
    >>> routine.loops, routine.executed
    ([Loop(first=1, last=8, trips=10)], 82)
    """
    starts = list(_BUNDLE.finditer(text))
    ends = [found.start() for found in starts[1:]] + [len(text)]
    bundles = [text[found.end() - 1 : end] for found, end in zip(starts, ends, strict=True)]
    regions: dict[str, int] = {}
    branches: list[tuple[int, bool, str, str]] = []
    for k, bundle in enumerate(bundles):
        for region in re.findall(r"Start region (\d+)", bundle):
            regions.setdefault(region, k)
        for negated, predicate, region in re.findall(
            r"sbr\.rel \((!?)%([\w]+)\) target = \$region(\d+)", bundle
        ):
            branches.append((k, bool(negated), predicate, region))
    defined = _definitions(bundles)
    loops = [
        Loop(regions[region], min(k + BRANCH_DELAY, len(bundles) - 1), _trips(defined, predicate))
        for k, _, predicate, region in branches
        if regions.get(region, k + 1) <= k
    ]
    return Routine(bundles, loops)


_Definitions = dict[str, list[tuple[int, str]]]


def _definitions(bundles: list[str]) -> _Definitions:
    """The places where each register is set, and the values."""
    defined: _Definitions = {}
    for k, bundle in enumerate(bundles):
        for name, value in re.findall(r"%(\w+) = ([^;{}]*)", bundle):
            defined.setdefault(name, []).append((k, re.sub(r"/\*.*?(\*/|$)", "", value, flags=re.S).strip()))
    return defined


def _value(defined: _Definitions, name: str) -> str:
    return defined[name][0][1] if name in defined else ""


def _constant(defined: _Definitions, text: str) -> int | None:
    """An operand's value where it is a number, or a register that is set to one, perhaps under a predicate.

    It is the constant, too, where a register is the smaller of a constant and something else. Additions to such a
    register fill a pipeline, and do no work.
    """
    text = text.strip()
    if not text.startswith("%"):
        return int(text) if re.fullmatch(r"-?\d+", text) else None
    for _, value in defined.get(text[1:], ()):
        move = re.match(r"s?mov (?:\([^)]*\), )?([^,]*)$", value)
        added = re.match(r"sadd\.s32 (?:\([^)]*\), )?\d+, (%\w+)", value)
        found = _constant(defined, (move or added)[1]) if move or added else None  # type: ignore[index]
        if found is not None:
            return found
    return None


def _trips(defined: _Definitions, predicate: str) -> int | None:
    """Trips of a loop that counts up to a constant; None of any other loop.

    It counts by the constant that is added, else by 1, from the constant at which its counter starts, else from 0.
    """
    test = re.match(
        r"scmp\.(?:ge|lt)\.[su]32(?:\.totalorder)? (?:\([^)]*\), )?(%\w+), (\S+)", _value(defined, predicate)
    )
    bound = _constant(defined, test[2]) if test else None
    if test is None or bound is None:
        return None
    first, by = 0, 1
    step = re.match(r"sadd\.s32 (?:\([^)]*\), )?(\d+), %(\w+)", _value(defined, test[1][1:]))
    if step:
        by = int(step[1])
        phi = re.match(r"sphi (%\w+), %\w+", _value(defined, step[2]))
        first = (_constant(defined, phi[1]) if phi else None) or 0
    return max(1, -(-(bound - first) // by)) if by > 0 and bound > first else None


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The dump of one program."""

    top: Routine
    routines: dict[str, Routine]  # by the HLO instruction after which the file is named


def read(folder: Path) -> Schedule:
    """The schedules in a folder; of several programs, the one with the longest top level.

    Raises:
      FileNotFoundError: there is none.
    """
    tops, routines = [], {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        named = re.match(r"\d+-(.+)-\d+-final_bundles\.txt$", path.name)
        if named is None or named[1].endswith("schedule-analysis_final_bundles"):
            continue
        if named[1] == "TLP":
            tops.append(path)
        elif not named[1].startswith("<"):
            routines[named[1]] = parse(path.read_text())
    if not tops:
        raise FileNotFoundError(f"no *-TLP-*-final_bundles.txt in {folder}")
    return Schedule(parse(max(tops, key=lambda path: path.stat().st_size).read_text()), routines)
