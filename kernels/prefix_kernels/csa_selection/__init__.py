"""A selection on CSAttention's compact lists: from queries to scores, and from scores to lists; needs Triton.

`csa_scores.csa_scores_compact`, `pooling.pool_scores` and `top_k_selection` say what it computes.
"""

from prefix_kernels.csa_selection.runner import (
    CsaArrays,
    CsaConfig,
    CsaGroup,
    CsaSelection,
    CsaShape,
    array_addresses,
    default_config,
)
