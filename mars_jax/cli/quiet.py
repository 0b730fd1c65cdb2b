"""Functions that silence library messages on stderr. Call `quiet` before importing jax."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

_QUIET = {
    # Level 3 shows only fatal errors. Level 2 would also show XLA's alarms about slow compilations, which it logs as
    # errors.
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # huggingface_hub's progress bars would overwrite ours, which show the same downloads.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
_NO_TPU = {
    # Without a TPU, libtpu warns in five lines that it cannot find its host. These values, which only libtpu reads,
    # describe a machine with one chip and prevent the warning. JAX still chooses a different device.
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_SET_BY_JAX = ("TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY")
"""Variables that JAX sets on every machine, and that child processes inherit."""


def quiet() -> None:
    """Set the variables that silence jaxlib and libtpu, unless the environment sets them."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not _NO_TPU.keys() & os.environ.keys() and not may_have_tpu():
        os.environ.update(_NO_TPU)


def quiet_duplicates() -> None:
    """Hide errors that libraries log in addition to raising them. Only entry points of a process call this."""
    # Orbax and its threads log the traceback of an error that they also raise.
    for name in ("absl", "concurrent.futures"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    previous_hook = sys.unraisablehook

    def hook(problem: sys.UnraisableHookArgs) -> None:
        # After a failed save, TensorStore's callbacks report that the event loop is closed.
        if str(problem.exc_value) != "Event loop is closed":
            previous_hook(problem)

    sys.unraisablehook = hook


def may_have_tpu(root: Path = Path("/")) -> bool:
    """Return whether this machine may have a TPU. If so, libtpu must look for its host, although it prints messages.

    Args:
      root: root of the file system, for tests.
    """
    if any(name.startswith("TPU_") and name not in _SET_BY_JAX for name in os.environ):
        return True
    has_device_files = any(root.glob("dev/accel*")) or any(root.glob("dev/vfio/[0-9]*"))
    return "JAX_FORCE_TPU_INIT" in os.environ or has_device_files
