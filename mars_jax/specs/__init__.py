"""Tables of models and settings of requests, with names, ranges and defaults. Does not import jax.

Flags, checks, prompts files, arms of a benchmark, arguments of lm-eval and error messages are generated from these
tables and from the definitions of rules (`verify.rules()`) and drafters (`drafters.definitions()`).

Oracle: tests/test_specs.py.
"""

from collections.abc import Sequence

from mars_jax.utils.errors import MarsError, short_repr
from mars_jax.utils.limits import BATCH_ROWS, DRAFT_TOKENS, SAMPLES
from mars_jax.utils.settings import CONTROLS, EDITS, LARGEST_INT, Range, Setting, by_name

STORED_DTYPES = ("float32", "bfloat16", "int8")
"""Dtypes of keys and values, and of weights in a conversion."""
DTYPES = (*STORED_DTYPES, "int4")
"""Dtypes of weights."""
BITS = {"int8": 8, "int4": 4}
"""Bits per weight of the quantised dtypes."""
ATTENTION = ("auto", "xla", "pallas")
"""Forms of a target's attention that a user can choose; see `models.language_model`."""
FILTERS = ("top_k", "top_p", "min_p")
"""Settings that affect only sampling; off by default."""
REQUEST = (CONTROLS | EDITS) | by_name(
    Setting(
        name="seed",
        kind=int,
        default=0,
        ranges=Range("a whole number from 0 to 4294967295", 0, 2**32 - 1),
        per_row=True,
        metavar="N",
        help="prompt i draws with seed N + i (default: 0)",
    ),
    Setting(
        name="max_new_tokens",
        kind=int,
        default=256,
        ranges=Range("a whole number of at least 1", 1, LARGEST_INT),
        per_row=True,
        metavar="N",
        help="most tokens per prompt (default: 256)",
    ),
    Setting(
        name="batch_size",
        kind=int,
        ranges=Range(f"a whole number from 1 to {BATCH_ROWS}", 1, BATCH_ROWS),
        metavar="N",
        help="prompts decoded at once (default: 1 to stream, else 8)",
    ),
    Setting(
        name="num_draft_tokens",
        kind=int,
        ranges=Range(f"a whole number from 1 to {DRAFT_TOKENS}", 1, DRAFT_TOKENS),
        metavar="N",
        help="tokens drafted in a row (default: 5, by ngram 8); heads draft a tree, or for rejection a chain as "
        "long as they can; 3 for a mixture of experts",
    ),
    Setting(
        name="refine_every",
        kind=int,
        ranges=Range("a whole number from 1 to 65536", 1, 2**16),
        metavar="N",
        help="with --refine: completions between two updates (default: 32)",
    ),
    Setting(
        name="samples",
        kind=int,
        ranges=Range(f"a whole number from 1 to {SAMPLES}", 1, SAMPLES),
        metavar="N",
        help="completions of each prompt, which follow each other; they need a temperature (default: 1)",
    ),
    Setting(
        name="prefill_chunk",
        kind=int,
        ranges=Range("a whole number from 1 to 65536", 1, 2**16),
        metavar="N",
        help="prompt tokens read at a time, by target and draft model (default: on a CPU 64, or 256 in long "
        "buffers; elsewhere 512)",
    ),
)
"""Settings of a request and of its batch. A row of a prompts file may set those that are `per_row`."""

__all__ = [
    "ATTENTION",
    "BITS",
    "DTYPES",
    "EDITS",
    "FILTERS",
    "REQUEST",
    "STORED_DTYPES",
    "Range",
    "Setting",
    "check_dtype",
]


def check_dtype(dtype: str | None, *, shown: str = "dtype", known: Sequence[str] = DTYPES) -> None:
    """Raise MarsError for an unknown dtype of weights or of a cache; None is the default.

    >>> check_dtype("bfloat16")
    """
    if dtype is not None and not (isinstance(dtype, str) and dtype in known):
        raise MarsError(f"{shown} {short_repr(dtype)} is not supported: choose one of {', '.join(known)}.")
