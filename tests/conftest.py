"""Settings of every test run: strict JAX semantics, a compilation cache, time limits, and no silently missing package.

MARS_JAX_TESTS_MAY_LACK="torch" pytest    a skip because of any other missing package fails
"""

import collections
import contextlib
import ctypes
import gc
import hashlib
import importlib.metadata
import os
import re
import sys
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.helpers")

CACHE_LIMIT = 2 * 2**30
"""Bytes of compiled programs to keep when a run begins. The fast tests write 0.3 GB."""


def compilation_cache() -> str:
    """Return the cache folder for this jaxlib and these flags. First delete the oldest programs of all folders."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mars_jax" / "tests"
    key = f"{importlib.metadata.version('jaxlib')} {os.environ.get('XLA_FLAGS', '')}"
    files = []
    for path in home.rglob("*"):
        with contextlib.suppress(OSError):  # another run may have deleted it
            if path.is_file():
                stat = path.stat()
                files.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    excess = sum(size for _, size, _ in files) - CACHE_LIMIT
    for _, size, path in sorted(files):
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= size
    return str(home / hashlib.sha256(key.encode()).hexdigest()[:12])


# Eight CPU devices let sharding tests run anywhere. JAX reads these variables when it starts its backend.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Fewer malloc arenas: per-thread heaps of the workers keep fragments of freed memory.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")
# A test runs a program once or a few times, so LLVM optimisation does not pay off. XLA's older emitters compile in half
# the time, but jaxlib 0.11 and later refuse the flag. Programs in one part, without a concurrent schedule and without
# XNNPACK save another seventh.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_enable_concurrency_optimized_scheduler=false"
    " --xla_cpu_use_xnnpack=false"
    + " --xla_cpu_use_fusion_emitters=false"
    * importlib.metadata.version("jaxlib").startswith("0.10."),
)
# Recording source locations of operations makes lowering slower, and no test reads them.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# Compilation takes most of the time. Workers, later tests and later runs share compiled programs through this folder.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compilation_cache()
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Keep Python's bytecode there too. Otherwise, if pip installed without bytecode, every worker and every command that
# a test starts spends seconds compiling jax's sources.
sys.dont_write_bytecode = False
sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(
    Path(os.environ["JAX_COMPILATION_CACHE_DIR"], "python")
)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import jax  # noqa: E402  # it reads the variables above

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def standard_promotion():
    """Allow standard dtype promotion: optax mixes its integer step counter with floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True, scope="session")
def little_memory():
    """Keep 4-bit weights packed, as on a CPU with little free memory."""
    importlib.import_module("mars_jax.hub.load").free_bytes = lambda: 0


@pytest.fixture
def own_cache(tmp_path):
    """Keep programs and other results in an empty folder during the test. Return the folder."""
    shared, path = jax.config.jax_compilation_cache_dir, tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", str(path))
    yield path
    jax.config.update("jax_compilation_cache_dir", shared)


def pytest_configure(config):
    # JAX writes cache entries in place. A worker that reads half an entry compiles the program itself.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache:UserWarning")


# Time limits, and the distribution of files over workers.

SECONDS = {"fast": 180, "slow": 900}
"""Wall-clock limit of a test, about ten times the slowest test's time on a quiet machine."""
SHARED_FIXTURES = {f"tests/lab/evaluate/test_{name}.py": "benchmark" for name in ("benchmark", "page")}
"""Files that run on one worker because they share an expensive fixture."""
LIBTPU, LIBTPU_FOLDERS = "libtpu", ("tests/tpu/", "tests/lab/planning/")
"""Folders whose tests load libtpu, which takes hundreds of megabytes: they run last, on one worker."""


def scope_of(test_id):
    """Return the scope of a test: tests of one scope run on the same worker."""
    file = test_id.partition("::")[0]
    return LIBTPU if file.startswith(LIBTPU_FOLDERS) else SHARED_FIXTURES.get(file, file)


@pytest.hookimpl(tryfirst=True)  # before -m, -k and --group deselect
def pytest_collection_modifyitems(config, items):
    if config.getoption("-m") == "not slow":
        # Start the largest scopes first, so that the run does not end with one of them on a single worker.
        sizes = collections.Counter(scope_of(item.nodeid) for item in items)
        items.sort(key=lambda item: (scope_of(item.nodeid) == LIBTPU, -sizes[scope_of(item.nodeid)]))
    for item in items:
        if config.pluginmanager.hasplugin("timeout") and not item.get_closest_marker("timeout"):
            speed = "slow" if item.get_closest_marker("slow") else "fast"
            item.add_marker(pytest.mark.timeout(SECONDS[speed]))


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """Run the fast tests of a scope on one worker, where they reuse traced functions and fixtures of the module."""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope_of(nodeid)

    if config.getoption("-m") != "not slow":
        return None
    config.option.loadscopereorder = False  # keep the order of `pytest_collection_modifyitems`
    return ByScope(config, log)


# A missing package turns tests into skips, and a run of skips looks green.

MAY_LACK = "MARS_JAX_TESTS_MAY_LACK"
MISSING_PACKAGE = re.compile("could not import|No module named|pip install")
"""Matches the reason of every skip because of a missing package, in pytest's words and ours."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _refuse_skip((yield))


def _refuse_skip(report):
    """Fail the report of a skip because of a missing package that `MAY_LACK` does not name."""
    if MAY_LACK not in os.environ or not report.skipped or hasattr(report, "wasxfail"):
        return report
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    may_lack = os.environ[MAY_LACK].split()
    if MISSING_PACKAGE.search(reason) and not any(package in reason for package in may_lack):
        report.outcome = "failed"
        report.longrepr = f"skipped, and {MAY_LACK} is {os.environ[MAY_LACK]!r}: {reason}"
    return report


# Memory of a worker.

MEMORY_LIMIT = 0.95 * 2**30
"""Bytes of resident memory above which a worker drops its compiled programs."""
LEAST_GROWTH = 0.2 * 2**30
"""Minimum growth in bytes since the last drop, so that a large baseline does not trigger a drop per test."""
_memory_after_drop = 0.0


def pytest_collection_finish():
    """Exempt all objects that exist before the first test from garbage collection, which slows down tracing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_runtest_teardown():
    """Drop compiled programs before a worker grows large.

    A compiled decode loop takes some 20 MB and hundreds of memory maps, and Linux allows a process 65,530
    (vm.max_map_count). The cache folder still has the programs. glibc returns freed memory only on request.
    """
    global _memory_after_drop
    if _resident_bytes() > max(MEMORY_LIMIT, _memory_after_drop + LEAST_GROWTH):
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        _memory_after_drop = _resident_bytes()


def _resident_bytes() -> float:
    """Return the resident memory of this process on Linux, and 0 elsewhere."""
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0.0
