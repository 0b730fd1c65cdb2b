"""Trip counts of the loops of a compiled program."""

from __future__ import annotations

import re

from mars_jax.lab.planning.hlo import Computation, Instruction, Module


def condition_and_body(module: Module, loop: Instruction) -> tuple[Computation, Computation]:
    """The two computations of a while loop."""
    names = {kind: loop.attribute(kind) or "" for kind in ("condition", "body")}
    return module.computations[names["condition"]], module.computations[names["body"]]


def trips(module: Module, computation: Computation, loop: Instruction, live: int) -> int | None:
    """The turns of a while loop, None where the program does not say.

    Known are: what the compiler noted; a counter that runs to a constant; and a loop over blocks of a cache, which
    runs over the blocks that hold `live` slots.
    """
    noted = re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.rest)
    if noted:
        return int(noted[1])
    condition, body = condition_and_body(module, loop)
    return _counted(computation, loop, condition) or _blocks(module, body, live)


def _counted(computation: Computation, loop: Instruction, condition: Computation) -> int | None:
    """Trips of a loop with the condition `counter < bound`, by steps of 1; None of others."""
    test = condition.root
    while test.opcode in ("bitcast", "reshape", "copy"):
        test = condition.instructions[test.operands[0]]
    if test.opcode != "compare" or test.attribute("direction") not in ("LT", "GT"):
        return None
    values = [
        _initial(computation, loop, condition, condition.instructions[operand]) for operand in test.operands
    ]
    low, high = values if test.attribute("direction") == "LT" else values[::-1]
    return None if low is None or high is None else max(high - low, 0)


def _initial(
    computation: Computation, loop: Instruction, inside: Computation, value: Instruction
) -> int | None:
    """The whole number that a value in the condition is before the first turn."""
    while value.opcode in ("bitcast", "reshape", "copy", "convert"):
        value = inside.instructions[value.operands[0]]
    if value.opcode == "get-tuple-element" and inside.instructions[value.operands[0]].opcode == "parameter":
        index = int(value.attribute("index") or 0)
        carry = computation.instructions[loop.operands[0]]
        if carry.opcode != "tuple":
            return None
        value = computation.instructions[carry.operands[index]]
        while value.opcode in ("bitcast", "reshape", "copy", "convert", "copy-done", "copy-start"):
            value = computation.instructions[value.operands[0]]
    return value.literal


def _blocks(module: Module, body: Computation, live: int) -> int | None:
    """Trips of a body that cuts blocks from one axis of a longer array: the blocks that hold `live` entries."""
    for size, whole in _cuts(module, body):
        return -(-min(live, whole) // size)
    return None


def _cuts(module: Module, computation: Computation) -> list[tuple[int, int]]:
    """(size of the block, size of the axis) of its dynamic slices along one axis, the longest axis first."""
    found = []
    for instruction in computation.instructions.values():
        if instruction.opcode == "fusion":
            found += _cuts(module, module.computations[instruction.calls[0]])
        elif instruction.opcode == "dynamic-slice":
            whole = computation.instructions[instruction.operands[0]].shapes[0].dims
            part = instruction.shapes[0].dims
            differing = [(b, a) for a, b in zip(whole, part, strict=True) if a != b]
            if len(differing) == 1 and differing[0][0] >= 128:
                found.append(differing[0])
    return sorted(found, key=lambda cut: -cut[1])
