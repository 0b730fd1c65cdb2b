"""Keep compiled programs between runs. Oracle: the folder of another process (tests/core/test_compilations.py)."""

from __future__ import annotations

import os

import jax
from jax.experimental.compilation_cache import compilation_cache

from mars_jax.core.errors import MarsError, check_type
from mars_jax.core.home import kept

_OF_JAX = 1.0
"""Seconds of a compilation below which JAX keeps nothing, unless it is told otherwise."""


def enable_compilation_cache(path: str | os.PathLike[str] | None = None) -> str:
    """Keep what XLA compiles in a folder, so that the next process loads it; for notebooks and jobs. Commands do so.

    It applies to everything that this process compiles after the call.

    Args:
      path: the folder, also of a bucket (gs://...); default: where JAX is told to keep them already, as by
        JAX_COMPILATION_CACHE_DIR, else `mars_jax/compiled` in the user's cache folder.

    Returns:
      The folder.

    Raises:
      MarsError: no folder is named, and the user has no home.

    >>> enable_compilation_cache("/tmp/compiled")  # doctest: +SKIP
    '/tmp/compiled'
    """
    check_type("the path", path, (str, os.PathLike, type(None)), "a folder")
    told = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if jax.config.jax_persistent_cache_min_compile_time_secs == _OF_JAX:  # pyright: ignore[reportAttributeAccessIssue]
        # A start has many programs that compile in less than a second, below which JAX keeps none.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if path is None and told is not None:
        return told
    if path is None:
        cache = kept("XDG_CACHE_HOME", ".cache")
        if cache is None:
            raise MarsError(
                "there is no home folder to keep compilations in: give a path, or set XDG_CACHE_HOME."
            )
        path = cache / "mars_jax" / "compiled"
    path = os.fspath(path)
    jax.config.update("jax_compilation_cache_dir", path)
    # JAX looks for a folder at its first compilation, and not again unless it is told so.
    compilation_cache.reset_cache()
    return path
