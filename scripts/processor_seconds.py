"""Run a command, and say how many processor seconds it and its children took and how large the largest of them grew.

    python scripts/processor_seconds.py python -m pytest -n auto -m "not slow"

The line comes last, on stderr; the exit status is the command's. On Linux, processes
that outlived their parents are counted as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import time

_ADOPT = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): orphans become children of this process and not of init."""


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0)
    began = time.monotonic()
    status = subprocess.run(sys.argv[1:], check=False).returncode
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = f"{used.ru_utime + used.ru_stime:.0f} processor seconds in {time.monotonic() - began:.0f} seconds"
    print(f"{told}, the largest process {used.ru_maxrss / 2**20:.2f} GiB", file=sys.stderr)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
