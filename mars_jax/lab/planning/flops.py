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
        taps = 2 * instruction.shapes[0].size * kernel.size // max(1, outputs) // groups
        return round(taps * _share(computation, instruction))
    if instruction.opcode == "dot":
        left = computation.instructions[instruction.operands[0]].shapes[0]
        contracted = 1
        for axis in _axes(instruction, "lhs_contracting_dims"):
            contracted *= left.dims[axis]
        return 2 * instruction.shapes[0].size * contracted
    return 0


def _share(computation: Computation, instruction: Instruction) -> float:
    """Return how many of a convolution's products are with numbers, and not with padding or the gaps of a dilation.

    XLA writes products in parts so: a batch of n as a window of n over what is n apart, and outputs in n parts as a
    window of n over one number with n - 1 of padding on each side. Both meet one number at a time.

    >>> from mars_jax.lab.planning import hlo
    >>> module = hlo.parse('''HloModule tiny
    ... ENTRY %main (x: f32[4,8,9], w: f32[4,9,5]) -> f32[4,8,5] {
    ...   %x = f32[4,8,9] parameter(0)
    ...   %w = f32[4,9,5] parameter(1)
    ...   ROOT %c = f32[4,8,5] convolution(%x, %w), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf
    ... }
    ... ''')
    >>> main = module.computations["main"]
    >>> flops(module, main, main.root) == 2 * 4 * 8 * 9 * 5
    True
    """
    window = instruction.rest.partition("window={")[2].partition("}")[0]
    sides = {name: side.split("x") for name, _, side in (part.partition("=") for part in window.split())}
    sizes = [int(size) for size in sides.get("size", [])]
    labels, _, result = (instruction.attribute("dim_labels") or "").partition("->")
    left = computation.instructions[instruction.operands[0]].shapes[0].dims
    share = 1.0
    for axis, size in enumerate(sizes):
        stride, dilated, apart = (
            int(sides[name][axis]) if name in sides else 1 for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(sides["pad"][axis].partition("_")[0]) if "pad" in sides else 0
        held = left[labels.partition("_")[0].index(str(axis))]
        made = instruction.shapes[0].dims[result.index(str(axis))]
        places = (out * stride + tap * apart - low for out in range(made) for tap in range(size))
        met = sum(place % dilated == 0 and 0 <= place // dilated < held for place in places)
        share *= met / (made * size)
    return share


def _axes(instruction: Instruction, name: str) -> list[int]:
    at = instruction.rest.find(f"{name}={{")
    if at < 0:
        return []
    inside = instruction.rest[at + len(name) + 2 :].partition("}")[0]
    return [int(axis) for axis in inside.split(",") if axis]
