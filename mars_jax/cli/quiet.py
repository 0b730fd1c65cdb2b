"""Silence for what libraries print on stderr. Call `quiet` before jax is imported."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

_GOOGLE = "0x1ae0"
_NOT_A_TPU = ("0x0042",)  # Google's network card, in every machine of its cloud
_QUIET = {
    # Level 3 is fatal errors alone: at 2 XLA's alarms about slow compilations still come, as errors.
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Bars of huggingface_hub would write over ours, which say the same of a download.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
_NO_TPU = {
    # libtpu looks for the host it runs on, and complains in five lines where it finds none. Both values are what a
    # machine with one chip would have, and are read by nothing else: JAX finds no chip and takes the next device.
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_JAX_SETS = ("TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY")  # also where there is no TPU; children inherit them


def quiet() -> None:
    """Set what keeps jaxlib and libtpu quiet, unless the environment says something about it already."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not _NO_TPU.keys() & os.environ.keys() and not may_have_tpu():
        os.environ.update(_NO_TPU)


def quiet_duplicates() -> None:
    """Hide errors that libraries log in addition to raising them. Only the entry points of the process call it."""
    # Orbax and its threads log the traceback of an error that they also raise.
    for name in ("absl", "concurrent.futures"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    previous = sys.unraisablehook

    def hook(problem: Any) -> None:
        # TensorStore's callbacks complain about the event loop that a failed save has closed.
        if str(problem.exc_value) != "Event loop is closed":
            previous(problem)

    sys.unraisablehook = hook


def may_have_tpu(root: Path = Path("/")) -> bool:
    """Tell whether this machine may have a TPU: then libtpu must find its host by itself, with whatever it prints.

    Args:
      root: of the file system, for tests.
    """
    told = [name for name in os.environ if name.startswith("TPU_") and name not in _JAX_SETS]
    if told or "JAX_FORCE_TPU_INIT" in os.environ:
        return True
    if any(root.glob("dev/accel*")) or any(root.glob("dev/vfio/[0-9]*")):
        return True
    return any(_is_tpu(device) for device in root.glob("sys/bus/pci/devices/*"))


def _is_tpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "device"))
    except OSError:
        return False
    return vendor == _GOOGLE and kind not in _NOT_A_TPU
