"""Kernels for margin-aware acceptance, top-k, tree attention and quantised products. The package needs only jax."""

from kernels_pallas.common import BlockError
from kernels_pallas.margin.api import (
    margin_accept,
    margin_stats,
    merge_over,
    sharded_margin_accept,
    sharded_margin_stats,
)
from kernels_pallas.margin.rule import MARGINS, Acceptance, AcceptControls, MarginStats, empty, merge
from kernels_pallas.margin.shapes import TpuBlocks
from kernels_pallas.top_k.api import TopKEntries, sharded_top_k, top_k
from kernels_pallas.tree_attention.api import tree_attention, write_and_attend
from kernels_pallas.tree_attention.operands import NewRows
from kernels_pallas.tree_attention.shapes import AttentionBlocks

__all__ = [
    "MARGINS",
    "AcceptControls",
    "Acceptance",
    "AttentionBlocks",
    "BlockError",
    "MarginStats",
    "NewRows",
    "TopKEntries",
    "TpuBlocks",
    "empty",
    "margin_accept",
    "margin_stats",
    "merge",
    "merge_over",
    "sharded_margin_accept",
    "sharded_margin_stats",
    "sharded_top_k",
    "top_k",
    "tree_attention",
    "write_and_attend",
]
