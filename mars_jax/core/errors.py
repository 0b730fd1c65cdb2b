"""The one exception this package raises for bad input."""


class MarsError(Exception):
    """Bad input, in one sentence that names the thing, its value and the cure.

    It is no ValueError, so that code which turns the ValueErrors of other libraries into sentences leaves it alone.
    """
