"""The positions to attend, from pooled scores and a token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefix_kernels.top_k_selection.api import top_k_selection
from prefix_kernels.top_k_selection.plan import SelectionGroup
from prefix_kernels.top_k_selection.reference import top_k_selection_reference

if TYPE_CHECKING:
    from prefix_kernels.top_k_selection.lists import SelectedLists
    from prefix_kernels.top_k_selection.runner import TopKConfig, TopKSelection

__all__ = [
    "SelectedLists",
    "SelectionGroup",
    "TopKConfig",
    "TopKSelection",
    "top_k_selection",
    "top_k_selection_reference",
]

_NEED_TRITON = ("SelectedLists", "TopKConfig", "TopKSelection")


def __getattr__(name: str) -> object:
    """The runner, imported when it is asked for: importing the package must not import Triton."""
    if name not in _NEED_TRITON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prefix_kernels.top_k_selection import runner

    return getattr(runner, name)
