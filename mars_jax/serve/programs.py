"""Compiled programs that later processes load without tracing them.

JAX's own cache must trace a program to look it up. The key here is instead everything that tracing depends on: the
source of this package, the decoder with the variables that its functions close over, the shapes of the arguments,
versions, settings and the machine. If any part has no exact description, such as a user's function, the program is
compiled as usual. Loading a program runs code from its file, so programs are only kept in the user's own cache folder.

Tested against the process that compiled them (tests/serve/test_programs.py).
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
"""Modules whose code a key describes by its source or its version."""
_RECENT, _STARTED = 60.0, time.time()
"""No program is kept or loaded if the source changed after `_STARTED`, the time of this import, or less than `_RECENT`
seconds before: modules may be older than their files."""

_programs: dict[str, Callable[..., Any]] = {}
_is_enabled = False


def keep_programs(folder: str) -> None:
    """Keep the programs of this process in a folder, unless it belongs to another user, whose code a file could run.

    Only for commands, whose modules match the files on disk.
    """
    global _is_enabled
    with contextlib.suppress(OSError, AttributeError):  # no user ids on Windows
        os.makedirs(folder, exist_ok=True)
        _is_enabled = os.stat(folder).st_uid == os.getuid()
    # Leave out source positions, which make up a fifth of a program's file and of the time to load it.
    jax.config.update("jax_include_full_tracebacks_in_locations", False)


def program(function: Any, decoder: Decoder, *args: Any) -> Callable[..., Any]:
    """Return a jitted function of (decoder, *args), compiled for these arguments, as a function of `args`."""
    is_enabled = _is_enabled and jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    if not is_enabled or jax.default_backend() != "cpu" or jax.device_count() > 1:
        return functools.partial(function, decoder)
    try:
        key = _key(function, decoder, args)
    except Exception:  # pickle raises nothing narrower if it cannot describe an object
        return functools.partial(function, decoder)
    if key not in _programs:
        _programs[key] = _load(key, args) or _compile(key, function, decoder, args)
    return _programs[key]


class _Description(pickle.Pickler):
    """Pickler whose bytes describe objects completely. They are never unpickled."""

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
            # Only the fields: the instance also holds cached properties.
            return tuple, ([type(part), *(getattr(part, field.name) for field in dataclasses.fields(part))],)
        return NotImplemented


def description(part: Any) -> bytes:
    """Return bytes that are equal in all processes for equal objects.

    Raises:
      Exception: an object cannot be described, for example a function outside this package.
    """
    file = io.BytesIO()
    pickler = _Description(file)
    # Without a memo, the bytes do not depend on which equal objects are the same object.
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
    """Return the instructions that this machine supports, if the system lists them; a program may use any of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return list(os.uname())
    return [line for line in dict.fromkeys(lines) if line.startswith(("flags", "Features", "model name"))]


@functools.cache
def _source_digest() -> str:
    """Return a digest of this package's source files.

    Raises:
      ValueError: a file has just changed.
    """
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for path in sorted(file for package in _SOURCES for file in (root / package).rglob("*.py")):
        if max(path.stat().st_mtime, path.stat().st_ctime) > _STARTED - _RECENT:
            raise ValueError(f"{path} has just changed")
        digest.update(b"%s %d " % (bytes(path.relative_to(root)), path.stat().st_size) + path.read_bytes())
    return digest.hexdigest()


def _load(key: str, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return the program that an earlier process kept; None if there is none."""
    with contextlib.suppress(Exception):  # there is no file, or it is damaged and may raise anything
        executable, outputs = pickle.loads(zlib.decompress(kept_bytes("programs", key) or b""))
        structures = jax.tree.structure((args, {})), jax.tree.structure(outputs)
        return serialize_executable.deserialize_and_load(executable, *structures)
    return None


def _compile(key: str, function: Any, decoder: Decoder, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Compile a program, and keep it for later processes."""
    # XLA cannot save a program that JAX's cache has loaded, so compile without this cache.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        compiled = function.lower(decoder, *args).compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()

    def packed() -> bytes:
        executable, _, outputs = serialize_executable.serialize(compiled)
        # Pickle a tree of numbers with the outputs' structure, because JAX's structures cannot be pickled.
        return zlib.compress(
            pickle.dumps((executable, jax.tree.unflatten(outputs, range(outputs.num_leaves)))), 1
        )

    with contextlib.suppress(Exception):  # the outputs' structure may contain parts that cannot be pickled
        if _source_digest.__wrapped__() == _source_digest():  # otherwise a module may be older than its file
            keep_bytes(packed, "programs", key)
    return compiled
