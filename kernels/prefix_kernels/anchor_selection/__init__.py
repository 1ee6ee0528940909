"""An anchor layer's selection: from queries to lists in one launch; needs Triton.

`AnchorSelection` is what `PooledScores` and `TopKSelection` compute one after the other.
"""

from prefix_kernels.anchor_selection.runner import AnchorConfig, AnchorSelection, Form, default_config

__all__ = ["AnchorConfig", "AnchorSelection", "Form", "default_config"]
