"""Decode attention of every request over its own ragged list of slots."""

from prefix_kernels.suffix_attention.api import suffix_attention
from prefix_kernels.suffix_attention.reference import suffix_attention_reference

__all__ = ["suffix_attention", "suffix_attention_reference"]
