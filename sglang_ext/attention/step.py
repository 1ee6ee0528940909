"""What the running forward has to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_ext.attention.plan import DecodePlan
from sglang_ext.attention.shared_steps import Path
from sglang_ext.prefill.recorder import Chunk


@dataclass
class Step:
    """The forward that runs now: what its layers have to do.

    Attributes:
        plan: of a decode step by reference operations.
        path: of a decode step in groups.
        chunks: of what is recorded.
    """

    plan: DecodePlan | None = None
    path: Path | None = None
    chunks: Sequence[Chunk] = field(default_factory=tuple)
