"""Exact attention of the query rows of a prefill: over their requests' own slots, then over pieces of what lies before.

`Reference` says what is computed; `PrefillAttention` is the Triton form, with the same methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefix_kernels.prefill_attention.reference import Reference, Span, State

if TYPE_CHECKING:
    from prefix_kernels.prefill_attention.runner import PrefillAttention


def __getattr__(name: str) -> object:
    """The runner, imported when it is asked for: importing the package must not import Triton."""
    if name != "PrefillAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prefix_kernels.prefill_attention import runner

    return runner.PrefillAttention
