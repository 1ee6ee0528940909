"""The positions to attend, from pooled scores and a token budget."""

from prefix_kernels.top_k_selection.api import top_k_selection
from prefix_kernels.top_k_selection.reference import top_k_selection_reference

__all__ = ["top_k_selection", "top_k_selection_reference"]
