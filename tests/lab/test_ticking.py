"""What work that counts itself tells whoever waits."""

from __future__ import annotations

import time

from mars_jax.cli import progress
from mars_jax.cli.progress import heartbeat
from mars_jax.lab.ticking import ticking


def test_ticks_are_lines_at_the_end_and_in_the_heartbeat(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.05)
    with heartbeat(), ticking("rows") as tick:
        tick("arithmetic, exact", 3, 9)
        time.sleep(0.12)
        tick("arithmetic, mars", 9, 9)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "rows: 3 of 9 (arithmetic, exact)"
    assert said[-1] == "arithmetic, mars: 9 of 9 rows"
