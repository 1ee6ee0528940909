"""The programs of a selection: who has which stretch of which group, what they tell each other, and their launches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from prefix_kernels.anchor_selection.kernels import list_kernel
from prefix_kernels.kernels import COARSE, NUM_BINS, ROW
from prefix_kernels.launching import launch, launch_behind, send
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import ALIGNED, CandidateForm, SelectedLists, SelectionGroup, check_lists

ITEM_FIELDS = 11
"""int64 fields of an item: group, chunk, the group's number of chunks, prefix_len, tokens that are selected, num_sink,
recent_begin, slot_start, list_begin, head_stride, number of all items (in every row of the table)."""
_ROUNDS = 2
"""Of items, that groups of a batch are cut into at most."""
_ITEM_TOKENS = 1500
"""What an item costs beside its tokens, in tokens (H100, 64 channels: about 6 us of sums, a meeting and counts)."""
_WORTH = 0.95
"""Of the busiest program's tokens with groups that are cut alike, what they may be where some are cut more."""
LIST_WARPS = 4
"""Of the launch that lists what was scored."""
TOKENS_OF_A_THREAD = 16
CHUNKS_AT_ONCE = 32
_MOST_TOKENS = 2**30
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
POOL = {Pooling.MAX: 1, Pooling.MEAN: 2}
"""What the kernels call them."""


class Form(Enum):
    """How the two phases of a selection's scores are launched. The result is the same."""

    FUSED = "fused"
    """In one launch, whose programs wait for each other: all of them must fit the GPU at a time."""
    UNFUSED = "unfused"
    """In one launch for each phase: on any GPU, and in Triton's interpreter."""


class ScoredTokens(NamedTuple):
    """What a selection's scores leave behind, all in device buffers of fixed place.

    Attributes:
        scores: fp32 arena, natural log.
        heads: int64 [max_groups, num_kv_heads, 4], as `ScoredGroup.heads`.
        at_least: int32 [max_items, num_kv_heads, ...], how many tokens of an item have which key or a higher one.
        form: of the candidates.
    """

    scores: Tensor
    heads: Tensor
    at_least: Tensor
    form: CandidateForm


def share_programs(lengths: Sequence[int], num_items: int, most: int) -> list[int]:
    """Items of each group, so that the longest stretch is as short as can be.

    Args:
        lengths: tokens of each group.
        num_items: of all groups; more where there are more groups, fewer where no group can have more.
        most: items of a group, at most.

    Returns:
        One for each group, or more.
    """
    shares = [1] * len(lengths)
    if most == 1 or num_items <= len(lengths):
        return shares
    longest: list[tuple[float, int]] = [(-length, group) for group, length in enumerate(lengths)]
    heapq.heapify(longest)
    for _ in range(num_items - len(lengths)):
        if not longest:
            break
        _, group = heapq.heappop(longest)
        shares[group] += 1
        if shares[group] < most:
            heapq.heappush(longest, (-lengths[group] / shares[group], group))
    return shares


def _tokens_of_the_busiest(lengths: Tensor, shares: Tensor, num_programs: int) -> float:
    """Tokens of the program that has most of them, each item counted as `_ITEM_TOKENS` more."""
    costs = (_ITEM_TOKENS + lengths.double() / shares).repeat_interleave(shares)
    busy = torch.bincount(torch.arange(len(costs)) % num_programs, costs, minlength=1)
    return float(busy.max())


