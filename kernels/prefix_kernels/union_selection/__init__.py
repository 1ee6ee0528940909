"""A selection from two methods' scores, from counts to lists; needs Triton."""

from prefix_kernels.union_selection.runner import UnionSelection
