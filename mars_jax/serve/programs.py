"""A cache of compiled programs on disk, from which later processes load programs without tracing them.

To look up a program in JAX's own cache, the program must first be traced. Here, the key is computed from everything
that tracing depends on: the source of this package, the decoder with the variables that its functions close over, the
shapes of the arguments, versions, settings and the machine. If one of these, such as a user's function, cannot be
described exactly, the program is compiled as usual. Loading a program runs code from its file, so programs are stored
only in the user's own cache folder.

Tested against the results of the process that compiled the program (tests/serve/test_programs.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import io
import os
import pickle
import sys
import time
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
import ml_dtypes
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from mars_jax.core.decoder import Decoder
from mars_jax.utils.compilations import keep_bytes, kept_bytes

_SOURCES = ("mars_jax", "kernels_pallas")
_DESCRIBED = {*_SOURCES, "jax", "jaxlib", "numpy", "ml_dtypes", *sys.stdlib_module_names}
"""Modules whose code the key covers, by a hash of their source or by their version."""
_RECENT, _STARTED = 60.0, time.time()
"""`_STARTED` is the time at which this module was imported. If the source changed after that time, or less than
`_RECENT` seconds before, no program is stored or loaded, because imported modules may be older than their files."""

_programs: dict[str, Callable[..., Any]] = {}
_is_enabled = False


def keep_programs(folder: str) -> None:
    """Store this process's programs in a folder.

    A folder that belongs to another user is ignored, because loading a file can run arbitrary code. Call this only in
    commands, whose imported modules match the files on disk.
    """
    global _is_enabled
    with contextlib.suppress(OSError, AttributeError):  # no user ids on Windows
        os.makedirs(folder, exist_ok=True)
        _is_enabled = os.stat(folder).st_uid == os.getuid()
    # Leave out source positions, which account for a fifth of a program's file size and of its load time.
    jax.config.update("jax_include_full_tracebacks_in_locations", False)


def program(function: Any, decoder: Decoder, *args: Any) -> Callable[..., Any]:
    """Turn a jitted function of (decoder, *args) into a function of `args`, compiled for arguments of these shapes."""
    is_enabled = _is_enabled and jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    if not is_enabled or jax.default_backend() != "cpu" or jax.device_count() > 1:
        return functools.partial(function, decoder)
    try:
        key = _key(function, decoder, args)
    except Exception:  # if an object cannot be pickled, the exception may be of any type
        return functools.partial(function, decoder)
    if key not in _programs:
        _programs[key] = _load(key, args) or _compile(key, function, decoder, args)
    return _programs[key]


class _Description(pickle.Pickler):
    """A pickler whose output describes objects completely. The output is never unpickled."""

    def reducer_override(self, part: Any) -> Any:
        module = getattr(part, "__module__", None) or "builtins"
        if module.partition(".")[0] not in _DESCRIBED:
            raise pickle.PicklingError(f"the source of {part} is not part of the key")
        if isinstance(part, types.FunctionType):
            code, cells = part.__code__, [cell.cell_contents for cell in part.__closure__ or ()]
            place = (module, part.__qualname__, code.co_firstlineno, code.co_code, tuple(code.co_positions()))
            return tuple, ([place, part.__defaults__, part.__kwdefaults__, cells],)
        if isinstance(part, jax.stages.Wrapped):
            return tuple, ([inspect.unwrap(part, stop=lambda f: isinstance(f, types.FunctionType))],)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            # Describe only the fields, because the instance also stores cached properties.
            return tuple, ([type(part), *(getattr(part, field.name) for field in dataclasses.fields(part))],)
        return NotImplemented


def description(part: Any) -> bytes:
    """Describe an object as bytes, which are the same in every process for equal objects.

    Raises:
      Exception: a part of the object cannot be described, for example a function outside this package.
    """
    file = io.BytesIO()
    pickler = _Description(file)
    # Without a memo, the bytes do not depend on whether equal objects are identical.
    pickler.fast = True
    pickler.dump(part)
    return file.getvalue()


def _key(function: Any, decoder: Decoder, args: tuple[Any, ...]) -> str:
    shapes = jax.tree.map(lambda x: repr(jax.typeof(x)), args)
    versions = [sys.version, *(module.__version__ for module in (jax, jaxlib, np, ml_dtypes))]
    environment = {name: text for name, text in os.environ.items() if name.startswith(("XLA_", "MARS_JAX_"))}
    processors = getattr(os, "sched_getaffinity", lambda _: os.cpu_count())(0), _cpu_features()
    settings = [versions, repr(sorted(jax.config.values.items())), environment, processors]
    parts = (_source_digest(), settings, function.__wrapped__, decoder, shapes)
    return hashlib.sha256(description(parts)).hexdigest()


def _cpu_features() -> list[str]:
    """Return the CPU features of this machine, if the system lists them. A program may use any of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return list(os.uname())
    return [line for line in dict.fromkeys(lines) if line.startswith(("flags", "Features", "model name"))]


@functools.cache
def _source_digest() -> str:
    """Return a hash of this package's source files.

    Raises:
      ValueError: a file changed too recently; see `_RECENT`.
    """
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for path in sorted(file for package in _SOURCES for file in (root / package).rglob("*.py")):
        if max(path.stat().st_mtime, path.stat().st_ctime) > _STARTED - _RECENT:
            raise ValueError(f"{path} has just changed")
        digest.update(b"%s %d " % (bytes(path.relative_to(root)), path.stat().st_size) + path.read_bytes())
    return digest.hexdigest()


def _load(key: str, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Load the program that an earlier process stored; return None if there is none."""
    with contextlib.suppress(Exception):  # a missing or damaged file may raise any exception
        executable, outputs = pickle.loads(zlib.decompress(kept_bytes("programs", key) or b""))
        structures = jax.tree.structure((args, {})), jax.tree.structure(outputs)
        return serialize_executable.deserialize_and_load(executable, *structures)
    return None


def _compile(key: str, function: Any, decoder: Decoder, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Compile a program, and store it for later processes."""
    # XLA cannot serialize a program that was loaded from JAX's cache, so compile without that cache.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        compiled = function.lower(decoder, *args).compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()

    def packed() -> bytes:
        executable, _, outputs = serialize_executable.serialize(compiled)
        # Pickle a tree of numbers that has the outputs' structure, because the structure itself cannot be pickled.
        return zlib.compress(
            pickle.dumps((executable, jax.tree.unflatten(outputs, range(outputs.num_leaves)))), 1
        )

    with contextlib.suppress(Exception):  # the outputs' tree may contain objects that cannot be pickled
        if _source_digest.__wrapped__() == _source_digest():  # otherwise, a source file has changed
            keep_bytes(packed, "programs", key)
    return compiled
