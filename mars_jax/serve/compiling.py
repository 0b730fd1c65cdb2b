"""Two programs that compile side by side: XLA spends the better part of a compilation on one core.

Oracle: the programs that a batch compiles (tests/serve/test_compiling.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from mars_jax.core.decoder import Decoder
from mars_jax.core.types import DecodeState, Params

Compile = Callable[[Decoder, Params, DecodeState], object]
"""Function that compiles a loop over the step for a state, of which it may be given the shapes alone."""


@contextlib.contextmanager
def beside(work: Callable[[], object] | None) -> Iterator[None]:
    """Do `work`, which compiles something, while what is inside runs; None: only that runs.

    An error of `work` is dropped here: the program's own run raises it.
    """
    if work is None:
        yield
        return

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
