"""Speculative decoding with margin-aware verification for JAX. See README.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mars_jax.utils.version import __version__ as __version__

if TYPE_CHECKING:  # the form `X as X` marks a name as exported
    from mars_jax import constraints as constraints
    from mars_jax import contrib as contrib
    from mars_jax import drafters as drafters
    from mars_jax import hub as hub
    from mars_jax import models as models
    from mars_jax import verify as verify
    from mars_jax.core import decode as decode
    from mars_jax.core import fake as fake
    from mars_jax.core import metrics as metrics
    from mars_jax.core import refill as refill
    from mars_jax.core import sampling as sampling
    from mars_jax.core import tree as tree
    from mars_jax.core import types as types
    from mars_jax.core.controls import make_controls as make_controls
    from mars_jax.core.decode import run as run
    from mars_jax.core.decode import stream as stream
    from mars_jax.core.decoder import Decoder as Decoder
    from mars_jax.core.decoder import speculative_decoder as speculative_decoder
    from mars_jax.core.drafter import Drafter as Drafter
    from mars_jax.core.edits import make_edits as make_edits
    from mars_jax.core.metrics import Metrics as Metrics
    from mars_jax.core.metrics import summarize as summarize
    from mars_jax.core.types import Controls as Controls
    from mars_jax.core.types import DecodeState as DecodeState
    from mars_jax.core.types import DraftTree as DraftTree
    from mars_jax.core.types import ForwardOutput as ForwardOutput
    from mars_jax.core.types import KVCache as KVCache
    from mars_jax.core.types import LanguageModel as LanguageModel
    from mars_jax.core.types import Params as Params
    from mars_jax.core.types import Prompts as Prompts
    from mars_jax.core.types import StepInfo as StepInfo
    from mars_jax.core.types import Verdict as Verdict
    from mars_jax.core.types import keys_from_seeds as keys_from_seeds
    from mars_jax.core.visible import Visible as Visible
    from mars_jax.hub import load as load
    from mars_jax.hub.pretrained import Pretrained as Pretrained
    from mars_jax.models import shardings as _shardings
    from mars_jax.serve.chat import Chat as Chat
    from mars_jax.serve.generation import generate as generate
    from mars_jax.serve.generation import generate_iter as generate_iter
    from mars_jax.serve.generation import generate_stream as generate_stream
    from mars_jax.serve.likelihood import score as score
    from mars_jax.serve.requests import Completion as Completion
    from mars_jax.serve.requests import Request as Request
    from mars_jax.serve.requests import Result as Result
    from mars_jax.serve.requests import make_requests as make_requests
    from mars_jax.utils.compilations import enable_compilation_cache as enable_compilation_cache
    from mars_jax.utils.errors import MarsError as MarsError
    from mars_jax.utils.errors import MarsWarning as MarsWarning

    sharding = _shardings


# Public names, grouped by the module that defines them. A module is imported when one of its names is first used, so
# that `import mars_jax` is fast.
_NAMES = {
    "core.controls": ("make_controls",),
    "core.decode": ("run", "stream"),
    "core.decoder": ("Decoder", "speculative_decoder"),
    "core.drafter": ("Drafter",),
    "core.edits": ("make_edits",),
    "core.metrics": ("Metrics", "summarize"),
    "core.types": (
        *("Controls", "DecodeState", "DraftTree", "ForwardOutput", "KVCache", "LanguageModel", "Params"),
        *("Prompts", "StepInfo", "Verdict", "keys_from_seeds"),
    ),
    "core.visible": ("Visible",),
    "hub": ("load",),
    "hub.pretrained": ("Pretrained",),
    "serve.chat": ("Chat",),
    "serve.generation": ("generate", "generate_iter", "generate_stream"),
    "serve.likelihood": ("score",),
    "serve.requests": ("Completion", "Request", "Result", "make_requests"),
    "utils.compilations": ("enable_compilation_cache",),
    "utils.errors": ("MarsError", "MarsWarning"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_PACKAGES = ("constraints", "contrib", "drafters", "hub", "integrations", "models", "verify")
_MODULES = {
    **{name: name for name in _PACKAGES},
    **{name: f"core.{name}" for name in ("decode", "fake", "metrics", "refill", "sampling", "tree", "types")},
    "sharding": "models.shardings",
}

__all__ = sorted([*_HOME, *_MODULES])  # pyright: ignore[reportUnsupportedDunderAll]


if not TYPE_CHECKING:  # if a type checker saw `__getattr__`, it would accept any name

    def __getattr__(name: str):
        if name in _HOME:
            public_object = getattr(importlib.import_module(f"mars_jax.{_HOME[name]}"), name)
        elif name in _MODULES:
            public_object = importlib.import_module(f"mars_jax.{_MODULES[name]}")
        else:
            raise AttributeError(f"module 'mars_jax' has no attribute '{name}'")
        globals()[name] = public_object
        return public_object


def __dir__() -> list[str]:
    return __all__
