"""Assignment of a compiled program's instructions to the parts of a decode step, based on `jax.named_scope`."""

from __future__ import annotations

import re
from collections.abc import Callable

from scripts.tpu_schedule.hlo import Computation, Instruction, Module

PHASES = ("draft", "target", "verify", "update", "emit", "commit")
COMPONENTS = ("mask", "attention", "mlp", "unembed", "embed", "fuse")
OTHER = "other"
_UNRELATED = ("tuple", "while", "conditional", "parameter", "constant")


def part(op_name: str) -> str | None:
    """Return the part named in the path of an operation, such as "target/mlp" or "verify", or None."""
    words = [re.sub(r"^(?:\w+\()+|\)+$", "", word) for word in op_name.split("/")]
    phase = next((word for word in words if word in PHASES), None)
    if phase is None:
        return None
    component = next((word for word in words[words.index(phase) :] if word in COMPONENTS), None)
    return phase if component is None else f"{phase}/{component}"


def part_of(module: Module, computation: Computation, instruction: Instruction) -> str:
    """Return the part of a decode step that an instruction belongs to.

    If its own name has none, return the part of the nearest user that has one, or else of the nearest such operand.
    """

    def users(node: Instruction) -> list[Instruction]:
        return computation.users[node.name]

    def operands(node: Instruction) -> list[Instruction]:
        return [computation.instructions[name] for name in node.operands]

    return _nearest(module, instruction, users) or _nearest(module, instruction, operands) or OTHER


def _nearest(
    module: Module, instruction: Instruction, neighbours: Callable[[Instruction], list[Instruction]]
) -> str | None:
    """Search breadth-first over `neighbours` for an instruction that has a part, and return that part, or None.

    The search does not continue through loops and tuples, because they connect unrelated instructions.
    """
    visited = {instruction.name}
    layer = [instruction]
    while layer:
        following = []
        for current in layer:
            name = _named(module, current)
            if name is not None:
                return name
            for neighbour in neighbours(current):
                if neighbour.name not in visited and neighbour.opcode not in _UNRELATED:
                    visited.add(neighbour.name)
                    following.append(neighbour)
        layer = following
    return None


def _named(module: Module, instruction: Instruction) -> str | None:
    """Return the part named by an instruction, or else by an instruction inside it."""
    name = part(instruction.op_name)
    if name is not None or instruction.opcode not in ("fusion", "call", "async-start"):
        return name
    for called in instruction.calls:
        computation = module.computations[called]
        for inner in [computation.root, *reversed(computation.instructions.values())]:
            name = part(inner.op_name)
            if name is not None:
                return name
    return None
