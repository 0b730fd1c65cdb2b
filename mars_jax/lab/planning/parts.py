"""To which part of the step an instruction of the compiled program belongs.

`jax.named_scope` names the parts in `core.decode`, the models and the drafters. A program without those names (of an
older version) is read by the functions on the source frames; what the compiler made itself belongs to the part that
uses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from mars_jax.lab.planning.hlo import Computation, Instruction, Module

PHASES = ("draft", "target", "verify", "update", "emit", "commit")
COMPONENTS = ("mask", "attention", "mlp", "unembed", "embed", "fuse")
OTHER = "other"

# Of "file:function", for programs without names. The first that fits an entry of the frame, phases outermost first.
_PHASE_FUNCTIONS = (
    ("draft", r"drafters/.*propose$"),
    ("update", r"drafters/.*update$"),
    ("commit", r":(commit|_commit)$"),
    ("emit", r"(metrics\.py:|:_emit$)"),
    ("verify", r"/verify/"),
    ("target", r"(transformer\.py:(_forward|.*unembed)|tree\.py:attention_mask)$"),
)
_COMPONENT_FUNCTIONS = (
    ("mask", r"(visible\.py:|:attention_mask|:window_mask|:_mask|:dense_mask|:_seen$|:_visible$)"),
    ("attention", r":(attention|attend|rotate|angles)$"),
    ("mlp", r":(_mlp|gated_mlp|experts_mlp)$"),
    ("unembed", r":(.*\.)?_?unembed$"),
    ("embed", r":_?embed$"),
    ("fuse", r":fuse$"),
)


def part(op_name: str, functions: Iterable[str] = ()) -> str | None:
    """The part that a name and a stack of functions tell of: "target/mlp", "verify", or None.

    >>> part("jit(run)/while/body/target/layer3/attention/dot_general")
    'target/attention'
    >>> part("jit(run)/while/body/draft/while/body/level/mask/or"), part("jit(run)/while/cond/not")
    ('draft/mask', None)
    >>> part("", ["models/layers.py:gated_mlp", "models/transformer.py:_forward", "core/decode.py:step"])
    'target/mlp'
    """
    words = [re.sub(r"^(?:\w+\()+|\)+$", "", word) for word in op_name.split("/")]
    phase = next((word for word in words if word in PHASES), None)
    if phase is not None:
        after = words[words.index(phase) :]
        component = next((word for word in COMPONENTS if word in after), None)
        return phase if component is None else f"{phase}/{component}"
    functions = list(functions)
    # Outermost first: a drafter's model is also a transformer.
    for phase, pattern in _PHASE_FUNCTIONS:
        if any(re.search(pattern, function) for function in functions):
            if (component := next((word for word in COMPONENTS if word in words), None)) is not None:
                return f"{phase}/{component}"
            for component, inner in _COMPONENT_FUNCTIONS:
                if any(re.search(inner, function) for function in functions):
                    return f"{phase}/{component}"
            return phase
    return None


class Parts:
    """The parts of a module's instructions."""

    def __init__(self, module: Module):
        self.module = module
        self._found: dict[tuple[str, str], str | None] = {}

    def of(self, computation: Computation, instruction: Instruction) -> str:
        """Its own name, else that of what it runs, else of who uses it, else of what it uses."""
        return (
            self._told(computation, instruction)
            or self._near(computation, instruction, lambda i: computation.users[i.name])
            or self._carried(computation, instruction)
            or self._near(
                computation, instruction, lambda i: [computation.instructions[name] for name in i.operands]
            )
            or OTHER
        )

    def _told(self, computation: Computation, instruction: Instruction) -> str | None:
        key = computation.name, instruction.name
        if key not in self._found:
            self._found[key] = self._own(instruction) or self._inside(instruction)
        return self._found[key]

    def _own(self, instruction: Instruction) -> str | None:
        functions = self.module.functions.get(instruction.frame or 0, ())
        return part(instruction.op_name, functions)

    def _inside(self, instruction: Instruction) -> str | None:
        if instruction.opcode not in ("fusion", "call", "async-start"):
            return None
        for name in instruction.calls:
            called = self.module.computations[name]
            for inner in [called.root, *reversed(called.instructions.values())]:
                found = self._own(inner)
                if found:
                    return found
        return None

    def _carried(self, computation: Computation, instruction: Instruction) -> str | None:
        """The part that uses a value which a loop takes along, into its body or into its next turn."""
        seen: set[tuple[str, str]] = set()
        waiting = [(computation, instruction)]
        while waiting:
            inside, value = waiting.pop(0)
            if (inside.name, value.name) in seen:
                continue
            seen.add((inside.name, value.name))
            for user in inside.users[value.name]:
                found = self._told(inside, user) if user.opcode not in ("while", "tuple") else None
                if found:
                    return found
                if user.opcode == "tuple":
                    waiting += self._received(inside, user, user.operands.index(value.name))
                elif user.opcode not in ("while", "conditional"):
                    waiting.append((inside, user))
        return None

    def _received(
        self, computation: Computation, carry: Instruction, place: int
    ) -> list[tuple[Computation, Instruction]]:
        """The instructions by which a loop's body takes entry `place` of a tuple."""
        bodies = [computation] if carry.is_root else []
        for loop in computation.users[carry.name]:
            if loop.opcode == "while":
                bodies.append(self.module.computations[loop.attribute("body") or ""])
        return [
            (body, inner)
            for body in bodies
            for inner in body.instructions.values()
            if inner.opcode == "get-tuple-element"
            and inner.attribute("index") == str(place)
            and body.instructions[inner.operands[0]].opcode == "parameter"
        ]

    def _near(
        self,
        computation: Computation,
        instruction: Instruction,
        neighbours: Callable[[Instruction], list[Instruction]],
    ) -> str | None:
        """Breadth first; loops and tuples tie everything to everything, so the search ends there."""
        seen, layer = {instruction.name}, [instruction]
        while layer:
            following = []
            for current in layer:
                for other in neighbours(current):
                    if other.name in seen:
                        continue
                    seen.add(other.name)
                    found = self._told(computation, other)
                    if found:
                        return found
                    if other.opcode not in ("tuple", "while", "conditional", "parameter", "constant"):
                        following.append(other)
            layer = following
        return None
