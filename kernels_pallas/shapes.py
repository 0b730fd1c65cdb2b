"""Named shapes of real models, shared by tests and benchmarks."""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """What the kernels see of a target model."""

    vocab: int  # V, as in the model's config
    hidden: int  # E


TARGETS = {
    "llama-3.1-8b": Target(vocab=128256, hidden=4096),
    "llama-3.3-70b": Target(vocab=128256, hidden=8192),
    "qwen3-8b": Target(vocab=151936, hidden=4096),
    "qwen3-32b": Target(vocab=151936, hidden=5120),
    "qwen3-235b-a22b": Target(vocab=151936, hidden=4096),
    "vicuna-13b": Target(vocab=32000, hidden=5120),
}


class Draft(NamedTuple):
    """One way to decode: batch and tree."""

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
