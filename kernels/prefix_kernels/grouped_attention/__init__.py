"""Attention of tiles of query rows over lists of KV slots: what prefix and suffix attention have in common.

`runner.GroupedAttention` needs Triton: so it is not imported here.
"""

from prefix_kernels.grouped_attention.config import (
    AttentionConfig,
    AttentionShape,
    block_m_for,
    check_dtypes,
    default_config,
    has_specialized,
    passes_for,
)
from prefix_kernels.grouped_attention.items import Items, Segment, cut
