"""The text of an optimised XLA program, parsed: computations, instructions, shapes with their layouts, source frames.

Only what `planning.cost` needs of the grammar. Oracle: tests/lab/planning/test_hlo.py, on texts that libtpu wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from mars_jax.core.errors import MarsError

BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16}
BITS |= {"s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "token": 0}


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's shape, and how and where it is stored."""

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()  # the outermost; a chip stores whole tiles
    space: int = 0  # 0 is HBM; on a TPU 1 is VMEM, 2 the semaphores, 6 scalar memory

    @property
    def bits(self) -> int:
        return BITS.get(self.dtype, 8)

    @property
    def bytes(self) -> int:
        """Bytes as stored, with the padding of its tiles."""
        dims = [self.dims[i] for i in self.minor_to_major] or list(self.dims[::-1])
        if math.prod(dims) > 1:
            for k, size in enumerate(reversed(self.tile)):
                if k < len(dims):
                    dims[k] += -dims[k] % size
        return math.prod(dims) * self.bits // 8

    @property
    def payload(self) -> int:
        """Bytes without padding."""
        return math.prod(self.dims) * self.bits // 8

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # the leaves of its result
    operands: tuple[str, ...]
    rest: str  # of the line: attributes, metadata and the compiler's notes
    is_root: bool

    @functools.cached_property
    def calls(self) -> tuple[str, ...]:
        """The computations that it runs: of a fusion, a while (condition and body), a conditional, a call."""
        found = re.findall(
            r"(?:calls|body|condition|to_apply|called_computations?)=\{?%([\w.\-]+)", self.rest
        )
        for group in re.findall(r"branch_computations=\{([^}]*)\}", self.rest):
            found += re.findall(r"%([\w.\-]+)", group)
        for kind in ("true_computation", "false_computation"):
            found += re.findall(rf"{kind}=%([\w.\-]+)", self.rest)
        return tuple(found)

    def attribute(self, name: str) -> str | None:
        """The text after `name=`, up to the next comma or space."""
        found = re.search(rf"\b{name}=\"?%?([^\s,\"]+)", self.rest)
        return found[1] if found else None

    @property
    def op_name(self) -> str:
        """The path of names under which jax traced it, "" where the compiler made it."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def frame(self) -> int | None:
        found = re.search(r"stack_frame_id=(\d+)", self.rest)
        return int(found[1]) if found else None

    @property
    def literal(self) -> int | None:
        """The value of a constant that is one whole number, else None."""
        found = re.match(r"(-?\d+)\b(?!\.)", self.rest)
        return int(found[1]) if found and self.opcode == "constant" else None

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return self.attribute("custom_call_target") or ""

    @property
    def aliased(self) -> tuple[int, ...]:
        """The results of a custom call with a tuple that are operands, changed in place."""
        found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", self.rest)
        return tuple(int(n) for n in re.findall(r"\{(\d+)\}: \(", found[1])) if found else ()


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions with one result: the program, a fusion, the body of a loop."""

    name: str
    instructions: dict[str, Instruction]  # in the order of the schedule

    @functools.cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """By number."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(re.match(r"\s*(\d+)", i.rest)[1]))  # type: ignore[index]

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
    functions: dict[int, tuple[str, ...]]  # of a source frame: "file:function", innermost first

    @property
    def instructions(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation.instructions.values()


def parse(text: str) -> Module:
    """The module of a text that `compiled.as_text()` gave.

    Raises:
      MarsError: a line of a computation is not read.

    >>> module = parse('''HloModule tiny
    ... ENTRY %main (x: f32[8,128]) -> f32[8,128] {
    ...   %x = f32[8,128]{1,0:T(8,128)} parameter(0)
    ...   ROOT %copy = f32[8,128]{1,0:T(8,128)S(1)} copy(%x), metadata={op_name="jit(f)/a"}
    ... }
    ... ''')
    >>> root = module.computations[module.entry].root
    >>> root.opcode, root.operands, root.shapes[0].bytes, root.shapes[0].space, root.op_name
    ('copy', ('x',), 4096, 1, 'jit(f)/a')
    """
    computations: dict[str, Computation] = {}
    entry, name, lines = "", None, {}
    for line in text.splitlines():
        if name is None:
            head = re.match(r"(ENTRY )?%([\w.\-<>]+) \(.*\{\s*$", line)
            if head:
                name, lines = head[2], {}
                entry = name if head[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, lines)
            name = None
        else:
            instruction = _instruction(line)
            if instruction is not None:
                lines[instruction.name] = instruction
            elif line.strip():
                raise MarsError(
                    f"the compiled program has a line that is no instruction ({line.strip()[:60]}): use the libtpu "
                    "that mars-jax is tested with (its extra 'test')."
                )
    return Module(computations, entry, _functions(text))


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s+(ROOT )?%([\w.\-]+) = ", line)
    if head is None:
        return None
    at = head.end()
    end = _closing(line, at) if line[at] == "(" else line.index(" ", at)
    opened = line.index("(", end)
    closed = _closing(line, opened)
    opcode, inside = line[end:opened].strip(), line[opened + 1 : closed - 1]
    operands = () if opcode == "constant" else tuple(re.findall(r"%([\w.\-]+)", inside))
    # A parameter's number and a constant's value are all that is between the parentheses.
    rest = inside + line[closed:] if opcode in ("parameter", "constant") else line[closed:]
    return Instruction(head[2], opcode, tuple(shapes(line[at:end])), operands, rest, bool(head[1]))


def _closing(line: str, opened: int) -> int:
    """The place after the parenthesis that closes the one at `opened`."""
    depth = 0
    for found in re.finditer(r"[()]", line[opened:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return opened + found.end()
    raise ValueError(f"no closing parenthesis in {line[opened : opened + 80]!r}")


def shapes(text: str) -> Iterator[Shape]:
    """The arrays in the text of a type.

    >>> [s.bytes for s in shapes("(bf16[3,100]{1,0:T(8,128)(2,1)}, s32[]{:T(128)S(6)})")]
    [2048, 4]
    """
    for found in re.finditer(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?", text):
        dtype, sizes, layout = found.groups()
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


def _functions(text: str) -> dict[int, tuple[str, ...]]:
    """The functions on each stack frame in the tables above the program."""

    def names(title: str) -> dict[str, str]:
        return dict(re.findall(r'^(\d+) "([^"]*)"', _table(text, title), re.M))

    files, functions = names("FileNames"), names("FunctionNames")
    places = {
        int(place): f"{files.get(file, '')}:{functions.get(function, '')}"
        for place, file, function in re.findall(
            r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+)", _table(text, "FileLocations"), re.M
        )
    }
    # Frames count from 1, and their parents from 1 higher: 1 is none.
    frames = {
        int(i): (int(place), int(parent) - 1)
        for i, place, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _table(text, "StackFrames"), re.M
        )
        if parent
    }

    def stack(frame: int) -> tuple[str, ...]:
        found = []
        while frame in frames:
            place, frame = frames[frame]
            found.append(places.get(place, ""))
        return tuple(found)

    return {frame: stack(frame) for frame in frames}


def _table(text: str, title: str) -> str:
    found = re.search(rf"^{title}\n(.*?)\n\n", text, re.M | re.S)
    return found[1] + "\n" if found else ""
