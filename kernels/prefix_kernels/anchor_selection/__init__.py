"""An anchor layer's selection: from queries to lists in one launch.

`AnchorSelection` is what `PooledScores` and `TopKSelection` compute one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefix_kernels.anchor_selection.config import AnchorConfig, Form, default_config
    from prefix_kernels.anchor_selection.runner import AnchorSelection

__all__ = ["AnchorConfig", "AnchorSelection", "Form", "default_config"]


def __getattr__(name: str) -> object:
    """Imported when it is asked for: importing the package must not import Triton."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prefix_kernels.anchor_selection import config, runner

    return getattr(runner if name == "AnchorSelection" else config, name)
