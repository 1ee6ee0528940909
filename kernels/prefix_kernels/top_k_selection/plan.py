"""What a step selects from, and where its lists lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

ALIGNED = 4
"""Lists, and rows of scores, begin at multiples of so many entries: 16 bytes."""


@dataclass(frozen=True)
class SelectionGroup:
    """One group's prefix and budget.

    Attributes:
        prefix_len: tokens of the prefix, 0 allowed.
        budget: tokens per KV head, at least 1; sink and recent window count towards it.
        num_sink: leading positions always taken.
        num_recent: trailing positions always taken.
        slot_start: where its position-to-slot table begins in the arena of slots.
        list_begin: where the list of the first KV head is written in the arena of lists.
        head_stride: entries from one KV head's list to the next. See `pack_lists`.

    Raises:
        ValueError: sizes out of range, or windows that do not fit the budget.
    """

    prefix_len: int
    budget: int
    num_sink: int = 0
    num_recent: int = 0
    slot_start: int = 0
    list_begin: int = 0
    head_stride: int = 0

    def __post_init__(self) -> None:
        least = {"budget": 1}
        if self.budget < 1 or min(vars(self).values()) < 0:
            name, value = next(of for of in vars(self).items() if of[1] < least.get(of[0], 0))
            raise ValueError(f"expected {name} >= {least.get(name, 0)}, got {value}; correct the group's plan")
        if self.budget < self.prefix_len and self.num_sink + self.num_recent > self.budget:
            raise ValueError(
                f"expected num_sink + num_recent <= budget={self.budget} tokens, got {self.num_sink} + "
                f"{self.num_recent}; raise the budget or shrink the windows"
            )

    @property
    def count(self) -> int:
        """Tokens that are selected per KV head."""
        return min(self.budget, self.prefix_len)

    def lists_end(self, num_kv_heads: int) -> int:
        """Entries that the arena of lists must have for this group.

        Raises:
            ValueError: a KV head's list would reach the next one's.
        """
        if num_kv_heads > 1 and self.head_stride < self.count:
            raise ValueError(
                f"expected head_stride of at least {self.count}, the tokens selected, got {self.head_stride}; use "
                "pack_lists"
            )
        return self.list_begin + (num_kv_heads - 1) * self.head_stride + self.count

    def lists_in(self, arena: Tensor, num_kv_heads: int) -> Tensor:
        """Its lists, [num_kv_heads, count]: a view of an arena of positions or of slots."""
        begin = arena.storage_offset() + self.list_begin
        return arena.as_strided((num_kv_heads, self.count), (self.head_stride, 1), begin)


def list_stride(budget: int) -> int:
    """Entries from one KV head's list to the next, of lists of so many tokens: lists begin at multiples of 16 bytes."""
    return -(-budget // ALIGNED) * ALIGNED


def place_scores(lengths: Sequence[int], num_kv_heads: int) -> list[tuple[int, ...]]:
    """Where the scores of each KV head begin in an arena, of groups of so many candidates, one behind the other."""
    begins, at = [], 0
    for length in lengths:
        stride = list_stride(length)
        begins.append(tuple(at + head * stride for head in range(num_kv_heads)))
        at += num_kv_heads * stride
    return begins


def pack_lists(groups: Sequence[SelectionGroup], num_kv_heads: int) -> list[SelectionGroup]:
    """The groups with their lists one behind the other, KV head by KV head, from entry 0 on."""
    packed, at = [], 0
    for group in groups:
        packed.append(replace(group, list_begin=at, head_stride=list_stride(group.count)))
        at += num_kv_heads * packed[-1].head_stride
    return packed
