"""The cost of a step on a TPU, by the program that libtpu compiled: executed instructions, bytes, bundles, collectives.

The loop of unknown length at the top is the decode loop: its body, run once, is the step. Inner loops are multiplied
out (`planning.hlo_loops`). A conditional counts as its branch of fewer bundles, or of more: requests without
sampling, constraint and early stop take the cheap ones.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from mars_jax.lab.planning import walk
from mars_jax.lab.planning.attention_kernel import attention_table, read_by_blocks
from mars_jax.lab.planning.bundles import Routine, Schedule, unknown
from mars_jax.lab.planning.compiled_program import COLLECTIVES
from mars_jax.lab.planning.flops import flops
from mars_jax.lab.planning.hlo import Computation, Instruction, Module
from mars_jax.lab.planning.hlo_loops import condition_and_body, trips
from mars_jax.lab.planning.parts import Parts
from mars_jax.lab.planning.routines import Routines
from mars_jax.lab.planning.traffic import Traffic, is_free, traffic

COPIES = ("copy-start", "slice-start", "async-start")
"""Opcodes that run beside the instructions after them."""


@dataclasses.dataclass(frozen=True)
class Op:
    """An executed instruction."""

    name: str
    opcode: str
    part: str
    times: int
    traffic: Traffic  # of one execution, like all that follows
    bundles: int
    flops: int  # of the matrix units
    sent: int  # bytes of a collective's operands
    received: int  # and of its results
    devices: int  # of a collective's group
    way: str  # who sends to whom, where that runs beside the instructions after it; else empty
    sorted: int  # elements along the axis of a sort
    gathered: int  # elements of a gather that XLA lowers element by element
    scalar: bool  # without a routine: a few bundles of the top level


@dataclasses.dataclass(frozen=True)
class Wait:
    """The end of an asynchronous pair."""

    start: str  # the name of its beginning


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop inside of the step, with the items of its body; turns are 1 where nothing says how many."""

    name: str
    turns: int
    known: bool
    body: list[Op | Wait | Loop]


Items = list[Op | Wait | Loop]


@dataclasses.dataclass(frozen=True)
class Step:
    """The executed instructions of a step in the order of the schedule."""

    items: Items
    overhead: dict[str, int]  # bundles of the top level, between the calls, by part
    resident_bytes: int  # of arrays that stay in fast memory from step to step

    def ops(self) -> Iterator[Op]:
        yield from _flat(self.items)

    def loops(self) -> Iterator[Loop]:
        yield from _loops(self.items)


def _flat(items: Items) -> Iterator[Op]:
    for item in items:
        if isinstance(item, Op):
            yield item
        elif isinstance(item, Loop):
            yield from _flat(item.body)


def _loops(items: Items) -> Iterator[Loop]:
    for item in items:
        if isinstance(item, Loop):
            yield item
            yield from _loops(item.body)


def read_step(
    module: Module, schedule: Schedule, *, live: int, branches: Literal["cheap", "dear"] = "cheap"
) -> Step:
    """The step of a decode loop, or all of a program without one.

    Args:
      module: from `hlo.parse`.
      schedule: from `bundles.read`.
      live: slots of a row's cache that hold something.
      branches: which ones conditionals take.

    Raises:
      MarsError: an instruction is nowhere in the schedule.
    """
    return _Reader(module, schedule, live, branches).step()


