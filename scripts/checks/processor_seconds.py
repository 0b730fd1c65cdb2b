"""Run a command and report the processor seconds of it and its children, and the memory of the largest process.

    python -m scripts.checks.processor_seconds python -m pytest -n auto -m "not slow"
    python -m scripts.checks.processor_seconds --keep scripts/results/checks.json --case "fast tests" COMMAND

The report is the last line on stderr; the exit status is the command's. If the command succeeds, `--keep` appends the
report to a file, with the date, the machine and the commit. On Linux, processes that outlived their parents count too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

from scripts import common

_ADOPT = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): orphans become children of this process instead of init."""


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="append the figures to this JSON file")
    parser.add_argument("--case", default="", help="what a page calls them")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    if not chosen.command:
        parser.error("expected a command")
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0)
    at, began = datetime.datetime.now(datetime.UTC), time.monotonic()
    status = subprocess.run(chosen.command, check=False).returncode
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = {
        "processor_seconds": round(used.ru_utime + used.ru_stime),
        "seconds": round(time.monotonic() - began),
        "largest_gib": round(used.ru_maxrss / 2**20, 2),
    }
    words = (
        "{processor_seconds} processor seconds in {seconds} seconds, the largest process {largest_gib} GiB"
    )
    print(words.format(**taken), file=sys.stderr)
    if chosen.keep and not status:
        kept = json.loads(chosen.keep.read_text()) if chosen.keep.exists() else []
        kept.append(
            {
                "case": chosen.case,
                **taken,
                **common.stamp(),
                **common.machine(),
                "date": at.isoformat(timespec="minutes"),
            }
        )
        kept[-1]["command"] = shlex.join(chosen.command)
        common.write(chosen.keep, kept)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
