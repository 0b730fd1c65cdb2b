"""The names of long parts of the work, while they run, so that a command can tell its user what takes so long.

Nothing here imports jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator


@dataclasses.dataclass
class Activity:
    """One thing that is being done; `detail` may change while it is."""

    name: str
    detail: str = ""
    began: float = dataclasses.field(default_factory=time.monotonic)

    def describe(self, now: float) -> str:
        """In words, with the seconds that it has taken where it has nothing else to say."""
        return f"{self.name}: {self.detail}" if self.detail else f"{self.name} ... ({now - self.began:.0f} s)"


_going: list[Activity] = []


@contextlib.contextmanager
def doing(name: str, detail: str = "") -> Iterator[Activity]:
    """Name what is done inside. Also a decorator, of a function that is such a part.

    >>> with doing("prompts", "3 of 9"), doing("compiling"):
    ...     describe()
    'prompts: 3 of 9; compiling ... (0 s)'
    """
    activity = Activity(name, detail)
    _going.append(activity)
    try:
        yield activity
    finally:
        _going.remove(activity)


def details(within: Activity) -> str:
    """Describe what is being done inside of an activity, of what says how far it is; "" where nothing does.

    >>> with doing("loading") as going, doing("downloading", "3 of 9 MB"):
    ...     details(going)
    'downloading: 3 of 9 MB'
    """
    inside = [one for one in _going[_going.index(within) + 1 :] if one.detail]
    return "; ".join(one.detail if one.name == within.name else f"{one.name}: {one.detail}" for one in inside)


def describe() -> str:
    """Describe everything that is being done, the widest first and each name once; "" where nothing has a name.

    >>> with doing("compiling"), doing("compiling"):
    ...     describe()
    'compiling ... (0 s)'
    """
    now, told = time.monotonic(), {}
    for activity in list(_going):
        if activity.name not in told or activity.detail:
            told[activity.name] = activity
    return "; ".join(activity.describe(now) for activity in told.values())
