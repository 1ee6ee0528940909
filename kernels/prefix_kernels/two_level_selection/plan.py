"""What a step selects from in two levels: a group of requests and its indexes, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

Index = TypeVar("Index")
"""What a first level reads of one prefix and layer, see its class."""


@dataclass(frozen=True, eq=False)
class LayerIndex(Generic[Index]):
    """Both levels' indexes of one prefix in one layer. Read in place: they must stay where they are.

    Attributes:
        first: names the candidates.
        second: ranks them: channels (int16 [num_kv_heads, channels]) or None, codes (uint8 [num_kv_heads, prefix_len,
            bytes of a token]), scale (fp32 [num_kv_heads, channels]): the arrays of a `ScoredGroup` of tokens.
    """

    first: Index
    second: tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class TwoLevelGroup(Generic[Index]):
    """Requests on one prefix, and what they select from it.

    Attributes:
        rows: batch rows of the requests.
        prefix_len: tokens of the prefix.
        num_candidates: positions that the first level names for each KV head, sink and recent window among them; all
            of a prefix that has no more.
        budget: positions that are selected of those, sink and recent window among them.
        layers: the indexes, of every layer that selects, in the order of the layers.
        block_size: tokens per score of the first level, of all KV heads or one for each, the same in all layers.
        num_sink: leading positions always taken.
        num_recent: trailing positions always taken.
        slot_start: where the prefix's position-to-slot table begins in the arena of slots.

    Raises:
        ValueError: fewer candidates than the budget, codes of other sizes than the prefix, blocks below one token, or
            no layer.
    """

    rows: tuple[int, ...]
    prefix_len: int
    num_candidates: int
    budget: int
    layers: tuple[LayerIndex[Index], ...]
    block_size: int | tuple[int, ...] = 1
    num_sink: int = 0
    num_recent: int = 0
    slot_start: int = 0

    def __post_init__(self) -> None:
        if self.num_candidates < min(self.budget, self.prefix_len) or not self.layers:
            raise ValueError(
                f"expected num_candidates of at least the budget of {min(self.budget, self.prefix_len)} and one layer "
                f"or more, got {self.num_candidates} and {len(self.layers)}; the budget is chosen among the candidates"
            )
        sizes = (self.block_size,) if isinstance(self.block_size, int) else self.block_size
        if min(sizes, default=0) < 1:
            raise ValueError(f"expected blocks of one token or more, got block_size={self.block_size}")
        for number, layer in enumerate(self.layers):
            codes = layer.second[1] if len(layer.second) == 3 else None
            if codes is None or codes.dim() != 3 or codes.shape[1] != self.prefix_len:
                raise ValueError(
                    f"expected channels, codes [num_kv_heads, {self.prefix_len}, bytes of a token] and scale as layer "
                    f"{number}'s second index, got {[None if a is None else tuple(a.shape) for a in layer.second]}; is "
                    "it of another prefix?"
                )

    @property
    def count(self) -> int:
        """Candidates of each KV head."""
        return min(self.num_candidates, self.prefix_len)
