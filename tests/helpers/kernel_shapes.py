"""Vocabularies and drafts for which the kernels are compiled and their blocks checked."""

from typing import NamedTuple

VOCABULARIES = {
    "llama-3.1-8b": 128256,
    "llama-3.3-70b": 128256,
    "qwen3-8b": 151936,
    "qwen3-32b": 151936,
    "qwen3-235b-a22b": 151936,
    "vicuna-13b": 32000,
}
"""V of each target, as in its config."""


class Draft(NamedTuple):
    """A decoding setup: batch size and tree shape."""

    batch: int  # B
    nodes: int  # N
    depth: int  # D


DRAFTS = {
    "autoregressive": Draft(batch=1, nodes=1, depth=0),
    "autoregressive-batch": Draft(batch=64, nodes=1, depth=0),
    "chain": Draft(batch=1, nodes=8, depth=7),
    "chain-batch": Draft(batch=64, nodes=8, depth=7),
    "tree": Draft(batch=1, nodes=60, depth=7),
    "tree-batch": Draft(batch=16, nodes=60, depth=7),
    "wide-tree-batch": Draft(batch=64, nodes=64, depth=8),
}
