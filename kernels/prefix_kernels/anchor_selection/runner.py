"""An anchor layer's selection, from queries to lists: planned on the host, then run in two launches, or in three."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from prefix_kernels.anchor_selection.kernels import list_kernel, score_kernel
from prefix_kernels.grouped_attention.config import has_specialized
from prefix_kernels.kernels import COARSE, NUM_BINS
from prefix_kernels.launching import (
    arguments_of,
    block_of,
    check_power_of_2,
    launch,
    launch_behind,
    programs_at_once,
    send,
    shared_registers,
)
from prefix_kernels.pooled_scores.tables import Layers, ScoredGroup, ScoreInputs, ScoreShape, ScoreTables
from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection.plan import ALIGNED, SelectionGroup
from prefix_kernels.types import CandidateForm, SelectedLists, check_lists, new_lists

_HOPPER = 9
_SHARED_BYTES = {True: 224 << 10, False: 160 << 10}
"""Of a multiprocessor that programs share, from sm_90 on and before, less what the GPU takes for itself of each."""
_COUNTS_BYTES = 10 << 10
"""Counts of keys, and what else a program has."""
_CHANNELS = (32, 64, 96, 128)
"""That sm_90's own kernel has: pieces of 32."""
ITEM_FIELDS = 11
"""int64 fields of an item: group, chunk, the group's number of chunks, prefix_len, tokens that are selected, num_sink,
recent_begin, slot_start, list_begin, head_stride, number of all items (in every row of the table)."""
_MOST_ROWS = 2**31
"""Of codes, that it can number; it looks a few steps ahead."""
_STEPS_AHEAD = 6
_ROUNDS = 2
"""Of items, that groups of a batch are cut into at most."""
_ITEM_TOKENS = 1500
"""What an item costs beside its tokens, in tokens (H100, 64 channels: about 6 us of sums, a meeting and counts)."""
_FEW_ROWS = 32
"""Of so many rows at most, the sums of 64 programs are read at once, else of 32. Groups of so few rows in a batch of
more have tiles of their own, of `_FEW_ROWS_BLOCK_N` candidates, on sm_90."""
_FEW_ROWS_BLOCK_N = 128
_LEAST_ROWS = 8
"""Groups of so few rows have the tiles of a batch of as few, on sm_90: of tokens, not of lists, and 64 channels at
most."""
_MOST_CODES = 256 * 64
"""Of a step of sm_90's own kernel: three steps have 24 KiB of shared memory."""
TOKENS_OF_A_THREAD = 16
_POOL = {Pooling.MAX: 1, Pooling.MEAN: 2}
"""What the kernels call them."""
_MOST_TOKENS = 2**30
_CHUNKS_AT_ONCE = 32
_MORE_CHUNKS = 64
"""Of more programs to a KV head, lest a second round be for one of them."""


class Form(Enum):
    """How the two phases of a selection's scores are launched. The result is the same."""

    FUSED = "fused"
    """In one launch, whose programs wait for each other: all of them must fit the GPU at a time."""
    UNFUSED = "unfused"
    """In one launch for each phase: on any GPU, and in Triton's interpreter."""


