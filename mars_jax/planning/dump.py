"""Compile a program and keep its final schedule, which libtpu writes only if it is told to before it is loaded."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

import jax

from mars_jax.core.errors import MarsError
from mars_jax.planning import bundles, hlo

__all__ = ["compile_scheduled", "dump_folder"]


@functools.cache
def dump_folder() -> Path:
    """The folder of this process into which libtpu writes its schedules: private, and removed when the process ends.

    To be called before anything loads libtpu, such as `chips.topology`.
    """
    folder = Path(tempfile.mkdtemp(prefix="mars-jax-schedules-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags = bundles.LIBTPU_FLAGS.format(folder=folder)
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
    return folder


def compile_scheduled(lowered: jax.stages.Lowered) -> tuple[hlo.Module, bundles.Schedule]:
    """Compile a program for a TPU; its optimised form and its schedule.

    Raises:
      MarsError: libtpu was loaded before `dump_folder` was called.
    """
    folder = dump_folder()
    caches = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)  # a program from a cache has no schedule
    try:
        compiled = lowered.compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", caches)
    text = compiled.as_text()
    assert text is not None  # XLA's TPU compiler gives it
    try:
        schedule = bundles.read(folder)
    except FileNotFoundError:
        raise MarsError(
            "libtpu wrote no schedule: call planning.dump.dump_folder() before the first topology, in a fresh process."
        ) from None
    for path in folder.iterdir():
        path.unlink()
    return hlo.parse(text), schedule
