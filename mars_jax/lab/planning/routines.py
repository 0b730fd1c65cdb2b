"""Which routine of a schedule an HLO instruction runs.

libtpu compiles equal instructions once, and names the routine after the first. So an instruction without a routine of
its own runs that of an instruction that is equal but for its names.
"""

from __future__ import annotations

import re

from mars_jax.lab.planning.bundles import Routine, Schedule
from mars_jax.lab.planning.hlo import Computation, Instruction, Module


class Routines:
    """The routines of a program, by instruction."""

    def __init__(self, module: Module, schedule: Schedule):
        self.module = module
        self._own = schedule.routines
        self._equal: dict[str, Routine] = {}
        self._alike: dict[str, Routine] = {}
        self._texts: dict[str, str] = {}
        for computation in module.computations.values():
            for instruction in computation.instructions.values():
                routine = self._own.get(instruction.name)
                if routine is not None:
                    self._equal.setdefault(self._text(computation, instruction), routine)
                    self._alike.setdefault(self._outside(computation, instruction), routine)

    def of(self, computation: Computation, instruction: Instruction) -> Routine | None:
        return (
            self._own.get(instruction.name)
            or self._equal.get(self._text(computation, instruction))
            or self._alike.get(self._outside(computation, instruction))
        )

    def _outside(self, computation: Computation, instruction: Instruction) -> str:
        """The outside of an instruction: opcode, operands and results with their layouts."""
        operands = [computation.instructions[name].shapes for name in instruction.operands]
        return f"{instruction.opcode} {operands} {instruction.shapes}"

    def _text(self, computation: Computation, instruction: Instruction) -> str:
        """Equal for instructions that differ in names, metadata and the compiler's notes only."""
        inside = [self._body(name) for name in instruction.calls]
        return f"{self._outside(computation, instruction)} {_attributes(instruction)} {inside}"

    def _body(self, name: str) -> str:
        if name not in self._texts:
            computation = self.module.computations[name]
            numbers = {inner: k for k, inner in enumerate(computation.instructions)}
            self._texts[name] = "\n".join(
                f"{inner.opcode} {inner.shapes} {[numbers[o] for o in inner.operands]} {_attributes(inner)} "
                f"{[self._body(called) for called in inner.calls]}"
                for inner in computation.instructions.values()
            )
        return self._texts[name]


def _attributes(instruction: Instruction) -> str:
    text = re.split(r", (?:metadata|backend_config|frontend_attributes)=", instruction.rest)[0]
    return re.sub(r"(%[\w.\-]+|channel_id=\d+)", "", text)
