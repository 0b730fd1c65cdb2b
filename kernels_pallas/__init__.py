"""Kernels for margin-aware acceptance and for attention over drafted trees. The package depends only on jax."""

from kernels_pallas.api import margin_accept, margin_stats
from kernels_pallas.attend_tree import tree_attention, write_and_attend
from kernels_pallas.blocks import AttentionBlocks, BlockError, TpuBlocks
from kernels_pallas.largest import TopK, sharded_top_k, top_k
from kernels_pallas.margin_rule import MARGINS, Acceptance, AcceptControls
from kernels_pallas.new_rows import NewRows
from kernels_pallas.sharded import merge_over, sharded_margin_accept, sharded_margin_stats
from kernels_pallas.stats import MarginStats, empty, merge

__all__ = [
    "MARGINS",
    "AcceptControls",
    "Acceptance",
    "AttentionBlocks",
    "BlockError",
    "MarginStats",
    "NewRows",
    "TopK",
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
