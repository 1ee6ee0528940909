"""An anchor layer's selection in two levels: one index names candidates, another one ranks them.

Source: AsyncTLS (coarse, then tokens), for any two forms of scores. `TwoLevelSelection` puts the planned stages one
after the other, `JoinedTwoLevelSelection` two selections that score and choose in one launch each;
`two_level_selection_reference` does the same with the references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefix_kernels.two_level_selection.plan import LayerIndex, TwoLevelGroup
from prefix_kernels.two_level_selection.reference import listed_token_scores_reference, two_level_selection_reference

if TYPE_CHECKING:
    from prefix_kernels.two_level_selection.first_level import BlockFirstLevel, CsaFirstLevel, FirstLevel
    from prefix_kernels.two_level_selection.joined import JoinedTwoLevelSelection
    from prefix_kernels.two_level_selection.runner import TwoLevelSelection

__all__ = [
    "BlockFirstLevel",
    "CsaFirstLevel",
    "FirstLevel",
    "JoinedTwoLevelSelection",
    "LayerIndex",
    "TwoLevelGroup",
    "TwoLevelSelection",
    "listed_token_scores_reference",
    "two_level_selection_reference",
]


def __getattr__(name: str) -> object:
    """What runs kernels, imported when it is asked for: importing the package must not import Triton."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prefix_kernels.two_level_selection import first_level, joined, runner

    modules = {"TwoLevelSelection": runner, "JoinedTwoLevelSelection": joined}
    return getattr(modules.get(name, first_level), name)
