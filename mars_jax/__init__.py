"""Speculative decoding with margin-aware verification for JAX. See README.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mars_jax import decode, drafters, fake, hub, metrics, models, sampling, sharding, tree, types, verify
    from mars_jax.api import generate, generate_stream
    from mars_jax.controls import make_controls
    from mars_jax.decode import run, speculative_decoder, stream
    from mars_jax.errors import MarsError
    from mars_jax.metrics import Metrics, summarize
    from mars_jax.request import Completion, Request, Result, make_requests
    from mars_jax.text import Pretrained, load
    from mars_jax.types import (
        Controls,
        Decoder,
        DecodeState,
        Drafter,
        DraftTree,
        ForwardOutput,
        KVCache,
        LanguageModel,
        Params,
        StepInfo,
        Verdict,
        keys_from_seeds,
    )

__version__ = "0.1.0"

# Public names and the module that defines each. They load on first use, so that `import mars_jax` stays light.
_HOME = {
    "Completion": "request",
    "Controls": "types",
    "DecodeState": "types",
    "Decoder": "types",
    "DraftTree": "types",
    "Drafter": "types",
    "ForwardOutput": "types",
    "KVCache": "types",
    "LanguageModel": "types",
    "MarsError": "errors",
    "Metrics": "metrics",
    "Params": "types",
    "Pretrained": "text",
    "Request": "request",
    "Result": "request",
    "StepInfo": "types",
    "Verdict": "types",
    "generate": "api",
    "generate_stream": "api",
    "keys_from_seeds": "types",
    "load": "text",
    "make_controls": "controls",
    "make_requests": "request",
    "run": "decode",
    "speculative_decoder": "decode",
    "stream": "decode",
    "summarize": "metrics",
}
_MODULES = (
    "decode",
    "drafters",
    "fake",
    "hub",
    "metrics",
    "models",
    "sampling",
    "sharding",
    "tree",
    "types",
    "verify",
)

__all__ = sorted([*_HOME, *_MODULES])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(importlib.import_module(f"mars_jax.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"mars_jax.{name}")
    else:
        raise AttributeError(f"module 'mars_jax' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
