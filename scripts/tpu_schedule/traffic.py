"""Bytes that an instruction of a compiled TPU program moves between HBM and the core.

For a sliced operand, only the slice is counted, and for an in-place update, only the update. For an asynchronous pair,
the whole copy is counted at its start. An operand that a kernel updates in place is counted as read.
"""

from __future__ import annotations

from scripts.tpu_schedule.hlo import Computation, Instruction, Module

SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = ("dynamic-update-slice", "scatter")
# Opcodes that move no data inside a fusion.
RENAMES = ("bitcast", "reshape", "get-tuple-element")
FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while", "conditional", "call",
    "partition-id", "replica-id", "opt-barrier",
)  # fmt: skip
FREE_TARGETS = ("ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "AllocateBuffer")


def is_free(instruction: Instruction) -> bool:
    """Return whether an instruction does no work, such as a bitcast, a tuple or the end of an asynchronous pair."""
    return (
        instruction.opcode in FREE
        or instruction.opcode.endswith("-done")
        or (instruction.opcode == "custom-call" and instruction.target in FREE_TARGETS)
    )


def moved_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Return the number of bytes that one execution of the instruction reads from and writes to HBM."""
    opcode = instruction.opcode
    operands = [computation.instructions[name] for name in instruction.operands]
    if is_free(instruction):
        return 0
    if opcode in ("fusion", "async-start") and instruction.calls:
        return _fusion_bytes(module, module.computations[instruction.calls[0]], operands, instruction)
    if opcode in ("copy-start", "slice-start"):
        # The result is a tuple. The destination is its first element for a copy, and its second for a slice.
        destination = instruction.shapes[opcode == "slice-start"]
        return destination.bytes * (operands[0].shapes[0].in_hbm + destination.in_hbm)
    if opcode in SLICES:
        sliced = instruction.shapes[0].bytes if operands[0].shapes[0].in_hbm else 0
        return sliced + _whole(operands[1:]) + _results(instruction)
    if opcode in UPDATES:
        update = operands[1 if opcode == "dynamic-update-slice" else -1]
        written = update.shapes[0].bytes if instruction.shapes[0].in_hbm else 0
        return _whole(operands[1:]) + written
    return _whole(operands) + _results(instruction)


def _whole(operands: list[Instruction]) -> int:
    return sum(shape.bytes for operand in operands for shape in operand.shapes if shape.in_hbm)


def _results(instruction: Instruction) -> int:
    shapes = [shape for i, shape in enumerate(instruction.shapes) if i not in instruction.aliased]
    return sum(shape.bytes for shape in shapes if shape.in_hbm)


def _fusion_bytes(
    module: Module, body: Computation, operands: list[Instruction], instruction: Instruction
) -> int:
    moved = 0
    for parameter, operand in zip(body.parameters, operands, strict=False):
        if operand.shapes and operand.shapes[0].in_hbm:
            moved += min(_read(module, body, parameter), operand.shapes[0].bytes)
    if instruction.opcode == "async-start":
        return moved
    roots = [body.root]
    if body.root.opcode == "tuple":
        roots = [body.instructions[name] for name in body.root.operands]
    results = [shape for shape in instruction.shapes if shape.dtype != "token"]
    for shape, root in zip(results, roots, strict=False):
        if shape.in_hbm:
            moved += _updated(module, body, root) or shape.bytes
    return moved


def _read(module: Module, body: Computation, value: Instruction) -> int:
    """Return the number of bytes that a fused computation reads from a value."""
    size = value.shapes[0].bytes
    total = size if value.is_root else 0
    for user in body.users[value.name]:
        is_base = bool(user.operands) and user.operands[0] == value.name
        if user.opcode in RENAMES or _renames(module, user):
            total += _read(module, body, user)
        elif user.opcode in SLICES and is_base:
            total += user.shapes[0].bytes
        elif user.opcode in UPDATES and is_base:
            # The elements that are not updated stay in place, so they are not read.
            continue
        elif user.opcode == "fusion":
            inner = module.computations[user.calls[0]]
            for parameter, name in zip(inner.parameters, user.operands, strict=False):
                if name == value.name:
                    total += _read(module, inner, parameter)
        else:
            total += size
    return min(total, size)


def _renames(module: Module, instruction: Instruction) -> bool:
    """Return whether a fusion only reshapes or renames its single operand."""
    if instruction.opcode != "fusion" or len(instruction.operands) != 1:
        return False
    inside = module.computations[instruction.calls[0]].instructions.values()
    return all(inner.opcode in ("parameter", *RENAMES) for inner in inside)


def _updated(module: Module, body: Computation, root: Instruction) -> int | None:
    """Return the size in bytes of an in-place update, or None if the whole result is written."""
    root = _renamed(body, root)
    if root.opcode == "fusion":
        inner = module.computations[root.calls[0]]
        return _updated(module, inner, inner.root) if inner.root.opcode != "tuple" else None
    if root.opcode not in UPDATES:
        return None
    base = _renamed(body, body.instructions[root.operands[0]])
    if base.opcode not in ("parameter", *UPDATES):
        return None
    update = body.instructions[root.operands[1 if root.opcode == "dynamic-update-slice" else -1]]
    return update.shapes[0].bytes


def _renamed(body: Computation, instruction: Instruction) -> Instruction:
    """Follow bitcasts and reshapes back to the instruction that computes the value, and return that instruction."""
    while instruction.opcode in RENAMES and instruction.operands:
        instruction = body.instructions[instruction.operands[0]]
    return instruction
