"""Persistent cache of compiled programs. Oracle: a second process's folder (tests/core/test_compilations.py)."""

from __future__ import annotations

import os

import jax
from jax.experimental.compilation_cache import compilation_cache

from mars_jax.utils.errors import MarsError, check_type
from mars_jax.utils.paths import kept

_JAX_MIN_SECONDS = 1.0
"""JAX's default minimum compile time in seconds: faster compilations are not cached."""


def enable_compilation_cache(path: str | os.PathLike[str] | None = None) -> str:
    """Cache compiled programs in a folder, so that later processes load them; for notebooks and jobs.

    The package's commands enable the cache themselves. It applies to all compilations after the call.

    Args:
      path: the folder, which may be in a bucket (gs://...); default: the folder JAX is already configured to use, for
        example by JAX_COMPILATION_CACHE_DIR, else `mars_jax/compiled` in the user's cache folder.

    Returns:
      The folder.

    Raises:
      MarsError: no folder is given, and the user has no home.

    >>> enable_compilation_cache("/tmp/compiled")  # doctest: +SKIP
    '/tmp/compiled'
    """
    check_type("the path", path, (str, os.PathLike, type(None)), "a folder")
    configured = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    min_seconds = jax.config.jax_persistent_cache_min_compile_time_secs  # pyright: ignore[reportAttributeAccessIssue]
    if min_seconds == _JAX_MIN_SECONDS:
        # Startup compiles many small programs in less than a second each; JAX would cache none of them by default.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if path is None and configured is not None:
        return configured
    if path is None:
        cache = kept("XDG_CACHE_HOME", ".cache")
        if cache is None:
            raise MarsError(
                "there is no home folder to keep compilations in: give a path, or set XDG_CACHE_HOME."
            )
        path = cache / "mars_jax" / "compiled"
    path = os.fspath(path)
    jax.config.update("jax_compilation_cache_dir", path)
    # JAX reads the configured folder only at its first compilation, unless the cache is reset.
    compilation_cache.reset_cache()
    return path
