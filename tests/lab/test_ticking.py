"""What work that counts itself tells whoever waits."""

from __future__ import annotations

import itertools
import random
import time

from mars_jax.cli import progress
from mars_jax.cli.progress import heartbeat
from mars_jax.lab.ticking import Work, ticking


def test_ticks_are_lines_at_the_end_and_in_the_heartbeat(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.05)
    with heartbeat(), ticking("rows") as tick:
        tick("arithmetic, exact", 3, 9)
        time.sleep(0.12)
        tick("arithmetic, mars", 9, 9)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "rows: 3 of 9 (arithmetic, exact)"
    assert said[-1] == "arithmetic, mars: 9 of 9 rows"


def simulated(groups=25, matching=40):
    """(share done, estimated, true) seconds left of a run whose arms differ tenfold in cost and whose groups differ."""
    costs = {"autoregressive": 10.0, "exact": 4.0, "mars": 3.0, "matched": 3.0, "control": 12.0}
    draw = random.Random(0)
    # Each a kind, seconds, and whether a clock of its own has them: the match first, then batches of all arms in turn,
    # and last what is not timed.
    run = [("mars", 4 * costs["mars"] * draw.uniform(0.7, 1.3), True) for _ in range(3)]
    run += [
        (arm, 4 * cost * draw.uniform(0.7, 1.3), True) for _ in range(groups) for arm, cost in costs.items()
    ]
    run += [("exact", 4 * costs["exact"], False) for _ in range(8)]
    planned = dict.fromkeys(costs, 4 * groups)
    planned["mars"] += matching
    planned["exact"] += 32
    said = []
    work = Work(planned, lambda *told: said.append(told[1:]))
    for number, (arm, seconds, timed) in enumerate(run):
        if number == 3:
            work.skip("mars", matching - 12)
        work.add(arm, 4, arm, seconds if timed else 0.0)
    assert said[-1] == (len(run) * 4, len(run) * 4, 0.0)
    true = [*itertools.accumulate(seconds for _, seconds, _ in reversed(run))][-2::-1]
    return [(done / of, left, t) for (done, of, left), t in zip(said[:-1], true, strict=True)], costs


def test_the_time_left_of_arms_of_different_cost_holds_within_a_quarter():
    said, costs = simulated()
    after = said[3 + len(costs) :]  # every arm has run once
    assert all(abs(left - true) <= true / 4 for _, left, true in after)
    # The pace of all arms together does not know that what comes last is cheap.
    whole = after[0][2] / (1 - after[0][0])
    assert any(abs((1 - share) * whole - true) > true / 4 for share, _, true in after)
