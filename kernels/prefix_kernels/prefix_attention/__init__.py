"""Attention of a group's queries over selected positions of the prefix that the group shares."""

from prefix_kernels.prefix_attention.api import prefix_attention
from prefix_kernels.prefix_attention.reference import prefix_attention_reference

__all__ = ["prefix_attention", "prefix_attention_reference"]
