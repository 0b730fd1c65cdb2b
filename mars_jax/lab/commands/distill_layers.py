"""The layers that `distill --feature-layers` names."""

from __future__ import annotations

from mars_jax.core.errors import MarsError


def layers_of(given: str | None) -> tuple[int, ...] | None:
    """Layer numbers of a flag, None where it is not given.

    Raises:
      MarsError: no numbers.

    >>> layers_of("1,14,26")
    (1, 14, 26)
    """
    if given is None:
        return None
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise MarsError(f"--feature-layers is {given}: expected layer numbers such as 1,15,28.") from None
