"""What a step selects from, cut on the host into chunks that fill the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

NUM_FIELDS = 14
"""int64 fields of an item: group, begin, end (tokens of its chunk), the group's first item, the group's number of
items, prefix_len, count, num_sink, recent_begin, score_start, score_stride, slot_start, list_begin, head_stride. Group
-1: leave at once. Where candidates are listed, tokens are places in the list, and their number stands in the place of
prefix_len."""
_LIST_ALIGNED = 4


@dataclass(frozen=True)
class SelectionGroup:
    """One group's candidates and budget.

    Attributes:
        prefix_len: tokens of the prefix, 0 allowed.
        budget: tokens per KV head, at least 1; sink and recent window count towards it.
        score_start: where its scores begin in the arena.
        score_stride: from one KV head's scores to the next one's.
        block_size: tokens per score, a power of 2, of all KV heads or one for each; 1 is token granularity. KV head h
            has ceil(prefix_len / block_size) scores.
        num_sink: leading positions always taken.
        num_recent: trailing positions always taken.
        slot_start: where its position-to-slot table begins in the arena of slots.
        num_candidates: positions of the list that `TopKSelection.run` takes for each KV head, and from which it
            chooses; None: from all of the prefix. The list ascends and holds the sink and the recent window: they are
            its ends. There is a score for each entry, so `block_size` is 1.
        list_begin: where the list of the first KV head is written in the arena of lists.
        head_stride: entries from one KV head's list to the next. See `pack_lists`.

    Raises:
        ValueError: sizes out of range, windows that do not fit the budget, or blocks of listed candidates.
    """

    prefix_len: int
    budget: int
    score_start: int = 0
    score_stride: int = 0
    block_size: int | tuple[int, ...] = 1
    num_sink: int = 0
    num_recent: int = 0
    slot_start: int = 0
    num_candidates: int | None = None
    list_begin: int = 0
    head_stride: int = 0

    def __post_init__(self) -> None:
        least_block = self.block_size if isinstance(self.block_size, int) else min(self.block_size, default=0)
        for name, value, least in (
            ("prefix_len", self.prefix_len, 0),
            ("budget", self.budget, 1),
            ("score_start", self.score_start, 0),
            ("score_stride", self.score_stride, 0),
            ("block_size", least_block, 1),
            ("num_sink", self.num_sink, 0),
            ("num_recent", self.num_recent, 0),
            ("slot_start", self.slot_start, 0),
            ("list_begin", self.list_begin, 0),
            ("head_stride", self.head_stride, 0),
        ):
            if value < least:
                raise ValueError(f"expected {name} >= {least}, got {value}; correct the group's plan")
        sizes = self.block_size if isinstance(self.block_size, tuple) else (self.block_size,)
        for size in sizes:
            if size & (size - 1):
                raise ValueError(f"expected block_size as a power of 2, got {size}; repeat the scores to such blocks")
        windows = min(self.num_sink + self.num_recent, self.prefix_len)
        if not windows <= self.num_scored <= self.prefix_len or (self.num_candidates is not None and set(sizes) != {1}):
            raise ValueError(
                f"expected num_candidates from {windows} (the windows) to {self.prefix_len} (the prefix) and "
                f"block_size 1 with it, got {self.num_candidates} and {self.block_size}; list the windows, and score "
                "each candidate"
            )
        if self.budget < self.prefix_len and self.num_sink + self.num_recent > self.budget:
            raise ValueError(
                f"expected num_sink + num_recent <= budget={self.budget} tokens, got {self.num_sink} + "
                f"{self.num_recent}; raise the budget or shrink the windows"
            )

    @property
    def count(self) -> int:
        """Tokens that are selected per KV head."""
        return min(self.budget, self.num_scored)

    @property
    def num_scored(self) -> int:
        """Tokens that compete: the listed candidates, or all of the prefix."""
        return self.prefix_len if self.num_candidates is None else self.num_candidates

    def block_sizes(self, num_kv_heads: int) -> list[int]:
        """Of every KV head. Raises ValueError where there is not one for each."""
        if isinstance(self.block_size, int):
            return [self.block_size] * num_kv_heads
        if len(self.block_size) != num_kv_heads:
            raise ValueError(
                f"expected a block size for each of {num_kv_heads} KV heads, got {len(self.block_size)}; "
                "give one for all, or one for each"
            )
        return list(self.block_size)

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

    def scores_end(self, num_kv_heads: int) -> int:
        """Entries that the arena of scores must have for this group; 0 where none is read."""
        if self.num_scored == 0:
            return 0
        sizes = enumerate(self.block_sizes(num_kv_heads))
        return max(self.score_start + h * self.score_stride + -(-self.num_scored // size) for h, size in sizes)


def list_stride(budget: int) -> int:
    """Entries from one KV head's list to the next, of lists of so many tokens: lists begin at multiples of 16 bytes."""
    return -(-budget // _LIST_ALIGNED) * _LIST_ALIGNED


def pack_lists(groups: Sequence[SelectionGroup], num_kv_heads: int) -> list[SelectionGroup]:
    """The groups with their lists one behind the other, KV head by KV head, from entry 0 on."""
    packed, at = [], 0
    for group in groups:
        packed.append(replace(group, list_begin=at, head_stride=list_stride(group.count)))
        at += num_kv_heads * packed[-1].head_stride
    return packed


def cut_groups(groups: Sequence[SelectionGroup], target: int, tile: int) -> list[list[int]]:
    """Items of all groups, chunks of one length in whole tiles: at most `target` items, and one more for each group.

    A group without tokens has one item: it writes a count of 0.
    """
    total = sum(group.num_scored for group in groups)
    chunk = max(1, -(-total // (target * tile))) * tile
    items: list[list[int]] = []
    for g, group in enumerate(groups):
        num_items = max(1, -(-group.num_scored // chunk))
        first = len(items)
        for number in range(num_items):
            begin = number * chunk
            end = min(begin + chunk, group.num_scored)
            fields = [g, begin, end, first, num_items, group.num_scored, group.count, group.num_sink]
            fields += [group.num_scored - group.num_recent, group.score_start, group.score_stride, group.slot_start]
            fields += [group.list_begin, group.head_stride]
            items.append(fields)
    return items
