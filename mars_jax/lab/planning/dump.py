"""Keep the final schedule of a compiled program, which libtpu writes only if it is told to before it is loaded."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from mars_jax.lab.planning import bundles, hlo

__all__ = ["dump_folder", "fresh", "is_on", "recorded"]


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


def is_on() -> bool:
    """True where `dump_folder` was called in this process."""
    return bool(dump_folder.cache_info().currsize)


def recorded(text: str) -> tuple[hlo.Module, bundles.Schedule] | None:
    """The program of a text that `compiled.as_text()` gave, and the schedule that libtpu wrote when it compiled it.

    None where it wrote none: `dump_folder` was not called, or only after libtpu was loaded.
    """
    if not is_on():
        return None
    folder = dump_folder()
    try:
        schedule = bundles.read(folder)
    except FileNotFoundError:
        return None
    for path in folder.iterdir():
        path.unlink()
    return hlo.parse(text), schedule


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Without JAX's compilation cache, whose programs have no schedule, and without the schedules of other programs."""
    for path in dump_folder().iterdir():
        path.unlink()
    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
