"""Typed options of `generate`, for completion in editors and for type checkers.

Oracle: the fields of `Request` and the docstring of `generate` (tests/serve/test_options.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import jax
import numpy as np

from mars_jax.constraints import Constraint

T = TypeVar("T")
AnyArray = np.ndarray | np.generic | jax.Array
Each = T | Sequence[T] | AnyArray
"""One value for all prompts, or one per prompt."""
TokenIds = int | Sequence[int] | Sequence[Sequence[int]] | AnyArray
"""One id or several for all prompts, or a sequence of them per prompt."""
Schema = Mapping[str, Any] | str | os.PathLike[str]


class Options(TypedDict, total=False):
    """Options of a request, each one value for all prompts or one per prompt; see `generate`.

    >>> chosen: Options = {"temperature": 0.7, "seed": [3, 4]}
    >>> sorted(Options.__optional_keys__)[:2]
    ['allowed_tokens', 'banned_tokens']
    """

    temperature: Each[float]
    top_k: Each[int]
    top_p: Each[float]
    min_p: Each[float]
    strict: Each[bool]
    draft_stop: Each[float]
    seed: Each[int]
    max_new_tokens: Each[int]
    stop_tokens: TokenIds
    stop_strings: str | Sequence[str] | Sequence[Sequence[str]]
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None
    banned_tokens: TokenIds | None
    repetition_penalty: Each[float]
    presence_penalty: Each[float]
    frequency_penalty: Each[float]
    regex: str | Sequence[str | None] | None
    json_schema: Schema | Sequence[Schema | None] | None
    choice: Sequence[str] | Sequence[Sequence[str] | None] | None
    allowed_tokens: Sequence[int] | Sequence[Sequence[int] | None] | None
    constraint: Constraint | Sequence[Constraint | None] | None
    relax_constrained: bool | Sequence[bool]
    relax_in: str | Sequence[str]
    strict_in: str | Sequence[str]


class CallOptions(Options, total=False):
    """`Options`, and the arguments of `generate` that control how prompts are read."""

    chat: bool
    system: str | None
    template_args: Mapping[str, Any] | None
    ignore_eos: bool
    samples: int
