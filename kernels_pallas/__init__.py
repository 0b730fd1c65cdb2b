"""Margin-aware acceptance as kernels, for TPU, GPU and CPU. This package imports jax only."""

from kernels_pallas.api import margin_accept, margin_stats
from kernels_pallas.blocks import BlockError, GpuBlocks, TpuBlocks
from kernels_pallas.rule import MARGINS, Acceptance, AcceptControls
from kernels_pallas.sharded import merge_over, sharded_margin_accept, sharded_margin_stats
from kernels_pallas.stats import MarginStats, empty, merge

__all__ = [
    "MARGINS",
    "AcceptControls",
    "Acceptance",
    "BlockError",
    "GpuBlocks",
    "MarginStats",
    "TpuBlocks",
    "empty",
    "margin_accept",
    "margin_stats",
    "merge",
    "merge_over",
    "sharded_margin_accept",
    "sharded_margin_stats",
]
