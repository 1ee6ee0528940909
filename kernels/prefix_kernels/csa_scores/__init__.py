"""Token scores from the query-centric tables of CSAttention."""

from prefix_kernels.csa_scores.api import csa_scores
from prefix_kernels.csa_scores.reference import csa_scores_reference

__all__ = ["csa_scores", "csa_scores_reference"]
