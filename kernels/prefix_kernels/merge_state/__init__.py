"""Merge of attention over disjoint parts of the keys."""

from prefix_kernels.merge_state.api import merge_state
from prefix_kernels.merge_state.reference import merge_state_reference

__all__ = ["merge_state", "merge_state_reference"]
