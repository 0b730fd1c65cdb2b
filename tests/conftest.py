"""Strict JAX semantics for the whole suite: no silent dtype or rank promotion. And what makes it finish in time."""

import contextlib
import ctypes
import gc
import importlib.metadata
import os
from pathlib import Path

from tests import compiled

# Eight CPU devices let sharding tests run anywhere; set before JAX starts its backend.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Workers, which begin after this: heaps for every thread keep pieces of what was freed.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")
# A test runs a program once or a few times, so what LLVM would gain by optimising it is never won back. XLA's older
# emitters compile in half the time; 0.11 and later have no others, and refuse the flag. Programs in one part, without
# a schedule for several cores and without XNNPACK save a seventh more.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_enable_concurrency_optimized_scheduler=false"
    " --xla_cpu_use_xnnpack=false"
    + " --xla_cpu_use_fusion_emitters=false"
    * importlib.metadata.version("jaxlib").startswith("0.10."),
)

# Nobody reads where in the source an operation of a program comes from, and to write it down takes a part of lowering.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# Nearly all of the time goes into compiling. What one worker compiled, the others, later tests and later runs load from
# a folder; workers inherit its name.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.folder()
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# What Python compiles is kept there too: pip installs without bytecode here, and some machines forbid to write it
# beside the source. Every worker, and every command that a test starts, would compile jax for seconds.
os.environ["PYTHONPYCACHEPREFIX"] = compiled.bytecode(Path(os.environ["JAX_COMPILATION_CACHE_DIR"], "python"))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

pytest_plugins = ("tests.selection", "tests.slow_share", "tests.changed")


def pytest_configure(config):
    # JAX writes an entry in place: a worker that meets it half-written is to compile for itself.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache:UserWarning")


LARGEST = 0.95 * 2**30
"""Bytes of memory above which a worker drops its programs: some hundred megabytes below what it may take."""
LEAST = 0.2 * 2**30
"""Bytes that it has to have grown by since, so that what is no program does not make every test drop them."""
_held = [0.0]


def pytest_collection_finish():
    """What is there before the first test stays: the collector of garbage need not look at it in every trace."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_runtest_teardown():
    """Drop what was compiled before a worker grows large.

    Each decode loop holds some 20 MB and hundreds of memory maps, of which Linux allows a process 65,530
    (vm.max_map_count). What is dropped loads from the folder where it is wanted again. The allocator of glibc keeps
    what XLA frees until it is told to give it back.
    """
    size = _memory()
    if size > max(LARGEST, _held[0] + LEAST):
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        _held[0] = _memory()


def _memory() -> float:
    """Bytes of this process that are in memory, on Linux; elsewhere 0."""
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0.0
