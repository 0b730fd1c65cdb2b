"""A registry of running activities, which commands read to report their progress. This module does not import jax."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator


@dataclasses.dataclass
class Activity:
    """One running activity. Its `detail` may change while it runs."""

    name: str
    detail: str = ""
    began: float = dataclasses.field(default_factory=time.monotonic)


_running: list[Activity] = []


@contextlib.contextmanager
def doing(name: str) -> Iterator[Activity]:
    """Register the body of a `with` statement, or a decorated function, as a running activity."""
    activity = Activity(name)
    _running.append(activity)
    try:
        yield activity
    finally:
        _running.remove(activity)


def describe() -> str:
    """Describe the running activities, outermost first. An activity without a detail is shown with its running time.

    >>> with doing("prompts") as prompts, doing("compiling"), doing("compiling"):
    ...     prompts.detail = "3 of 9"
    ...     describe()
    'prompts: 3 of 9; compiling ... (0 s)'
    """
    text_by_name = {}
    # Copy the list, because the heartbeat thread calls this function while activities start and end.
    for activity in list(_running):
        name = activity.name
        if activity.detail:
            text_by_name[name] = f"{name}: {activity.detail}"
        else:
            text_by_name.setdefault(name, f"{name} ... ({time.monotonic() - activity.began:.0f} s)")
    return "; ".join(text_by_name.values())
