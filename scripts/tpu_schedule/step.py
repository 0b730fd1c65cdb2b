"""Cost of one decode step of a program that libtpu compiled: launches, bytes, bundles and collectives of each part.

The last loop of the program is the decode loop, and one iteration of it is a step. The body of an inner loop counts
once per iteration. A conditional counts as its cheapest branch, the one for requests without sampling or constraints.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from typing import NamedTuple

from mars_jax.lab.planning.chips import CHIPS
from mars_jax.lab.planning.estimate import LAUNCH_SECONDS, collective_seconds
from mars_jax.lab.planning.pair_programs import COLLECTIVES
from scripts.tpu_schedule.bundles import Routine, Schedule
from scripts.tpu_schedule.hlo import Computation, Instruction, Module
from scripts.tpu_schedule.parts import part_of
from scripts.tpu_schedule.traffic import is_free, moved_bytes

CLOCKS = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}
"""Bundles per second: the clock rates at which the matrix units reach their published peak."""
COPIES = ("copy-start", "slice-start", "async-start")
"""Opcodes of instructions that run in parallel with the instructions after them."""
_COPIED = ("bitcast", "reshape", "copy", "convert", "copy-done", "copy-start")


class Op(NamedTuple):
    """An executed instruction. Its bytes and bundles are those of one execution."""

    name: str
    opcode: str
    part: str
    times: int
    bytes: int
    bundles: int
    # True if the instruction launches a routine or a collective. Copies are not counted because they overlap with other
    # instructions. Scalar instructions are not counted because they take only a few top-level bundles.
    is_launch: bool
    # Sizes in bytes of a collective's operands and results, and number of devices in its group. All three are 0 for
    # other instructions.
    sent: int
    received: int
    devices: int


@dataclasses.dataclass
class PartCost:
    """Totals for one part of a step."""

    launches: int = 0
    bytes: int = 0
    bundles: int = 0
    collectives: int = 0
    collective_seconds: float = 0.0

    def seconds(self, generation: str, bandwidth: float) -> float:
        """Return the time of the transfers or of the bundles, whichever is longer, plus the time of collectives.
        The time of launches is not included.
        """
        return max(self.bytes / bandwidth, self.bundles / CLOCKS[generation]) + self.collective_seconds


class StepCost(NamedTuple):
    """Cost of a step on one device."""

    parts: dict[str, PartCost]
    # Time of each part in seconds, excluding its launches.
    seconds: dict[str, float]
    launches: int
    bytes_seconds: float
    # Step time in seconds, assuming the shortest and the longest possible launches.
    low_seconds: float
    high_seconds: float


def step_cost(
    module: Module, schedule: Schedule, *, generation: str, bandwidth: float, live: int
) -> StepCost:
    """Add up the cost of one step of a decode loop.

    Args:
      module: from `hlo.parse`.
      schedule: from `bundles.read`.
      generation: key of `CHIPS`.
      bandwidth: HBM bandwidth of a device in bytes per second.
      live: number of occupied slots in a row's cache.
    """
    reader = Reader(module, schedule, live)
    ops = reader.step()
    parts: dict[str, PartCost] = defaultdict(PartCost)
    for op in ops:
        cost = parts[op.part]
        cost.launches += op.times * op.is_launch
        cost.bytes += op.times * op.bytes
        cost.bundles += op.times * op.bundles
        if op.devices:
            seconds = collective_seconds(op.opcode, op.sent, op.received, op.devices, CHIPS[generation].link)
            cost.collectives += op.times
            cost.collective_seconds += op.times * seconds
    by_name = {op.name: op for op in ops}
    for name, count in schedule.top.calls():
        # The top-level bundles before a call are executed as often as the call.
        if name in by_name:
            parts[by_name[name].part].bundles += count * by_name[name].times
    seconds = {name: cost.seconds(generation, bandwidth) for name, cost in sorted(parts.items())}
    launches = sum(cost.launches for cost in parts.values())
    low, high = (sum(seconds.values()) + launches * launch for launch in LAUNCH_SECONDS)
    bytes_seconds = sum(cost.bytes for cost in parts.values()) / bandwidth
    return StepCost(dict(parts), seconds, launches, bytes_seconds, low, high)


class Reader:
    """Interpreter of a program and its schedule, which lists the instructions that a step executes."""

    def __init__(self, module: Module, schedule: Schedule, live: int):
        self.module = module
        self.live = live
        self.called = {name for name, _ in schedule.top.calls()}
        self.routines = schedule.routines
        # libtpu compiles identical instructions only once. An instruction without its own routine uses the routine of
        # an identical or similar instruction.
        self.equal: dict[str, Routine] = {}
        self.similar: dict[str, Routine] = {}
        for computation in module.computations.values():
            for instruction in computation.instructions.values():
                routine = schedule.routines.get(instruction.name)
                if routine is not None:
                    self.equal.setdefault(self.fingerprint(computation, instruction), routine)
                    self.similar.setdefault(_signature(computation, instruction), routine)

    def step(self) -> list[Op]:
        entry = self.module.computations[self.module.entry]
        loops = [i for i in entry.instructions.values() if i.opcode == "while"]
        if not loops:
            return self.ops(entry, 1)
        # The loops before the decode loop prepare its arguments.
        return [op for name in loops[-1].calls for op in self.ops(self.module.computations[name], 1)]

    def ops(self, computation: Computation, times: int) -> list[Op]:
        ops: list[Op] = []
        for instruction in computation.instructions.values():
            called = [self.module.computations[name] for name in instruction.calls]
            if instruction.opcode == "while":
                turns = times * self.turns(computation, instruction)
                ops += [op for inner in called for op in self.ops(inner, turns)]
            elif instruction.opcode == "conditional":
                branches = [self.ops(inner, times) for inner in called]
                ops += min(branches, key=lambda branch: sum(op.times * op.bundles for op in branch))
            elif instruction.opcode == "call":
                ops += self.ops(called[0], times)
            elif instruction.name.startswith("async-collective-") or instruction.opcode == "call-start":
                # The collective is inside both instructions of a pair, a start and a done (fusions, or calls to the
                # sparse cores). Count it only in the start.
                ops += [
                    self.op(called[0], inner, times)
                    for inner in called[0].instructions.values()
                    if inner.opcode in COLLECTIVES and "-start" in instruction.name
                ]
            elif not is_free(instruction):
                ops.append(self.op(computation, instruction, times))
        return ops

    def op(self, computation: Computation, instruction: Instruction, times: int) -> Op:
        collective = instruction.opcode.removesuffix("-start") in COLLECTIVES
        copy = instruction.opcode in COPIES
        called = instruction.name in self.called
        if not (called or collective or copy) and any(shape.size > 1 for shape in instruction.shapes):
            raise ValueError(f"{instruction.name} writes an array and the schedule does not call it")
        bundles = 0
        if called and not collective:
            # Leave out the bundles of a collective: its loops wait for other devices, and `collective_seconds` models
            # this time.
            bundles = self.routine(computation, instruction).executed
        sent = received = 0
        if collective:
            operands = [computation.instructions[name] for name in instruction.operands]
            sent = sum(shape.payload for operand in operands for shape in operand.shapes)
            received = sum(shape.payload for shape in instruction.shapes)
            if instruction.opcode in ("all-gather-start", "collective-permute-start"):
                # The results of these instructions include their operands.
                received -= sent
        return Op(
            name=instruction.name,
            opcode=instruction.opcode,
            part=part_of(self.module, computation, instruction),
            times=times,
            bytes=moved_bytes(self.module, computation, instruction),
            bundles=bundles,
            is_launch=(called or collective) and not copy,
            sent=sent,
            received=received,
            devices=_group_size(instruction.tail) if collective else 0,
        )

    def routine(self, computation: Computation, instruction: Instruction) -> Routine:
        routine = (
            self.routines.get(instruction.name)
            or self.equal.get(self.fingerprint(computation, instruction))
            or self.similar.get(_signature(computation, instruction))
        )
        if routine is None:
            raise ValueError(f"{instruction.name} is called and has no routine")
        return routine

    def fingerprint(self, computation: Computation, instruction: Instruction) -> str:
        """Return a string that is the same for instructions that differ only in names and metadata."""
        bodies = []
        for name in instruction.calls:
            body = self.module.computations[name]
            bodies.append([self.fingerprint(body, inner) for inner in body.instructions.values()])
        attributes = re.split(r", (?:metadata|backend_config|frontend_attributes)=", instruction.tail)[0]
        attributes = re.sub(r"(%[\w.\-]+|channel_id=\d+)", "", attributes)
        return f"{_signature(computation, instruction)} {attributes} {bodies}"

    def turns(self, computation: Computation, loop: Instruction) -> int:
        """Return the number of iterations of an inner loop, or 1 if it is unknown.

        The number is known for a counter with a constant bound, and for a loop over the blocks of a cache, which visits
        only blocks with live slots.
        """
        condition = self.module.computations[loop.attribute("condition")]
        counted = _counted_turns(computation, loop, condition)
        if counted:
            return counted
        blocks = self.blocks(self.module.computations[loop.attribute("body")])
        if blocks:
            axis, size = max(blocks)
            return math.ceil(min(self.live, axis) / size)
        return 1

    def blocks(self, computation: Computation) -> list[tuple[int, int]]:
        """Return (axis length, slice length) for each dynamic slice of at least 128 entries along a single axis."""
        blocks = []
        for instruction in computation.instructions.values():
            if instruction.opcode == "fusion":
                blocks += self.blocks(self.module.computations[instruction.calls[0]])
            elif instruction.opcode == "dynamic-slice":
                axes = computation.instructions[instruction.operands[0]].shapes[0].dims
                pairs = zip(axes, instruction.shapes[0].dims, strict=True)
                sliced = [(axis, size) for axis, size in pairs if axis != size]
                if len(sliced) == 1 and sliced[0][1] >= 128:
                    blocks += sliced
        return blocks


def _signature(computation: Computation, instruction: Instruction) -> str:
    """Return the opcode and the shapes and layouts of operands and results, as one string."""
    operands = [computation.instructions[name].shapes for name in instruction.operands]
    return f"{instruction.opcode} {operands} {instruction.shapes}"


def _counted_turns(computation: Computation, loop: Instruction, condition: Computation) -> int | None:
    """Return the number of iterations of a loop that increments a counter up to a bound, or None if it is unknown."""
    test = condition.root
    while test.opcode in _COPIED:
        test = condition.instructions[test.operands[0]]
    direction = test.attribute("direction")
    if test.opcode != "compare" or direction not in ("LT", "GT"):
        return None
    sides = [_initial(computation, loop, condition, condition.instructions[name]) for name in test.operands]
    low, high = sides if direction == "LT" else sides[::-1]
    return None if low is None or high is None else max(high - low, 0)


def _initial(
    computation: Computation, loop: Instruction, condition: Computation, value: Instruction
) -> int | None:
    """Return the initial value of an integer in the loop's condition, or None if it is unknown."""
    while value.opcode in _COPIED:
        value = condition.instructions[value.operands[0]]
    if value.opcode == "get-tuple-element":
        carry = computation.instructions[loop.operands[0]]
        if carry.opcode != "tuple":
            return None
        value = computation.instructions[carry.operands[int(value.attribute("index"))]]
        while value.opcode in _COPIED:
            value = computation.instructions[value.operands[0]]
    return value.literal


def _group_size(attributes: str) -> int:
    """Return the number of devices in a replica group."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    if listed:
        return listed[1].count(",") + 1
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes)
    if mesh:
        sizes = dict(re.findall(r"('[^']*')=(\d+)", mesh[1]))
        return math.prod(int(sizes.get(axis.strip(), 1)) for axis in mesh[2].split(","))
    return 2 if "source_target_pairs" in attributes else 1
