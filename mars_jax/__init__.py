"""Speculative decoding with margin-aware verification for JAX. See README.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mars_jax import constraints, contrib, drafters, hub, integrations, models, verify
    from mars_jax.core import decode, fake, metrics, sampling, tree, types
    from mars_jax.core.compilations import enable_compilation_cache
    from mars_jax.core.controls import make_controls
    from mars_jax.core.decode import run, stream
    from mars_jax.core.decoder import Decoder, speculative_decoder
    from mars_jax.core.drafter import Drafter
    from mars_jax.core.edits import make_edits
    from mars_jax.core.errors import MarsError
    from mars_jax.core.metrics import Metrics, summarize
    from mars_jax.core.types import (
        Controls,
        DecodeState,
        DraftTree,
        ForwardOutput,
        KVCache,
        LanguageModel,
        Params,
        Prompts,
        StepInfo,
        Verdict,
        keys_from_seeds,
    )
    from mars_jax.hub import load
    from mars_jax.hub.pretrained import Pretrained
    from mars_jax.placement import shardings
    from mars_jax.serve.chat import Chat
    from mars_jax.serve.generation import generate, generate_iter, generate_stream
    from mars_jax.serve.likelihood import score
    from mars_jax.serve.requests import Completion, Request, Result, make_requests

__version__ = "0.1.0"

# Public names and the module that defines each. They load on first use, so that `import mars_jax` stays light.
_HOME = {
    "Chat": "serve.chat",
    "Completion": "serve.requests",
    "Controls": "core.types",
    "DecodeState": "core.types",
    "Decoder": "core.decoder",
    "DraftTree": "core.types",
    "Drafter": "core.drafter",
    "ForwardOutput": "core.types",
    "KVCache": "core.types",
    "LanguageModel": "core.types",
    "MarsError": "core.errors",
    "Metrics": "core.metrics",
    "Params": "core.types",
    "Prompts": "core.types",
    "Pretrained": "hub.pretrained",
    "Request": "serve.requests",
    "Result": "serve.requests",
    "StepInfo": "core.types",
    "Verdict": "core.types",
    "enable_compilation_cache": "core.compilations",
    "generate": "serve.generation",
    "generate_iter": "serve.generation",
    "generate_stream": "serve.generation",
    "keys_from_seeds": "core.types",
    "load": "hub",
    "make_controls": "core.controls",
    "make_edits": "core.edits",
    "make_requests": "serve.requests",
    "run": "core.decode",
    "score": "serve.likelihood",
    "speculative_decoder": "core.decoder",
    "stream": "core.decode",
    "summarize": "core.metrics",
}
_MODULES = {
    "constraints": "constraints",
    "decode": "core.decode",
    "drafters": "drafters",
    "fake": "core.fake",
    "hub": "hub",
    "metrics": "core.metrics",
    "models": "models",
    "sampling": "core.sampling",
    "sharding": "placement.shardings",
    "tree": "core.tree",
    "integrations": "integrations",
    "contrib": "contrib",
    "types": "core.types",
    "verify": "verify",
}

__all__ = sorted([*_HOME, *_MODULES])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(importlib.import_module(f"mars_jax.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"mars_jax.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'mars_jax' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
