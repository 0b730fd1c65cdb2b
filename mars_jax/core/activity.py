"""Names of long-running parts of the work, so that a command can print what takes so long. No jax."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator


@dataclasses.dataclass
class Activity:
    """One running part; `detail` may change while it runs."""

    name: str
    detail: str = ""
    began: float = dataclasses.field(default_factory=time.monotonic)


_running: list[Activity] = []


@contextlib.contextmanager
def doing(name: str) -> Iterator[Activity]:
    """Name the work inside the block, or in a function that this decorates."""
    activity = Activity(name)
    _running.append(activity)
    try:
        yield activity
    finally:
        _running.remove(activity)


def describe() -> str:
    """Describe everything that runs, the outermost first and each name once. Without a detail, give the seconds.

    >>> with doing("prompts") as prompts, doing("compiling"), doing("compiling"):
    ...     prompts.detail = "3 of 9"
    ...     describe()
    'prompts: 3 of 9; compiling ... (0 s)'
    """
    texts = {}
    for one in list(_running):
        if one.detail:
            texts[one.name] = f"{one.name}: {one.detail}"
        else:
            texts.setdefault(one.name, f"{one.name} ... ({time.monotonic() - one.began:.0f} s)")
    return "; ".join(texts.values())
