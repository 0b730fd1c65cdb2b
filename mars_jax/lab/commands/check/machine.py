"""The machine in a report: versions, devices and the settings of JAX. No names of hosts, users or folders."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import jax

from mars_jax import __version__

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "numpy", "transformers")
SETTINGS = (
    "MARS_JAX_PALLAS",
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "JAX_DEFAULT_MATMUL_PRECISION",
)
"""Variables that change what is compiled."""


def versions() -> dict[str, str | None]:
    """Versions of the packages that decide what runs; None for one that is not installed."""
    found: dict[str, str | None] = {"mars-jax": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def device() -> dict[str, Any]:
    """The first device of this process, on which everything is checked."""
    first = jax.local_devices()[0]
    memory = first.memory_stats() or {}
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "memory_bytes": memory.get("bytes_limit"),
        "driver": getattr(first.client, "platform_version", None),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }


def settings() -> dict[str, str]:
    """The variables of `SETTINGS` that are set."""
    return {name: os.environ[name] for name in SETTINGS if name in os.environ}