def _in_whole_rounds(lengths: Tensor, num_programs: int) -> tuple[Tensor, Tensor]:
    """Groups in the order of their items, and items of each, where the longest ones fill whole rounds and the others
    one more; none where there are no others.
    """
    rounds = max(1, len(lengths) // num_programs)
    most = rounds * num_programs if len(lengths) > num_programs else num_programs // 2
    order = lengths.argsort(descending=True, stable=True)
    if not 0 < most < len(order):
        return order[:0], order[:0]
    parts = lengths[order[:most]], lengths[order[most:]]
    rooms = rounds * num_programs, num_programs
    shares = [share_programs(part.tolist(), room, num_programs) for part, room in zip(parts, rooms, strict=True)]
    return order, torch.tensor(shares[0] + shares[1], dtype=torch.int64)


def make_items(groups: Sequence[SelectionGroup], num_programs: int, count: int = 1, apart: int = 0) -> Tensor:
    """Items in the order of programs: program p has items p, p + num_programs, and so on.

    Items of a group follow each other, each on a program of its own. So programs that wait for each other wait for
    earlier items at most, and some program always goes on. Where groups do not share the programs evenly, they are cut
    into two rounds of items, or those that are more than whole rounds share one more. A group without tokens has an
    item behind: it writes a count of 0.

    Args:
        groups: whose items.
        num_programs: of a KV head.
        count, apart: all groups so many times, their lists so many entries further each time.

    Returns:
        int64 [items, ITEM_FIELDS] on the host.
    """
    of_groups = [
        (g.prefix_len, g.count, g.num_sink, g.prefix_len - g.num_recent, g.slot_start, g.list_begin, g.head_stride)
        for g in groups
    ]
    fields = torch.tensor(of_groups, dtype=torch.int64).view(-1, 7).repeat(count, 1)
    fields[:, 5] += apart * torch.arange(count).repeat_interleave(len(groups))
    with_tokens = fields[:, 0].nonzero().flatten()
    lengths = fields[with_tokens, 0]
    of_rounds = [
        torch.tensor(share_programs(lengths.tolist(), rounds * num_programs, num_programs), dtype=torch.int64)
        for rounds in range(1, _ROUNDS + 1)
    ]
    best = min(of_rounds, key=lambda shares: _tokens_of_the_busiest(lengths, shares, num_programs))
    order, some_more = _in_whole_rounds(lengths, num_programs)
    busiest = _WORTH * _tokens_of_the_busiest(lengths, best, num_programs)
    if len(order) and _tokens_of_the_busiest(lengths[order], some_more, num_programs) < busiest:
        with_tokens, best = with_tokens[order], some_more
    without = (fields[:, 0] == 0).nonzero().flatten()
    groups_in_order, shares = torch.cat([with_tokens, without]), torch.cat([best, torch.ones_like(without)])
    group, share = (one.repeat_interleave(shares) for one in (groups_in_order, shares))
    chunk = torch.arange(len(group)) - (shares.cumsum(0) - shares).repeat_interleave(shares)
    number = torch.full_like(group, len(group))
    return torch.cat([torch.stack([group, chunk, share], 1), fields[group], number[:, None]], 1)


class Programs:
    """The programs of a selection, and what they tell each other in fixed device buffers.

    Args:
        num_kv_heads: KV heads.
        of_a_head: programs of a KV head.
        max_groups: groups of a batch, at most.
        stretch: candidates that a program's stretch is a multiple of.
        device: where the buffers are made.
        max_rows: query rows of a group, at most, whose sums are kept.
        list_warps: of a program that lists.
        list_chunks: of so many stretches counts are read at once.

    Attributes:
        of_a_head: as given.
        at_least: int32 [max_items, num_kv_heads, COARSE + NUM_BINS], as `ScoredTokens`.
    """

    def __init__(
        self,
        num_kv_heads: int,
        of_a_head: int,
        max_groups: int,
        stretch: int,
        device: torch.device,
        *,
        max_rows: int = 0,
        list_warps: int = LIST_WARPS,
        list_chunks: int = CHUNKS_AT_ONCE,
    ) -> None:
        self.of_a_head, self._counts = of_a_head, (max_groups, num_kv_heads)
        self._stretch, self._list_warps, self._list_chunks = stretch, list_warps, list_chunks
        max_items = _ROUNDS * of_a_head + max_groups
        of_items = (max_items, num_kv_heads, COARSE.value + NUM_BINS.value)
        self._items = torch.zeros(max_items, ITEM_FIELDS, dtype=torch.int64, device=device)
        self.at_least = torch.zeros(of_items, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(self._counts, dtype=torch.int64, device=device)
        self._peak = torch.empty(num_kv_heads, max_items, max_rows, dtype=torch.float32, device=device)
        self._total = torch.empty_like(self._peak)
        self.plan(())

    def plan(self, groups: Sequence[SelectionGroup], count: int = 1, apart: int = 0) -> None:
        """Write the table of items, without a wait; arguments as of `make_items`."""
        self._planned = make_items(groups, self.of_a_head, count, apart)
        table = torch.zeros(self._items.shape, dtype=torch.int64)
        table[:, -1] = len(self._planned)
        table[: len(self._planned)] = self._planned
        send(table, self._items)
        ends = [group.lists_end(self._counts[1]) for group in groups]
        self._lists_end = (count - 1) * apart + max(ends, default=0)
        self._slots_end = max((group.slot_start + group.prefix_len for group in groups), default=0)

    @property
    def stretches(self) -> dict[int, tuple[int, int]]:
        """Of each planned group the number of its first item, and of its items."""
        first = (self._planned[:, 1] == 0).nonzero().flatten()
        rows = self._planned[first, :3].tolist()
        return {group: (number, share) for number, (group, _, share) in zip(first.tolist(), rows, strict=True)}

    @property
    def grid(self) -> tuple[int, int]:
        """Of a launch."""
        return self.of_a_head, self._counts[1]

    @property
    def arguments(self) -> dict[str, Any]:
        """What kernels are told of their programs, by parameter name."""
        return {
            "items_ptr": self._items,
            "at_least_ptr": self.at_least,
            "arrived_ptr": self._arrived,
            "peak_ptr": self._peak,
            "total_ptr": self._total,
            "max_items": self._items.shape[0],
            "max_rows": self._peak.shape[2],
            "ITEM_FIELDS": ITEM_FIELDS,
            "STRETCH": self._stretch,
        }

    def score(self, kernel: Any, form: Form, arguments: dict[str, Any], **options: int | None) -> None:
        """Launch both phases of scores; `arguments` beside those of the programs.

        Raises:
            ValueError: one launch in Triton's interpreter.
        """
        joined = form is Form.FUSED
        if joined and knobs.runtime.interpret:
            raise ValueError("expected Form.UNFUSED in Triton's interpreter, where no program waits for a later one")
        options |= {"launch_cooperative_grid": True} if joined else {}
        for first, last in ((1, 2),) if joined else ((1, 1), (2, 2)):
            phases = {"FIRST_PHASE": first, "LAST_PHASE": last}
            launch(kernel, self.grid, arguments | self.arguments | phases, **options)

    def make_lists(
        self,
        found: ScoredTokens,
        lists: SelectedLists,
        slot_table: Tensor | None,
        *,
        candidates: Tensor | None = None,
        entry_tokens: int = 1,
        behind: bool = False,
    ) -> None:
        """Launch what lists the tokens that were scored.

        Args:
            found: as scores left them.
            lists: written, up to the counts.
            slot_table: int32 or int64 arena in which the groups' position-to-slot tables lie; with `lists.slots`.
            candidates, entry_tokens: of listed candidates, as of `ScoreInputs` and `ScoreShape`.
            behind: overlapped with the launch before it (`launch_behind`).

        Raises:
            ValueError: buffers of another shape or dtype than planned for; slots without a table.
        """
        check_lists(lists, self._counts, self._lists_end, slot_table, self._slots_end)
        arguments = self.arguments | {
            "slot_table_ptr": lists.positions if slot_table is None else slot_table,
            "positions_ptr": lists.positions,
            "slots_ptr": lists.positions if lists.slots is None else lists.slots,
            "counts_ptr": lists.counts,
            "HAS_SLOTS": lists.slots is not None,
            "heads_ptr": found.heads,
            "scores_ptr": found.scores,
            "candidates_ptr": lists.positions if candidates is None else candidates,
            "BLOCK_CHUNKS": self._list_chunks,
            "TILE": 32 * self._list_warps * ROW.value,
            "FORM": found.form.value,
            "ENTRY": entry_tokens,
            "OVERLAPPED": False,
        }
        start = launch_behind if behind else launch
        start(list_kernel, self.grid, arguments, num_warps=self._list_warps)


def check_sizes(max_prefix_len: int, num_kv_heads: int, **others: int) -> None:
    """Raise ValueError unless sizes are at least 1, and tokens can be numbered in all KV heads together."""
    sizes = {"max_prefix_len": max_prefix_len, **others}
    if min(sizes.values()) < 1 or max_prefix_len * num_kv_heads >= _MOST_TOKENS:
        raise ValueError(f"expected sizes of at least 1 and max_prefix_len < 2^30 / {num_kv_heads}, got {sizes}")


def check_groups(
    scored: Sequence[Any], selected: Sequence[SelectionGroup], num_kv_heads: int, limits: tuple[int, int]
) -> None:
    """Raise ValueError unless groups are as many, within the limits, and their scores begin where they can be read.

    Args:
        scored: have `score_begins`, per KV head.
        selected: in the same order.
        num_kv_heads: KV heads.
        limits: tokens of a prefix and entries of lists, at most.
    """
    if len(scored) != len(selected):
        raise ValueError(
            f"expected as many groups scored as selected, got {len(scored)} and {len(selected)}; plan both together"
        )
    for of, group in zip(scored, selected, strict=True):
        found = (group.prefix_len, group.lists_end(num_kv_heads))
        if any(one > most for one, most in zip(found, limits, strict=True)):
            raise ValueError(
                f"expected at most {limits} tokens of a prefix and entries of lists, got {found}; raise the limits"
            )
        if len(of.score_begins) != num_kv_heads or any(begin % ALIGNED for begin in of.score_begins):
            raise ValueError(
                f"expected scores to begin at multiples of {ALIGNED}, for each of {num_kv_heads} KV heads, got "
                f"{of.score_begins}; pad the rows"
            )


def check_rows(scored: Sequence[Any], max_groups: int, room: int, max_batch: int, max_group: int) -> list[int]:
    """Batch rows of all groups, one after the other. Raises ValueError unless groups are `max_groups` at most, of 1 to
    `max_group` rows each, `room` together, and all rows below `max_batch`.
    """
    rows = [row for of in scored for row in of.rows]
    good = len(scored) <= max_groups and len(rows) <= room and all(0 <= row < max_batch for row in rows)
    if not good or not all(1 <= len(of.rows) <= max_group for of in scored):
        raise ValueError(
            f"expected at most {max_groups} groups of {room} rows together, 1 to {max_group} each, below {max_batch}, "
            f"got {len(scored)} groups of rows {rows}"
        )
    return rows


def check_queries(q: Tensor, rows: tuple[int, int], num_qo_heads: int, head_dim: int | None) -> None:
    """Raise ValueError unless queries are [rows, num_qo_heads, head_dim], of the least to the most rows; None: any."""
    good = q.dim() == 3 and rows[0] <= q.shape[0] <= rows[1] and q.shape[1] == num_qo_heads
    if not good or head_dim not in (None, q.shape[2]) or q.stride(2) != 1 or q.dtype not in _DTYPES:
        raise ValueError(
            f"expected q [{rows[0]} to {rows[1]}, {num_qo_heads}, {head_dim or 'head_dim'}] as planned, in fp32, fp16 "
            f"or bf16 with adjacent channels, got {tuple(q.shape)} {q.dtype} of strides {q.stride()}"
        )
