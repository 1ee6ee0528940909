"""The values that operations exchange: paged KV buffers, groups to select for, selections, lists of what was selected.

Checks at construction read shapes and dtypes only, so they never wait for a device; `check_integrity` reads
values and is for tests and debugging.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

ALIGNED = 4
"""Lists, and rows of scores, begin at multiples of so many entries: 16 bytes."""


class CandidateForm(Enum):
    """What a candidate is, and what a query q is multiplied with."""

    TOKEN = 0
    """A token of the prefix: its key."""
    LISTED = 1
    """A token that a list names: its key."""
    MEAN = 2
    """A block of tokens: their mean key."""
    MINMAX = 3
    """A block: each channel's minimum and maximum (Quest, 3.2); the greatest product of a key within them."""
    BALL = 4
    """A block: the mean key and the radius r around it (ArkVale); q.mean + |q| r."""

    @property
    def is_block(self) -> bool:
        """Whether it has several tokens."""
        return self.value >= CandidateForm.MEAN.value


@dataclass(frozen=True, eq=False)
class PagedKV:
    """One layer's KV pool buffers, as SGLang's pool getters return them. Borrowed: never written here.

    Attributes:
        k_cache: [num_slots, num_kv_heads, head_dim], fp32, fp16, bf16 or fp8-e4m3. One slot holds one token, whatever
            the page size. Rows that no operation is asked to read may hold anything, NaN included.
        v_cache: [num_slots, num_kv_heads, v_head_dim], dtype of `k_cache`.
        k_scale, v_scale: what a stored key and value stands for is the stored number times this. 1 but in fp8 pools of
            checkpoints with scales. Numbers of the host, and so constants of a captured graph.

    Raises:
        ValueError: the two buffers do not belong together, or a scale is not positive and finite.
    """

    k_cache: Tensor
    v_cache: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        k, v = self.k_cache, self.v_cache
        if k.dim() != 3 or v.dim() != 3 or k.shape[:2] != v.shape[:2]:
            raise ValueError(
                "expected k_cache and v_cache as [num_slots, num_kv_heads, head_dim] with equal num_slots "
                f"and num_kv_heads, got {tuple(k.shape)} and {tuple(v.shape)}; pass one layer's pool buffers"
            )
        if k.dtype != v.dtype or not k.dtype.is_floating_point or k.device != v.device:
            raise ValueError(
                "expected k_cache and v_cache of one floating dtype on one device, got "
                f"{k.dtype} on {k.device} and {v.dtype} on {v.device}; block-scaled pools cannot be read"
            )
        if not all(0 < scale < math.inf for scale in (self.k_scale, self.v_scale)):
            raise ValueError(
                f"expected k_scale and v_scale positive and finite, got {self.k_scale} and {self.v_scale}; are they "
                "those of the layer?"
            )

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the pool."""
        return self.k_cache.shape[1]

    @property
    def head_dim(self) -> int:
        """Width of one key."""
        return self.k_cache.shape[2]

    @property
    def latent(self) -> bool:
        """Whether values are the first channels of the keys, in the same memory, as in MLA's pools."""
        k, v = self.k_cache, self.v_cache
        return k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and k.shape[2] > v.shape[2]

    def keys(self, slots: Tensor, dtype: torch.dtype, heads: slice = slice(None)) -> Tensor:
        """Keys as the model made them, but for the pool's rounding.

        Args:
            slots: [count] int64 on the pool's device.
            dtype: of the result: the model's.
            heads: KV heads.

        Returns:
            [count, number of heads, head_dim], new memory.
        """
        rows = rows_of(self.k_cache[:, heads], slots).to(dtype)
        return rows if self.k_scale == 1 else rows.mul_(self.k_scale)

    def values(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Values of all KV heads, as `keys`: [count, num_kv_heads, v_head_dim], new memory."""
        rows = rows_of(self.v_cache, slots).to(dtype)
        return rows if self.v_scale == 1 else rows.mul_(self.v_scale)


def rows_of(buffer: Tensor, index: Tensor) -> Tensor:
    """`buffer.index_select(0, index)`, of fp8 too: not every release of torch gathers that on every device."""
    if buffer.dtype is torch.float8_e4m3fn:
        return buffer.view(torch.uint8).index_select(0, index).view(buffer.dtype)
    return buffer.index_select(0, index)


@dataclass(frozen=True, eq=False)
class Selection:
    """Which prefix positions are attended in this step, per KV head of one group.

    Attributes:
        positions: [num_kv_heads, max_count] int32, logical prefix positions, ascending and unique within
            `counts[h]` entries, then padding of -1.
        counts: [num_kv_heads] int32.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """

    positions: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        positions, counts = self.positions, self.counts
        good = positions.dim() == 2 and counts.shape == positions.shape[:1] and positions.device == counts.device
        if not good or not positions.dtype == counts.dtype == torch.int32:
            raise ValueError(
                "expected positions [num_kv_heads, max_count] and counts [num_kv_heads] in int32 on one device, got "
                f"{tuple(positions.shape)} {positions.dtype} and {tuple(counts.shape)} {counts.dtype}"
            )

    @classmethod
    def all(cls, prefix_len: int, num_kv_heads: int, device: torch.device | str | None = None) -> Selection:
        """Every position of a prefix: sparse attention over it is dense attention.

        Args:
            prefix_len: tokens of the prefix, 0 allowed.
            num_kv_heads: KV heads, at least 1.
            device: where the tensors are made; None is torch's default.
        """
        row = torch.arange(prefix_len, dtype=torch.int32, device=device)
        counts = torch.full((num_kv_heads,), prefix_len, dtype=torch.int32, device=device)
        return cls(row.expand(num_kv_heads, prefix_len).contiguous(), counts)

    @property
    def num_kv_heads(self) -> int:
        """KV heads that the selection speaks of."""
        return self.positions.shape[0]

    @property
    def max_count(self) -> int:
        """Width of `positions`."""
        return self.positions.shape[1]

    def check_integrity(self, prefix_len: int) -> None:
        """Raise unless every promise of this class holds for a prefix of that length. Reads device memory.

        Raises:
            ValueError: naming the rule that is broken and the first KV head that breaks it.
        """
        positions = self.positions
        valid = torch.arange(self.max_count, device=positions.device) < self.counts[:, None]
        out_of_range = valid & ((positions < 0) | (positions >= prefix_len))
        not_ascending = valid[:, 1:] & (positions[:, 1:] <= positions[:, :-1])
        rules = (
            ("0 <= count <= max_count", (self.counts < 0) | (self.counts > self.max_count)),
            (f"0 <= position < prefix_len={prefix_len}", out_of_range.any(dim=1)),
            ("positions ascending and unique", not_ascending.any(dim=1)),
            ("padding is -1", ((positions != -1) & ~valid).any(dim=1)),
        )
        for rule, broken in rules:
            if bool(broken.any()):
                raise ValueError(f"selection breaks '{rule}' for KV head {int(broken.int().argmax())}")


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


@dataclass(frozen=True, eq=False)
class SelectedLists:
    """The lists of all groups, in fixed device buffers. Owned by the receiver, written by a selection's `run`.

    Lists lie where the plan says: KV head h of a group writes from entry `list_begin + h * head_stride` on. Nothing is
    written behind a list's count, nor for groups that the plan does not name.

    Attributes:
        positions: [entries] int32, ascending within each list.
        counts: [max_groups, num_kv_heads] int32.
        slots: [entries] int32: the slots of those positions. None: not wanted.
    """

    positions: Tensor
    counts: Tensor
    slots: Tensor | None


def new_lists(entries: int, counts: tuple[int, int], device: torch.device, *, with_slots: bool) -> SelectedLists:
    """Buffers of so many entries, with counts [max_groups, num_kv_heads], that hold no selection."""
    return SelectedLists(
        torch.full((entries,), -1, dtype=torch.int32, device=device),
        torch.zeros(counts, dtype=torch.int32, device=device),
        torch.full((entries,), -1, dtype=torch.int32, device=device) if with_slots else None,
    )


def check_lists(
    lists: SelectedLists, counts: tuple[int, int], lists_end: int, slot_table: Tensor | None, slots_end: int
) -> None:
    """Raise ValueError unless there are counts [groups, num_kv_heads] of so many groups or more, the lists reach
    `lists_end`, and the table of slots `slots_end`; slots both or none.
    """
    check_table("counts", lists.counts, (max(lists.counts.shape[0], counts[0]), counts[1]))
    check_table("positions", lists.positions, (max(lists.positions.shape[0], lists_end),))
    if lists.slots is not None:
        check_table("slots", lists.slots, tuple(lists.positions.shape))
    if (lists.slots is None) != (slot_table is None):
        raise ValueError("expected slots and slot_table both or none of them, got one; use new_lists(with_slots=...)")
    if slot_table is None:
        return
    check_arena("slot_table", slot_table)
    if slot_table.shape[0] < slots_end:
        raise ValueError(f"expected a slot_table of {slots_end} entries, got {slot_table.shape[0]}")


def check_table(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.int32, advice: str = ""
) -> None:
    """Raise ValueError, with this advice, unless a tensor is contiguous, of this shape and dtype."""
    if tuple(tensor.shape) != shape or tensor.dtype is not dtype or not tensor.is_contiguous():
        raise ValueError(
            f"expected {name} {shape} {str(dtype).removeprefix('torch.')} contiguous, got {tuple(tensor.shape)} "
            f"{tensor.dtype} of strides {tensor.stride()}{advice}"
        )


def check_scores(scores: Tensor, end: int) -> None:
    """Raise ValueError unless an arena of scores has `end` entries, contiguous in fp32, and vectors can be read."""
    fits = scores.dim() == 1 and scores.dtype is torch.float32 and scores.shape[0] >= end
    if not fits or not scores.is_contiguous() or scores.data_ptr() % 16:
        raise ValueError(
            f"expected scores as a contiguous float32 arena of {end} entries or more, at a multiple of 16 bytes, got "
            f"{tuple(scores.shape)} {scores.dtype} at {scores.data_ptr() % 16}; was it planned so?"
        )


def check_arena(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless a tensor is [arena], contiguous, in int32 or int64."""
    if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64) or not tensor.is_contiguous():
        raise ValueError(
            f"expected {name} [arena] int32 or int64 contiguous, got {tuple(tensor.shape)} {tensor.dtype} of strides "
            f"{tensor.stride()}"
        )
