"""Bytes that an instruction of a compiled TPU program moves between HBM and the core.

An array is in HBM where its layout names no other memory space. An operand that is only sliced is read as far as the
slice goes, an update in place writes the update, and of an asynchronous pair the start counts. The part that a kernel
changes in place is not known; it counts as read and not as written.

Oracle: hand counts in tests/lab/planning/test_traffic.py, and tests/tpu/test_cost.py on programs of known size.
"""

from __future__ import annotations

from typing import NamedTuple

from mars_jax.lab.planning.hlo import Computation, Instruction, Module, Shape

SLICES = ("dynamic-slice", "slice", "gather")
RENAMES = ("bitcast", "reshape", "get-tuple-element")  # in a fusion these move nothing
FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while", "conditional", "call",
    "partition-id", "replica-id", "opt-barrier",
)  # fmt: skip
FREE_TARGETS = ("ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "AllocateBuffer")


class Traffic(NamedTuple):
    """Bytes from and to HBM."""

    read: int
    written: int


NOTHING = Traffic(0, 0)


def is_free(instruction: Instruction) -> bool:
    """True where it is not executed: names, tuples, the ends of asynchronous pairs."""
    return (
        instruction.opcode in FREE
        or instruction.opcode.endswith("-done")
        or (instruction.opcode == "custom-call" and instruction.target in FREE_TARGETS)
    )


def traffic(module: Module, computation: Computation, instruction: Instruction) -> Traffic:
    """Traffic of one execution."""
    if is_free(instruction):
        return NOTHING
    operands = [computation.instructions[name] for name in instruction.operands]
    opcode = instruction.opcode
    if opcode in ("fusion", "async-start") and instruction.calls:
        return _fused(module, module.computations[instruction.calls[0]], operands, instruction)
    if opcode in ("copy-start", "slice-start"):
        # Its result is a tuple: of a copy the destination, the source and a context; of a slice the source is first.
        source, target = _shape(operands[0]), instruction.shapes[opcode == "slice-start"]
        moved = target.bytes
        return Traffic(_in_hbm(source) * moved, _in_hbm(target) * moved)
    if opcode in SLICES:
        read = sum(_in_hbm(_shape(o)) * instruction.shapes[0].bytes for o in operands[:1])
        return Traffic(read + _whole(operands[1:]), _result(instruction))
    if opcode in ("dynamic-update-slice", "scatter"):
        update = operands[1 if opcode == "dynamic-update-slice" else -1]
        written = _in_hbm(instruction.shapes[0]) * _shape(update).bytes
        return Traffic(_whole(operands[1:]), written)
    return Traffic(_whole(operands), _result(instruction))


def _shape(instruction: Instruction) -> Shape:
    return instruction.shapes[0] if instruction.shapes else Shape("token", ())


def _in_hbm(shape: Shape) -> bool:
    # A scalar's place is of no account.
    return shape.space == 0 and shape.size > 1


def _whole(operands: list[Instruction]) -> int:
    return sum(_in_hbm(shape) * shape.bytes for operand in operands for shape in operand.shapes)


def _result(instruction: Instruction) -> int:
    shapes = [shape for i, shape in enumerate(instruction.shapes) if i not in instruction.aliased]
    return sum(_in_hbm(shape) * shape.bytes for shape in shapes)


def _fused(
    module: Module, body: Computation, operands: list[Instruction], instruction: Instruction
) -> Traffic:
    read = 0
    for parameter, operand in zip(body.parameters, operands, strict=False):
        if _in_hbm(_shape(operand)):
            read += min(_read(module, body, parameter), _shape(operand).bytes)
    roots = _roots(body)
    results = [shape for shape in instruction.shapes if shape.dtype != "token"]
    if instruction.opcode == "async-start":
        return Traffic(read, 0)
    written = 0
    for shape, root in zip(results, roots, strict=False):
        if _in_hbm(shape):
            written += _written(module, body, root) or shape.bytes
    return Traffic(read, written)


def _roots(body: Computation) -> list[Instruction]:
    if body.root.opcode == "tuple":
        return [body.instructions[name] for name in body.root.operands]
    return [body.root]


def _read(module: Module, body: Computation, value: Instruction) -> int:
    """Bytes that a fused computation reads of a parameter."""
    total = value.shapes[0].bytes if value.is_root else 0
    for user in body.users[value.name]:
        if user.opcode in RENAMES or _renames(module, user):
            part = _read(module, body, user)
        elif user.opcode in SLICES and user.operands[0] == value.name:
            part = user.shapes[0].bytes
        elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == value.name:
            part = 0  # what is not updated stays where it is
        elif user.opcode == "fusion":
            inner = module.computations[user.calls[0]]
            places = [k for k, name in enumerate(user.operands) if name == value.name]
            part = sum(_read(module, inner, inner.parameters[k]) for k in places)
        else:
            part = value.shapes[0].bytes
        total += part
    return min(total, value.shapes[0].bytes)


def _renames(module: Module, instruction: Instruction) -> bool:
    """True for a fusion that only renames its one operand."""
    if instruction.opcode != "fusion" or len(instruction.operands) != 1:
        return False
    inside = module.computations[instruction.calls[0]].instructions.values()
    return all(inner.opcode in ("parameter", *RENAMES) for inner in inside)


def _written(module: Module, body: Computation, root: Instruction) -> int | None:
    """Bytes of an update in place, None where the whole result is written."""
    while root.opcode in RENAMES and root.operands:
        root = body.instructions[root.operands[0]]
    if root.opcode == "fusion":
        inner = module.computations[root.calls[0]]
        return _written(module, inner, inner.root) if inner.root.opcode != "tuple" else None
    if root.opcode not in ("dynamic-update-slice", "scatter"):
        return None
    base = body.instructions[root.operands[0]]
    while base.opcode in RENAMES and base.operands:
        base = body.instructions[base.operands[0]]
    if base.opcode not in ("parameter", "dynamic-update-slice", "scatter"):
        return None
    update = body.instructions[root.operands[1 if root.opcode == "dynamic-update-slice" else -1]]
    return update.shapes[0].bytes