@dataclass(frozen=True)
class AnchorConfig:
    """Tile and schedule.

    Attributes:
        block_m: query rows of a tile, a power of 2 of at least 8.
        block_n: candidates of a step, a power of 2 of at least 64.
        num_warps: of a program.
        num_stages: steps that are on their way at a time.
        halves: whether rows of 24 words of 4-bit codes (96 channels) are multiplied as 16 and 8, not as 32 of which 8
            are padding. Warp-group instructions (sm_90, `block_m` from 16 on) take that as it comes; others reorder it.
        programs_per_sm: programs that a multiprocessor holds at a time. Registers are bounded so that it does.
        specialized: scores by sm_90's own kernel (`fits_specialized`); `num_stages` and `halves` then say nothing.

    Raises:
        ValueError: other tiles, or a program that has fewer than 64 registers a thread; with `specialized` also more
            than 128 rows, or other numbers of warps than 4.
    """

    block_m: int = 16
    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    halves: bool = False
    specialized: bool = False

    def __post_init__(self) -> None:
        check_power_of_2("block_m", self.block_m, 8)
        check_power_of_2("block_n", self.block_n, 64)
        if self.specialized and not (self.num_warps == 4 and self.block_m <= 128):
            raise ValueError(
                f"expected 4 warps and at most 128 rows for sm_90's own kernel, got {self.num_warps} and {self.block_m}"
            )
        shared_registers(self.num_warps, self.programs_per_sm)

    @property
    def max_registers(self) -> int:
        """Registers of a thread that let `programs_per_sm` programs share those of a multiprocessor."""
        return shared_registers(self.num_warps, self.programs_per_sm)

    @property
    def stretch(self) -> int:
        """Candidates that a program's stretch is a multiple of. Those of a batch of many rows may be of few."""
        return max(self.block_n, _FEW_ROWS_BLOCK_N) if self.specialized else self.block_n

    def launch_options(self, *, joined: bool) -> dict[str, int | None]:
        """Of `launching.launch`; joined: programs that wait for each other."""
        options: dict[str, int | None] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options | {"maxnreg": self.max_registers} | ({"launch_cooperative_grid": True} if joined else {})

    def arguments(self, shape: ScoreShape) -> dict[str, int]:
        """What kernels are told of it, by parameter name."""
        halves = self.halves and shape.bits == 4 and shape.row_units == 24
        return {
            "BLOCK_K": 16 if halves else block_of(shape.row_units, 16),
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            # Not of the number of programs, on which the order of sums would depend.
            "BLOCK_CHUNKS": 32,
            # Sixteen candidates to a warp, see the kernel's sums.
            "LANES": min(self.num_warps, self.block_n // 16),
            "STAGES": self.num_stages,
        }


def fits_specialized(shape: ScoreShape) -> bool:
    """Whether sm_90's own kernel has it: tokens in codes of 4 bits, pooled by the maximum."""
    return not shape.form.is_block and shape.bits == 4 and shape.channels in _CHANNELS and shape.pooling is Pooling.MAX


def default_config(
    shape: ScoreShape,
    num_rows: int,
    capability: tuple[int, int] = (9, 0),
    *,
    specialized: bool = False,
) -> AnchorConfig:
    """Launch parameters by the rows of a batch and the GPU.

    Args:
        shape: of heads and index.
        num_rows: requests of the largest group.
        capability: of the GPU. Before (9, 0) tiles are lower: there, scores leave the registers otherwise.
        specialized: whether sm_90's own kernel may run: on such a GPU, for queries that are halves.
    """
    if specialized and capability[0] == _HOPPER and fits_specialized(shape):
        block_m = min(128, block_of(num_rows * shape.gqa, 8))
        block_n = _block_n(shape, block_m)
        # A list of one request or two is too short for more: each program reads what all of them counted.
        programs = 1 if block_m == 8 and shape.form is CandidateForm.LISTED else 2
        return AnchorConfig(block_m, block_n, 4, 3, programs, specialized=True)
    hopper = capability >= (9, 0)
    block_m = min(128 if hopper else 32, block_of(num_rows * shape.gqa, 8))
    halves = hopper and block_m >= 16
    if shape.form.is_block or shape.shared_rows:
        # Warp-group instructions, from 16 rows on, take two thirds of the time of others.
        return _config_of_blocks(shape, max(block_m, 16) if hopper else block_m, hopper)
    if block_m == 128:
        # One tile of all rows: codes are read and unpacked once a phase.
        return AnchorConfig(block_m, 128, 8, 3, 1, halves)
    return AnchorConfig(block_m, 128 if hopper else 64, 4, 3, 2, halves)


def _block_n(shape: ScoreShape, block_m: int) -> int:
    """Candidates of a step of sm_90's own kernel. Codes that are on their way take at most 24 KiB of shared memory."""
    block_n = 256 if block_m <= 16 else 128 if block_m <= _FEW_ROWS else 64
    return min(block_n, 128) if shape.channels > 64 else block_n


def _config_of_blocks(shape: ScoreShape, block_m: int, hopper: bool) -> AnchorConfig:
    """What fits the shared memory of a multiprocessor; of few candidates all programs have some."""
    arrays, row_bytes = 2 if shape.form is CandidateForm.MINMAX else 1, shape.channels * shape.bits // 8
    while True:
        wide = block_m == 128
        for stages, programs in ((3, 1 if wide else 2), (2, 1 if wide else 2), (2, 1)):
            sizes = (block_m, 128 if wide else 64, 8 if wide else 4)
            config = AnchorConfig(*sizes, stages, programs, hopper and block_m >= 16)
            # Queries may be fp32.
            needed = arrays * (config.block_n * row_bytes * stages + 4 * shape.channels * block_m)
            if needed <= _SHARED_BYTES[hopper] // programs - _COUNTS_BYTES:
                return config
        if block_m == 8:
            return config
        block_m //= 2


LIST_WARPS = 4
"""Of the launch that lists what was scored."""


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


def make_items(groups: Sequence[SelectionGroup], num_programs: int, count: int = 1, apart: int = 0) -> Tensor:
    """Items in the order of programs: program p has items p, p + num_programs, and so on.

    Items of a group follow each other, each on a program of its own. So programs that wait for each other wait for
    earlier items at most, and some program always goes on. Where groups do not share the programs evenly, they are cut
    into two rounds of items. A group without tokens has an item behind: it writes a count of 0.

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
    without = (fields[:, 0] == 0).nonzero().flatten()
    groups_in_order, shares = torch.cat([with_tokens, without]), torch.cat([best, torch.ones_like(without)])
    group, share = (one.repeat_interleave(shares) for one in (groups_in_order, shares))
    chunk = torch.arange(len(group)) - (shares.cumsum(0) - shares).repeat_interleave(shares)
    number = torch.full_like(group, len(group))
    return torch.cat([torch.stack([group, chunk, share], 1), fields[group], number[:, None]], 1)


def item_table(items: Tensor, like: Tensor) -> Tensor:
    """Items as the kernels' table [rows, ITEM_FIELDS] on the device has them: in each row how many there are."""
    table = torch.zeros(like.shape, dtype=torch.int64)
    table[:, -1] = len(items)
    table[: len(items)] = items
    return table


def stretches_of(items: Tensor) -> dict[int, tuple[int, int]]:
    """Of each group the number of its first item, and of its items."""
    first = (items[:, 1] == 0).nonzero().flatten()
    return {
        group: (number, share)
        for number, (group, _, share) in zip(first.tolist(), items[first, :3].tolist(), strict=True)
    }


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


class AnchorSelection:
    """Exactly min(budget, prefix_len) positions per group and KV head: sink, recent window, then the best tokens.

    Scores are the log of the (largest or mean) share of attention over the rows of a group, by the codes of a token
    index, of blocks, or of listed tokens: `pooling.pool_scores`. Source of the pooling: Kascade, 3.4 (after the
    softmax). Tokens rank by keys of 11 bits: natural logarithms in steps of 0.0215 from -44 to 0, what lies outside
    ties at the ends, -inf and NaN last. Among equal keys the most recent comes first.

    Runs of one object follow each other on one stream. If a launch dies half-way, make a new object: its programs'
    counters are left behind.

    Args:
        shape: of heads and index.
        max_batch: requests of a batch, at most; of all layers of `plan`, where it has several.
        max_groups: groups of a batch, at most; likewise.
        max_prefix_len: tokens of a prefix, at most.
        list_entries: of the lists of all groups and KV heads together, at most; likewise.
        config: tile and schedule.
        device: where the buffers are made.
        form: scores in one launch, or in one for each phase.
        num_programs: of a launch, shared by the KV heads and then by the groups; None: as many as run at a time.
        max_group: requests of a group, at most; None: all of a batch.
        list_warps: of a program that lists; more where its stretches are long.

    Raises:
        ValueError: sizes below 1, a prefix of 2^30 tokens or more, heads or bits as `ScoreTables` says.
    """

    def __init__(
        self,
        shape: ScoreShape,
        max_batch: int,
        max_groups: int,
        max_prefix_len: int,
        list_entries: int,
        config: AnchorConfig,
        device: torch.device,
        *,
        form: Form = Form.FUSED,
        num_programs: int | None = None,
        max_group: int | None = None,
        list_warps: int = LIST_WARPS,
    ) -> None:
        sizes = (max_batch, max_groups, max_prefix_len, list_entries)
        if min(sizes) < 1 or max_prefix_len >= _MOST_TOKENS:
            raise ValueError(
                "expected max_batch, max_groups, max_prefix_len and list_entries of at least 1 and max_prefix_len < "
                f"2^30, got {sizes}"
            )
        if config.specialized:
            _check_fits(shape, config, device)
        self.shape, self.config, self.form, self.device = shape, config, form, device
        self._list_warps = list_warps
        self.max_groups, self.max_prefix_len, self.list_entries = max_groups, max_prefix_len, list_entries
        self._tables = ScoreTables(shape, max_batch, max_groups, device, max_group)
        heads = shape.num_kv_heads
        programs = max(1, (num_programs or programs_at_once(device, config.programs_per_sm)) // heads)
        whole = config.specialized and config.block_m <= _FEW_ROWS and shape.form is CandidateForm.TOKEN
        self.programs_of_a_head = programs if whole else _in_rounds(programs)
        max_items = _ROUNDS * self.programs_of_a_head + max_groups

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._items = integers(max_items, ITEM_FIELDS, dtype=torch.int64)
        self._at_least = integers(max_items, heads, COARSE.value + NUM_BINS.value)
        self._arrived = integers(max_groups, heads, dtype=torch.int64)
        self._peak = torch.empty(heads, max_items, self._tables.max_rows, dtype=torch.float32, device=device)
        self._total = torch.empty_like(self._peak)
        self._slots_end = self._scores_end = self._lists_end = 0
        self.plan((), ())

    def new_lists(self, *, with_slots: bool = False) -> SelectedLists:
        """Buffers for `run()`, holding no selection. One for each layer whose lists must outlive the next run."""
        counts = (self.max_groups, self.shape.num_kv_heads)
        return new_lists(self.list_entries, counts, self._items.device, with_slots=with_slots)

    def plan(
        self, scored: Sequence[ScoredGroup], selected: Sequence[SelectionGroup], layers: Layers | None = None
    ) -> None:
        """Write the tables of the next runs. Copies to the device, without a wait, on the stream of the runs.

        Args:
            scored: the groups, and where their codes and scores lie. Scores begin at multiples of 4.
            selected: their lengths, windows and budgets, in the same order.
            layers: all this once more for each of some layers, whose queries follow each other; None: for one.

        Raises:
            ValueError: as `ScoreTables.plan` says; another number of groups in one than in the other; prefixes or
                lists that are larger than there is room for; lists of KV heads that overlap; another number of
                candidates than of tokens to choose from; or scores that begin elsewhere. The plan before stays.
        """
        if len(scored) != len(selected):
            raise ValueError(
                f"expected as many groups scored as selected, got {len(scored)} and {len(selected)}; plan both together"
            )
        for of, group in zip(scored, selected, strict=True):
            self._check_group(of, group)
        count, apart = (1, 0) if layers is None else (layers.number, layers.lists)
        lists_end = max((group.lists_end(self.shape.num_kv_heads) for group in selected), default=0)
        if (count - 1) * apart + lists_end > self.list_entries or (layers is not None and layers.scores % ALIGNED):
            raise ValueError(
                f"expected at most {self.list_entries} entries of lists, and scores at multiples of {ALIGNED}, got "
                f"{layers} of lists up to {lists_end}; raise the limit"
            )
        if self.config.specialized:
            self._check_rows(scored)
        self._tables.plan(scored, layers)
        items = make_items(selected, self.programs_of_a_head, count, apart)
        self._planned = items
        send(item_table(items, self._items), self._items)
        # Scores are read four at a time.
        self._scores_end = max((of.scores_end for of in scored), default=0)
        self._scores_end += 0 if layers is None else (count - 1) * layers.scores
        self._scores_end += -self._scores_end % ALIGNED
        self._lists_end = (count - 1) * apart + lists_end
        self._slots_end = max((group.slot_start + group.prefix_len for group in selected), default=0)

    def run(
        self,
        inputs: ScoreInputs,
        scores: Tensor,
        lists: SelectedLists,
        *,
        slot_table: Tensor | None = None,
    ) -> None:
        """Select as planned, in two launches, or in three (`form`).

        Args:
            inputs: queries and what they are scored against.
            scores: fp32 arena, written at the groups' `score_begins`: natural log of the pooled share of attention.
                Not written for a group whose budget holds all of its tokens.
            lists: written, up to the counts.
            slot_table: int32 or int64 arena in which the groups' position-to-slot tables lie; with `lists.slots`.

        Raises:
            ValueError: a tensor of another shape or dtype than planned for; slots without a table; or one launch in
                Triton's interpreter.
            RuntimeError: CUDA's, where one launch does not fit the GPU; take fewer `num_programs`, or `Form.UNFUSED`.
        """
        counts = (self.max_groups, self.shape.num_kv_heads)
        check_lists(lists, counts, self._lists_end, slot_table, self._slots_end)
        arguments = self._score(inputs, scores) | {
            **lists.arguments(slot_table),
            "OVERLAPPED": False,
            "BLOCK_CHUNKS": _CHUNKS_AT_ONCE if self.programs_of_a_head <= _CHUNKS_AT_ONCE else _MORE_CHUNKS,
            "TILE": 32 * self._list_warps * TOKENS_OF_A_THREAD,
        }
        # Programs of scores that wait for each other are all on the GPU before they let these come. Scores themselves
        # are not launched behind what is before them: their programs would stand where that ends first.
        start = launch_behind if self.form is Form.FUSED and self.config.specialized else launch
        start(list_kernel, self._grid, arguments_of(list_kernel, arguments), num_warps=self._list_warps)

    def score(self, inputs: ScoreInputs, scores: Tensor) -> ScoredTokens:
        """The launches of `run` up to scores, whose counts and tables are returned."""
        heads = self._score(inputs, scores)["heads_ptr"]
        return ScoredTokens(scores, heads, self._at_least, self.shape.form)

    @property
    def stretches(self) -> dict[int, tuple[int, int]]:
        """Of each planned group the number of its first item, and of its items."""
        return stretches_of(self._planned)

    @property
    def _grid(self) -> tuple[int, int]:
        return self.programs_of_a_head, self.shape.num_kv_heads

    def _score(self, inputs: ScoreInputs, scores: Tensor) -> dict[str, Any]:
        """Launch; what kernels were told."""
        if self.form is Form.FUSED and knobs.runtime.interpret:
            raise ValueError("expected Form.UNFUSED in Triton's interpreter, where no program waits for a later one")
        arguments = self._tables.arguments(inputs, scores) | self._own_arguments()
        if scores.dim() != 1 or scores.shape[0] < self._scores_end or scores.data_ptr() % 16:
            raise ValueError(
                f"expected scores [arena] of {self._scores_end} entries or more, at a multiple of 16 bytes, got "
                f"{tuple(scores.shape)} at {scores.data_ptr() % 16}; was it planned so?"
            )
        joined = self.form is Form.FUSED
        if self.config.specialized:
            _check_inputs(inputs)
        kernel, own = self._scoring()
        for first, last in ((1, 2),) if joined else ((1, 1), (2, 2)):
            phases = {"FIRST_PHASE": first, "LAST_PHASE": last}
            options = self.config.launch_options(joined=joined)
            launch(kernel, self._grid, arguments_of(kernel, arguments | own | phases), **options)
        return arguments

    def _scoring(self) -> tuple[Any, dict[str, Any]]:
        """The kernel of scores, and what it is told beside tables and buffers."""
        config = self.config
        if config.specialized:
            from prefix_kernels.anchor_selection.sm90_codes_kernels import words_layout
            from prefix_kernels.anchor_selection.sm90_kernels import score_items_sm90_kernel

            least = _block_n(self.shape, _LEAST_ROWS)
            return score_items_sm90_kernel, {
                "BLOCK_M": config.block_m,
                "BLOCK_CHUNKS": 64 if config.block_m <= _FEW_ROWS else 32,
                "NUM_WARPS": config.num_warps,
                "LAYOUT": words_layout(config.block_n, config.num_warps),
                "FEW_LAYOUT": words_layout(config.stretch, config.num_warps),
                "LEAST_BLOCK_N": least,
                "LEAST_LAYOUT": words_layout(least, config.num_warps),
            }
        return score_kernel, {
            **config.arguments(self.shape),
            "POOL": _POOL[self.shape.pooling],
            "TILE": 32 * config.num_warps * TOKENS_OF_A_THREAD,
        }

    def _own_arguments(self) -> dict[str, Any]:
        return {
            "peak_ptr": self._peak,
            "total_ptr": self._total,
            "items_ptr": self._items,
            "at_least_ptr": self._at_least,
            "arrived_ptr": self._arrived,
            "max_rows": self._tables.max_rows,
            "max_items": self._items.shape[0],
            "ITEM_FIELDS": ITEM_FIELDS,
            "BLOCK_N": self.config.block_n,
            "STRETCH": self.config.stretch,
        }

    def _check_rows(self, scored: Sequence[ScoredGroup]) -> None:
        """Sm_90's own kernel numbers rows of codes by 32 bits; which tokens are listed is not known here."""
        end = max((max(of.first_rows) for of in scored), default=0) + self.max_prefix_len
        if end + _STEPS_AHEAD * max(self.config.stretch, _block_n(self.shape, _LEAST_ROWS)) >= _MOST_ROWS:
            raise ValueError(
                f"expected fewer than 2^31 rows of codes for sm_90's own kernel, got {end}; use a configuration that "
                "is not specialized"
            )

    def _check_group(self, of: ScoredGroup, group: SelectionGroup) -> None:
        found = (group.prefix_len, group.lists_end(self.shape.num_kv_heads))
        limits = (self.max_prefix_len, self.list_entries)
        if any(one > most for one, most in zip(found, limits, strict=True)):
            raise ValueError(
                f"expected at most {limits} tokens of a prefix and entries of lists, got {found}; raise the limits"
            )
        if of.count != group.prefix_len:
            raise ValueError(
                f"expected {group.prefix_len} candidates, the tokens of the prefix, got {of.count}; plan the same for "
                "both"
            )
        if any(begin % ALIGNED for begin in of.score_begins):
            raise ValueError(f"expected scores to begin at multiples of {ALIGNED}, got {of.score_begins}; pad the rows")


def _in_rounds(programs: int) -> int:
    """Fewer programs where a last round of reading what all of them counted would be for an eighth of them or less."""
    rest = programs % _CHUNKS_AT_ONCE
    return programs - rest if programs > _CHUNKS_AT_ONCE and 8 * rest <= programs else programs


def _check_fits(shape: ScoreShape, config: AnchorConfig, device: torch.device) -> None:
    """What sm_90's own kernel scores; on a CPU, where it can be compiled only, the device is not asked."""
    if not fits_specialized(shape):
        raise ValueError(
            "expected 4-bit codes on 32, 64, 96 or 128 channels, pooled by the maximum, for sm_90's own kernel, got "
            f"{shape}; use a configuration that is not specialized"
        )
    if config.stretch * shape.channels > _MOST_CODES:
        raise ValueError(
            f"expected steps of at most {_MOST_CODES} codes for sm_90's own kernel, got {config.stretch} candidates of "
            f"{shape.channels} channels; take a lower block_n"
        )
    if device.type == "cuda" and not has_specialized(device):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"expected sm_90 for sm_90's own kernel, got {name}; use a configuration not specialized")


def _check_inputs(inputs: ScoreInputs) -> None:
    """It takes the largest score before it scales, and multiplies in INT8."""
    if not inputs.sm_scale > 0 or inputs.q.dtype is torch.float32:
        raise ValueError(
            f"expected a positive scale and q in fp16 or bf16 for sm_90's own kernel, got {inputs.sm_scale} and "
            f"{inputs.q.dtype}; use a configuration that is not specialized"
        )
