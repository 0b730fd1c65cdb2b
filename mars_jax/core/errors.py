"""The one exception this package raises for bad input."""


class MarsError(ValueError):
    """Bad input, in one sentence that names the thing, its value and the cure."""