class _Reader:
    def __init__(self, module: Module, schedule: Schedule, live: int, branches: str):
        self.module, self.schedule, self.live, self.branches = module, schedule, live, branches
        self.parts, self.routines = Parts(module), Routines(module, schedule)
        self.walked: dict[int, int] = {}  # by the identity of a kernel's routine
        self.called = {name for name, _ in schedule.top.calls()}

    def step(self) -> Step:
        entry = self.module.computations[self.module.entry]
        # The last one: loops before it prepare its arguments.
        outer = [i for i in entry.instructions.values() if i.opcode == "while"]
        resident = 0
        if outer:
            condition, body = condition_and_body(self.module, outer[-1])
            resident = sum(shape.bytes for shape in outer[-1].shapes if shape.space == 1)
            items = self.items(condition, 1) + self.items(body, 1)
        else:
            items = self.items(entry, 1)
        return Step(items, self.overhead(items), resident)

    def items(self, computation: Computation, times: int) -> Items:
        found: Items = []
        for instruction in computation.instructions.values():
            if instruction.opcode == "while":
                turns = trips(self.module, computation, instruction, self.live)
                condition, body = condition_and_body(self.module, instruction)
                inner = times * (1 if turns is None else turns)
                if inner:
                    inside = self.items(condition, inner) + self.items(body, inner)
                    found.append(Loop(instruction.name, turns or 1, turns is not None, inside))
            elif instruction.opcode == "conditional":
                found += self.branch(instruction, times)
            elif instruction.opcode == "call":
                found += self.items(self.module.computations[instruction.calls[0]], times)
            elif instruction.name.startswith("async-collective-") or instruction.opcode == "call-start":
                # A pair of fusions around a collective, or of calls of a chip's sparse cores, which only its beginning
                # holds. It counts there as if it were waited for.
                inside = self.module.computations[instruction.calls[0]]
                own = [i for i in inside.instructions.values() if i.opcode in COLLECTIVES]
                if instruction.opcode == "call-start" and not own:
                    raise unknown(f"{instruction.name} is no collective")
                found += [self.op(inside, i, times) for i in own if "-start" in instruction.name]
            elif instruction.opcode == "call-done":
                pass
            elif instruction.opcode.endswith("-done"):
                found.append(Wait(instruction.operands[0]))
            elif not is_free(instruction):
                found.append(self.op(computation, instruction, times))
        return found

    def branch(self, instruction: Instruction, times: int) -> Items:
        ways = [self.items(self.module.computations[name], times) for name in instruction.calls]
        sizes = [sum(op.times * op.bundles for op in _flat(items)) for items in ways]
        chosen = (min if self.branches == "cheap" else max)(range(len(ways)), key=lambda k: sizes[k])
        return ways[chosen]

    def op(self, computation: Computation, instruction: Instruction, times: int) -> Op:
        collective = instruction.opcode.removesuffix("-start") in COLLECTIVES
        called = instruction.name in self.called
        routine = self.routines.of(computation, instruction) if called else None
        if called and routine is None:
            raise unknown(f"{instruction.name} is called and has no routine")
        scalar = not (called or collective or instruction.opcode in COPIES)
        if scalar and any(shape.size > 1 for shape in instruction.shapes):
            raise unknown(f"{instruction.name} makes an array and is not called")
        shapes = [shape for shape in instruction.shapes if shape.dtype != "token"]
        operands = [computation.instructions[name] for name in instruction.operands]
        sent = sum(shape.payload for o in operands for shape in o.shapes) if collective else 0
        received = sum(shape.payload for shape in shapes) if collective else 0
        if instruction.opcode in ("all-gather-start", "collective-permute-start"):
            received -= sent  # these give their operands back
        moved = traffic(self.module, computation, instruction)
        rows = attention_table(instruction, operands, self.live)
        return Op(
            name=instruction.name,
            opcode=instruction.opcode,
            part=self.parts.of(computation, instruction),
            times=times,
            traffic=read_by_blocks(instruction, operands, moved, rows) if rows else moved,
            # The loops of a collective wait for others: the model of `constants` stands for them.
            bundles=0 if collective or routine is None else self.executed(instruction, routine, rows),
            flops=flops(self.module, computation, instruction),
            sent=sent,
            received=received,
            devices=_group(instruction.rest) if collective else 0,
            way=_way(instruction),
            sorted=_sorted(instruction, shapes[0].dims if shapes else ()),
            gathered=self.gathered(instruction),
            scalar=scalar,
        )

    def executed(self, instruction: Instruction, routine: Routine, rows: list[list[int]]) -> int:
        """Bundles: of a kernel by its grid, of whatever else by its loops."""
        if instruction.target != "tpu_custom_call":
            return routine.executed
        if id(routine) not in self.walked:
            self.walked[id(routine)] = walk.executed(routine, rows)
        return self.walked[id(routine)]

    def gathered(self, instruction: Instruction) -> int:
        if instruction.opcode == "gather":
            return instruction.shapes[0].size
        if instruction.opcode != "fusion" or instruction.attribute("kind") != "kCustom":
            return 0
        inside = self.module.computations[instruction.calls[0]].instructions.values()
        return sum(i.shapes[0].size for i in inside if i.opcode == "gather")

    def overhead(self, items: Items) -> dict[str, int]:
        """Bundles of the top level: those before a call are counted as often as the call."""
        ops = {op.name: op for op in _flat(items)}
        found: Counter[str] = Counter()
        for name, count in self.schedule.top.calls():
            if name in ops:
                found[ops[name].part] += count * ops[name].times
        return dict(found)


def _sorted(instruction: Instruction, dims: tuple[int, ...]) -> int:
    if instruction.opcode != "sort" and "TopK" not in instruction.target:
        return 0
    axis = re.search(r"dimensions=\{(\d+)\}", instruction.rest)
    return dims[int(axis[1]) if axis else -1] if dims else 0


def _way(instruction: Instruction) -> str:
    if instruction.opcode != "collective-permute-start":
        return ""
    pairs = re.search(r"source_target_pairs=\S*", instruction.rest)
    return pairs[0] if pairs else instruction.opcode


def _group(text: str) -> int:
    """Devices of a replica group."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    if listed:
        return listed[1].count(",") + 1
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]", text)
    if iota:
        return int(iota[1])
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text)
    if mesh:
        sizes = dict(re.findall(r"('[^']*')=(\d+)", mesh[1]))
        return math.prod(int(sizes.get(name.strip(), 1)) for name in mesh[2].split(","))
    return 1 if "source_target_pairs" not in text else 2
