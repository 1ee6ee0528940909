"""An anchor layer's selection on a token index: from queries to scores, and from scores to lists; needs Triton.

`pooling.pool_scores` and `top_k_selection` say what it computes.
"""

from prefix_kernels.anchor_selection.programs import Form, ScoredTokens
from prefix_kernels.anchor_selection.runner import AnchorConfig, AnchorSelection, default_config
