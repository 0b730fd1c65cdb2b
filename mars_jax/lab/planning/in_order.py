"""The schedule run in order: each instruction takes the longer of its bytes over the bandwidth and its bundles over the
clock, and copies that were started ahead use the bandwidth that is left. What was sent ahead to another device is under
way meanwhile.

The estimate of `planning.estimate` lets a part's copies and bundles overlap without loss; this one only as far as the
compiler arranged it. A better schedule could win the difference between the two.
"""

from __future__ import annotations

from collections import defaultdict

from mars_jax.lab.planning.constants import Speed, collective_seconds
from mars_jax.lab.planning.cost import COPIES, Items, Loop, Op, Step, Wait


def seconds_in_order(step: Step, speed: Speed, bandwidth: float) -> tuple[dict[str, float], dict[str, float]]:
    """By part, without the instructions' own time; and what of it waits for what devices have sent ahead.

    Args:
      step: from `cost.read_step`.
      speed: of the generation.
      bandwidth: of a device's HBM, bytes a second.
    """
    clock = _Clock(speed, bandwidth)
    clock.run(step.items)
    for part, bundles in step.overhead.items():
        clock.parts[part] += bundles / speed.clock
    return dict(clock.parts), dict(clock.waited)


class _Clock:
    """Runs the schedule in order, with one channel to HBM and one for each way to another device. Copies that were
    started wait in a queue, and are served while an instruction leaves the channel idle; what was sent is under way all
    the time. Who needs one that is not there waits for it."""

    def __init__(self, speed: Speed, bandwidth: float):
        self.speed, self.bandwidth = speed, bandwidth
        self.parts: dict[str, float] = defaultdict(float)
        self.waited: dict[str, float] = defaultdict(float)
        self.queue: dict[str, tuple[Op, float]] = {}  # in order: a copy, and the seconds that it still needs
        self.sent: dict[str, dict[str, tuple[Op, float]]] = defaultdict(dict)  # the same, by the way

    def run(self, items: Items) -> None:
        """A loop's turns are alike: one is run, and what it takes is counted for all."""
        under_way = set(self.queue)
        for item in items:
            if isinstance(item, Loop):
                self.run(item.body)
            elif isinstance(item, Wait):
                self._wait(item.start)
            else:
                self._op(item)
        # What a turn started has to be there before the next one.
        for name in [name for name in self.queue if name not in under_way]:
            self._wait(name)

    def _op(self, op: Op) -> None:
        moving = sum(op.traffic) / self.bandwidth
        if op.opcode in COPIES:
            if moving:
                self.queue[op.name] = op, moving
            return
        busy = max(op.bundles / self.speed.clock, op.flops / self.speed.peak_bf16)
        if op.devices:
            busy = collective_seconds(op.opcode, op.sent, op.received, op.devices, self.speed.link)
        if op.way:
            self.sent[op.way][op.name] = op, busy
            return
        self._pass(op, max(moving, busy))
        self._serve(max(0.0, busy - moving), op.times)

    def _pass(self, op: Op, seconds: float) -> None:
        """Let time pass for an instruction, all of its turns, while what was sent is under way."""
        self.parts[op.part] += seconds * op.times
        for way in self.sent.values():
            _served(way, seconds, op.times)

    def _serve(self, idle: float, times: int) -> None:
        _served(self.queue, idle, times)

    def _wait(self, name: str) -> None:
        """Copies are served in order, so that those before it come first."""
        for way in self.sent.values():
            if name in way:
                for op, left in _until(way, name):
                    self._pass(op, left)
                    self.waited[op.part] += left * op.times
                return
        for op, left in _until(self.queue, name):
            self._pass(op, left)


Queue = dict[str, tuple[Op, float]]


def _served(queue: Queue, idle: float, times: int) -> None:
    for name, (op, left) in list(queue.items()):
        # All turns of a loop serve what was started before it.
        turns = max(1, times // op.times)
        served = min(idle * turns, left)
        idle -= served / turns
        left -= served
        if left > 0:
            queue[name] = op, left
            return
        del queue[name]


def _until(queue: Queue, name: str) -> list[tuple[Op, float]]:
    """Take what is before a name, and it, out of a queue."""
    if name not in queue:
        return []
    names = list(queue)
    return [queue.pop(other) for other in names[: names.index(name) + 1]]
