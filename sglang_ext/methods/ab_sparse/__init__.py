"""AB-Sparse: block representations with one block size for all heads or one for each. See `spec`."""

from sglang_ext.methods.ab_sparse.build import ABSparseBuilder, block_representation
from sglang_ext.methods.ab_sparse.reference import ABSparseSelector
from sglang_ext.methods.ab_sparse.spec import BLOCK_SIZES, ABSparseSpec
