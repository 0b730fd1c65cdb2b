"""A folder that caches compiled programs and other results that take a long time to compute.

Tested by loading programs in a second process (tests/core/test_compilations.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from mars_jax.utils.errors import MarsError, check_type
from mars_jax.utils.paths import kept

_JAX_MIN_SECONDS = 1.0
"""JAX's default for the minimum compilation time of a cached program, in seconds. Programs that compile faster are not
cached."""


def enable_compilation_cache(path: str | os.PathLike[str] | None = None) -> str:
    """Cache compiled programs in a folder, so that later processes can load them. Use this in notebooks and jobs.

    The commands of this package enable the cache by default. The cache applies to all compilations after the call.

    Args:
      path: the folder, which may be in a bucket (gs://...). Default: the folder that JAX is configured to use, for
        example by JAX_COMPILATION_CACHE_DIR, otherwise `mars_jax/compiled` in the user's cache folder.

    Returns:
      The path of the folder.

    Raises:
      MarsError: `path` is None, and the user has no home folder.

    >>> enable_compilation_cache("/tmp/compiled")  # doctest: +SKIP
    '/tmp/compiled'
    """
    check_type("the path", path, (str, os.PathLike, type(None)), "a folder")
    configured_folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    min_seconds = jax.config.jax_persistent_cache_min_compile_time_secs  # pyright: ignore[reportAttributeAccessIssue]
    if min_seconds == _JAX_MIN_SECONDS:
        # At startup, many small programs compile in less than a second each. By default, JAX would not cache them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if path is None and configured_folder is not None:
        return configured_folder
    if path is None:
        cache_folder = kept("XDG_CACHE_HOME", ".cache")
        if cache_folder is None:
            raise MarsError("no home folder to keep compilations in: give a path, or set XDG_CACHE_HOME.")
        path = cache_folder / "mars_jax" / "compiled"
    path = os.fspath(path)
    jax.config.update("jax_compilation_cache_dir", path)
    # JAX reads the configured folder only at the first compilation, unless the cache is reset.
    compilation_cache.reset_cache()
    return path


def _kept_path(folder: str, key: tuple[object, ...]) -> Path | None:
    """Return the path of a cached result, or None if caching is disabled or the cache is in a bucket."""
    cache_root = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if cache_root is None or "://" in cache_root:
        return None
    digest = hashlib.sha256(repr((jax.__version__, *key)).encode()).hexdigest()
    return Path(cache_root, folder, digest)


def kept_bytes(folder: str, *key: object) -> bytes | None:
    """Return the bytes that `keep_bytes` stored under a key, perhaps in another process, or None if there are none.

    Args:
      folder: name of a folder within the folder of compiled programs.
      key: everything that the bytes depend on. The `repr` of each object must be the same in every process.
    """
    path = _kept_path(folder, key)
    try:
        return None if path is None else path.read_bytes()
    except OSError:
        return None


def keep_bytes(compute: Callable[[], bytes], folder: str, *key: object) -> None:
    """Call `compute` and store its result under a key (see `kept_bytes`). Do nothing if caching is disabled."""
    path = _kept_path(folder, key)
    if path is None:
        return
    # Write to a separate file and rename it, because several processes may write the same file at once. If the write
    # fails, the bytes are computed again next time.
    staged_path = path.with_name(f"{path.name}.{os.getpid()}.part")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        staged_path.write_bytes(compute())
        staged_path.replace(path)
