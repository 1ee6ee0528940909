"""The operations in torch, in one place to import from: references of the kernels, and what indexes are made of."""

from prefix_kernels.block_scores import (
    block_scores_ball,
    block_scores_mean,
    block_scores_minmax,
    exact_scores,
    low_bit_block_scores,
    token_scores,
)
from prefix_kernels.budget import BudgetGrowth, budget_for_group
from prefix_kernels.csa_scores import CompactLists, csa_scores, csa_scores_compact
from prefix_kernels.low_bit import LowBitTensor, dequantize, pack_codes, quantize, unpack_codes
from prefix_kernels.pooling import Pooling, pool_scores
from prefix_kernels.top_k_selection import top_k_selection

__all__ = [
    "BudgetGrowth",
    "CompactLists",
    "LowBitTensor",
    "Pooling",
    "block_scores_ball",
    "block_scores_mean",
    "block_scores_minmax",
    "budget_for_group",
    "csa_scores",
    "csa_scores_compact",
    "dequantize",
    "exact_scores",
    "low_bit_block_scores",
    "pack_codes",
    "pool_scores",
    "quantize",
    "token_scores",
    "top_k_selection",
    "unpack_codes",
]
