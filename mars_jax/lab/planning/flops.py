"""Operations of the matrix units in an instruction. A schedule leaves out when they stall, so that their peak is a
floor of its own beside the bundles."""

from __future__ import annotations

from mars_jax.lab.planning.hlo import Computation, Instruction, Module


def flops(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Floating-point operations of one execution: two for each product that is added up.

    >>> from mars_jax.lab.planning import hlo
    >>> module = hlo.parse('''HloModule tiny
    ... ENTRY %main (x: f32[8,128]) -> f32[8,64] {
    ...   %x = f32[8,128]{1,0} parameter(0)
    ...   %w = f32[64,128]{1,0} parameter(1)
    ...   ROOT %c = f32[8,64]{1,0} convolution(%x, %w), dim_labels=bf_oi->bf
    ... }
    ... ''')
    >>> main = module.computations["main"]
    >>> flops(module, main, main.root) == 2 * 8 * 64 * 128
    True
    """
    if instruction.opcode == "fusion":
        inside = module.computations[instruction.calls[0]]
        return sum(flops(module, inside, inner) for inner in inside.instructions.values())
    if instruction.opcode == "convolution":
        kernel = computation.instructions[instruction.operands[1]].shapes[0]
        labels = (instruction.attribute("dim_labels") or "").partition("_")[2].partition("->")[0]
        outputs = kernel.dims[labels.index("o")] if "o" in labels else 1
        groups = int(instruction.attribute("batch_group_count") or 1)
        return 2 * instruction.shapes[0].size * kernel.size // max(1, outputs) // groups
    if instruction.opcode == "dot":
        left = computation.instructions[instruction.operands[0]].shapes[0]
        contracted = 1
        for axis in _axes(instruction, "lhs_contracting_dims"):
            contracted *= left.dims[axis]
        return 2 * instruction.shapes[0].size * contracted
    return 0


def _axes(instruction: Instruction, name: str) -> list[int]:
    at = instruction.rest.find(f"{name}={{")
    if at < 0:
        return []
    inside = instruction.rest[at + len(name) + 2 :].partition("}")[0]
    return [int(axis) for axis in inside.split(",") if axis]
