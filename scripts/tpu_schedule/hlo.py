"""Parser of optimised HLO text: computations, instructions, and shapes with their layouts."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

BITS = {"pred": 8, "s4": 4, "u4": 4, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "token": 0}
BITS |= {"s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64}


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's shape, layout and memory space."""

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    # Size of the outermost tile. A chip stores only whole tiles.
    tile: tuple[int, ...] = ()
    # Memory space: 0 is HBM. On a TPU, 1 is VMEM, 2 is semaphore memory, and 6 is scalar memory.
    space: int = 0

    @property
    def bits(self) -> int:
        return BITS.get(self.dtype, 8)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def payload(self) -> int:
        """Number of bytes without padding."""
        return self.size * self.bits // 8

    @property
    def bytes(self) -> int:
        """Number of stored bytes, including the padding of the tiles."""
        dims = [self.dims[i] for i in self.minor_to_major] or list(self.dims[::-1])
        if math.prod(dims) > 1:
            for k, size in enumerate(reversed(self.tile)):
                if k < len(dims):
                    dims[k] += -dims[k] % size
        return math.prod(dims) * self.bits // 8

    @property
    def in_hbm(self) -> bool:
        """True for arrays in HBM, except scalars."""
        return self.space == 0 and self.size > 1


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    # Shapes of the arrays in the result.
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    # The rest of the line: attributes and metadata.
    tail: str
    is_root: bool

    @functools.cached_property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations that the instruction calls. A while loop calls its condition and its body."""
        names = re.findall(
            r"(?:calls|body|condition|to_apply|called_computations?|true_computation|false_computation)"
            r"=\{?%([\w.\-]+)",
            self.tail,
        )
        for group in re.findall(r"branch_computations=\{([^}]*)\}", self.tail):
            names += re.findall(r"%([\w.\-]+)", group)
        return tuple(names)

    def attribute(self, name: str) -> str:
        """Return the text after `name=`, up to the next comma or space, or ""."""
        match = re.search(rf"\b{name}=\"?%?([^\s,\"]+)", self.tail)
        return match[1] if match else ""

    @property
    def op_name(self) -> str:
        """Path of name scopes in which JAX traced the instruction, or "" if the compiler created it."""
        match = re.search(r'op_name="([^"]*)"', self.tail)
        return match[1] if match else ""

    @property
    def literal(self) -> int | None:
        """The value of an integer constant."""
        match = re.match(r"(-?\d+)\b(?!\.)", self.tail)
        return int(match[1]) if match and self.opcode == "constant" else None

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return self.attribute("custom_call_target")

    @property
    def aliased(self) -> tuple[int, ...]:
        """Indices of a custom call's results that alias an operand."""
        match = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", self.tail)
        return tuple(int(index) for index in re.findall(r"\{(\d+)\}: \(", match[1])) if match else ()


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions, one of which computes the result."""

    name: str
    # Instructions by name, in schedule order.
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """The parameter instructions, in the order of their numbers."""
        parameters = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(parameters, key=lambda i: int(i.tail.partition(")")[0]))

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                users[operand].append(instruction)
        return users


@dataclasses.dataclass(frozen=True)
class Module:
    """A program."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Parse the text of `compiled.as_text()`.

    Raises:
      ValueError: a line of a computation is not an instruction.
    """
    computations: dict[str, Computation] = {}
    entry, name = "", None
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if name is None:
            head = re.match(r"(ENTRY )?%([\w.\-<>]+) \(.*\{\s*$", line)
            if head:
                name, instructions = head[2], {}
                entry = name if head[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, instructions)
            name = None
        elif line.strip():
            instruction = _instruction(line)
            instructions[instruction.name] = instruction
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    head = re.match(r"\s+(ROOT )?%([\w.\-]+) = ", line)
    if head is None:
        raise ValueError(f"the program has a line that is not an instruction: {line.strip()[:60]}")
    start = head.end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opened = line.index("(", end)
    closed = _closing(line, opened)
    opcode, inside = line[end:opened].strip(), line[opened + 1 : closed - 1]
    # For a parameter, the parentheses contain its number; for a constant, its value.
    literal = opcode in ("parameter", "constant")
    operands = () if literal else tuple(re.findall(r"%([\w.\-]+)", inside))
    tail = line[opened + 1 :] if literal else line[closed:]
    return Instruction(head[2], opcode, tuple(_shapes(line[start:end])), operands, tail, bool(head[1]))


def _closing(line: str, opened: int) -> int:
    """Return the index after the parenthesis that matches the one at index `opened`."""
    depth = 0
    for match in re.finditer(r"[()]", line[opened:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return opened + match.end()
    raise ValueError(f"no closing parenthesis in {line[opened : opened + 80]!r}")


def _shapes(text: str) -> Iterator[Shape]:
    for match in re.finditer(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?", text):
        dtype, sizes, layout = match.groups()
        order, _, marks = (layout or "").partition(":")
        tile = re.search(r"T\(([\d,]+)\)", marks)
        space = re.search(r"S\((\d+)\)", marks)
        yield Shape(
            dtype,
            _numbers(sizes.replace("<=", "")),
            _numbers(order),
            _numbers(tile[1]) if tile else (),
            int(space[1]) if space else 0,
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
