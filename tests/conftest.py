"""Strict JAX semantics for the whole suite: no silent dtype or rank promotion. And what makes it finish in time."""

import atexit
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

# Eight CPU devices let sharding tests run anywhere; set before JAX starts its backend.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A test runs a program once or a few times, so what LLVM would gain by optimising it is never won back. XLA's older
# emitters compile in half the time; 0.11 and later have no others, and refuse the flag.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version("jaxlib").startswith("0.10."),
)

# Nearly all of the time goes into compiling. What one worker compiled, the others and later tests load from here;
# workers inherit the name. Name a folder yourself to keep it for the next run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="mars-jax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

pytest_plugins = ("tests.selection",)

MAPS = Path("/proc/self/maps")


def pytest_configure(config):
    # JAX writes an entry in place: a worker that meets it half-written is to compile for itself.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache:UserWarning")


def pytest_runtest_teardown():
    """Drop what was compiled before the process runs out of memory maps.

    XLA maps three regions for every kernel, some hundreds for one decode loop, and Linux allows a process 65,530
    (vm.max_map_count). At the limit the next compilation dies of a segmentation fault, in whatever test that is.
    """
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
