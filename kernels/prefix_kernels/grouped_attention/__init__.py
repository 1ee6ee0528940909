"""Attention of tiles of query rows over lists of KV slots: what prefix and suffix attention have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from prefix_kernels.grouped_attention.runner import GroupedAttention


def __getattr__(name: str) -> object:
    """The runner, imported when it is asked for: importing the package must not import Triton."""
    if name != "GroupedAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prefix_kernels.grouped_attention import runner

    return getattr(runner, name)
