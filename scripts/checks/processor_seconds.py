"""Run a command, and report the processor seconds of all its processes and the memory use of the largest process.

    python -m scripts.checks.processor_seconds python -m pytest -n auto -m "not slow"
    python -m scripts.checks.processor_seconds --keep scripts/results/checks.json --case "fast tests" COMMAND

The report is the last line on stderr, and the exit status is the command's. If the command succeeds, `--keep`
appends the report to a file, with the date, the machine and the commit. On Linux, processes that outlived their parents
are also counted.
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
    parser.add_argument("--keep", type=Path, metavar="FILE", help="append the results to this JSON file")
    parser.add_argument("--case", default="", help="name of the row on the page")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("expected a command")
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0)
    date, began = datetime.datetime.now(datetime.UTC), time.monotonic()
    status = subprocess.run(args.command, check=False).returncode
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "processor_seconds": round(used.ru_utime + used.ru_stime),
        "seconds": round(time.monotonic() - began),
        "largest_gib": round(used.ru_maxrss / 2**20, 2),
    }
    text = "{processor_seconds} processor seconds in {seconds} seconds, the largest process {largest_gib} GiB"
    print(text.format(**figures), file=sys.stderr)
    if args.keep and not status:
        rows = json.loads(args.keep.read_text()) if args.keep.exists() else []
        row = {"case": args.case} | figures | common.stamp() | common.machine()
        row |= {"date": date.isoformat(timespec="minutes"), "command": shlex.join(args.command)}
        common.write(args.keep, [*rows, row])
    raise SystemExit(status)


if __name__ == "__main__":
    main()
