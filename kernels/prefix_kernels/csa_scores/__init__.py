"""Token scores from the query-centric tables of CSAttention, in the paper's layout and in the compact one."""

from prefix_kernels.csa_scores.api import csa_scores, csa_scores_compact
from prefix_kernels.csa_scores.compact import (
    BLOCK_POSITIONS,
    CompactLists,
    bitmap_is_smaller,
    check_entries,
    check_lists,
    decode_lists,
    encode_lists,
    list_bytes,
)
from prefix_kernels.csa_scores.reference import csa_scores_compact_reference, csa_scores_reference

__all__ = [
    "BLOCK_POSITIONS",
    "CompactLists",
    "bitmap_is_smaller",
    "check_entries",
    "check_lists",
    "csa_scores",
    "csa_scores_compact",
    "csa_scores_compact_reference",
    "csa_scores_reference",
    "decode_lists",
    "encode_lists",
    "list_bytes",
]
