"""TPU kernels, imported on first access: most programs that import this package never run on a TPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_KERNELS = ("margin_tpu", "topk_tpu", "tree_attention")


def __getattr__(name: str) -> Any:
    if name in _KERNELS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
