"""Former place of `top_k_selection`; it goes with its last caller."""

from prefix_kernels.top_k_selection import top_k_selection

__all__ = ["top_k_selection"]
