"""An anchor layer's selection, from queries to lists: planned on the host, then run in one launch, or in two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from prefix_kernels.anchor_selection import specialized
from prefix_kernels.anchor_selection.config import AnchorConfig, Form
from prefix_kernels.anchor_selection.items import ITEM_FIELDS, make_items
from prefix_kernels.anchor_selection.kernels import select_kernel
from prefix_kernels.launching import block_of, launch, launch_behind, send
from prefix_kernels.pooled_scores.tables import POOL, ScoredGroup, ScoreInputs, ScoreShape, ScoreTables, Source
from prefix_kernels.top_k_selection.lists import SelectedLists, check_lists, new_lists
from prefix_kernels.top_k_selection.plan import SelectionGroup

_NUM_DIGITS = 256
_TOKENS_OF_A_THREAD = 16
_ALIGNED = 4
_MOST_TOKENS = 2**30
_CHUNKS_AT_ONCE = 32
_PHASES = 4


class AnchorSelection:
    """Scores of candidates, pooled over the rows of their group, and the positions of the best under a token budget.

    Scores are those of `PooledScores`. Positions are those of `TopKSelection` with keys of 16 bits on these scores:
    sink, recent window, then the best; among equal keys the most recent first. Where candidates are listed (`listed`),
    tokens, sink and recent window are those of the list, and its entries are what is written as positions. (KEYS: the
    list holds the slots of all positions.)

    Runs of one object follow each other on one stream. If a launch dies half-way, make a new object: its programs'
    counters are left behind.

    Args:
        shape: of heads and index; all sources but RAW.
        max_batch: requests of a batch, at most.
        max_groups: groups of a batch, at most.
        max_prefix_len: tokens of a prefix, or entries of a list, at most.
        max_budget: tokens that are selected per group and KV head, at most: the width of the lists.
        config: tile and schedule.
        device: where the buffers are made.
        listed: whether candidates are named by a list (always with KEYS).
        max_block_size: tokens of a candidate, at most. At 1, scores must begin at multiples of 4.
        form: one launch, or one for each phase.
        num_programs: of a launch, shared by the KV heads and then by the groups; None: as many as run at a time.

    Raises:
        ValueError: sizes below 1, a prefix of 2^30 tokens or more, scores that are there already, lists of blocks,
            heads or bits as `ScoreTables` says.
    """

    def __init__(
        self,
        shape: ScoreShape,
        max_batch: int,
        max_groups: int,
        max_prefix_len: int,
        max_budget: int,
        config: AnchorConfig,
        device: torch.device,
        *,
        listed: bool = False,
        max_block_size: int = 64,
        form: Form = Form.JOINED,
        num_programs: int | None = None,
    ) -> None:
        sizes = (max_batch, max_groups, max_prefix_len, max_budget)
        if min(sizes) < 1 or max_prefix_len >= _MOST_TOKENS:
            raise ValueError(
                "expected max_batch, max_groups, max_prefix_len and max_budget of at least 1 and max_prefix_len < "
                f"2^30, got {sizes}"
            )
        if shape.source is Source.RAW:
            raise ValueError("expected an index or keys to score, got Source.RAW; use TopKSelection for scores")
        if max_block_size > 1 and (listed or shape.source is Source.KEYS):
            raise ValueError(f"expected candidates of 1 token where they are listed, got {max_block_size}; set it to 1")
        if config.specialized:
            specialized.check_fits(config, shape, device, listed, max_block_size)
        self.shape, self.config, self.form, self.device = shape, config, form, device
        self.max_groups, self.max_prefix_len, self.max_budget = max_groups, max_prefix_len, max_budget
        self.max_block_size = max_block_size
        self._tables = ScoreTables(shape, max_batch, max_groups, device, listed=listed)
        heads = shape.num_kv_heads
        self._listing = specialized.LISTING if config.specialized else config
        at_once = num_programs or programs_at_once(device, self._listing)
        self.programs_of_a_head = _in_rounds(max(1, at_once // heads))
        self._score_programs = max(1, (num_programs or programs_at_once(device, config)) // heads)
        if config.block_m > specialized.FEW_ROWS:
            self._score_programs = _in_rounds(self._score_programs)
        max_items = self.programs_of_a_head + max_groups
        max_score_items = self._score_programs + max_groups if config.specialized else max_items

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._items = integers(max_items, ITEM_FIELDS, dtype=torch.int64)
        self._score_items = integers(max_score_items if config.specialized else 1, ITEM_FIELDS, dtype=torch.int64)
        self._block_shifts = integers(max_groups, heads)
        self._at_least = integers(heads, max_items, _NUM_DIGITS)
        self._higher = integers(heads, max_items)
        self._all_at_least = integers(2, max_groups, heads, _NUM_DIGITS)
        self._arrived = integers(max_groups, heads, dtype=torch.int64)
        self._peak = torch.empty(heads, max_score_items, self._tables.max_rows, dtype=torch.float32, device=device)
        self._total = torch.empty_like(self._peak)
        self._slots_end = self._scores_end = 0
        self.plan((), ())

    def new_lists(self, *, with_slots: bool = False) -> SelectedLists:
        """Buffers for `run()`, holding no selection. One for each layer whose lists must outlive the next run."""
        shape = (self.max_groups, self.shape.num_kv_heads, self.max_budget)
        return new_lists(shape, self._items.device, with_slots=with_slots)

    def plan(self, scored: Sequence[ScoredGroup], selected: Sequence[SelectionGroup]) -> None:
        """Write the tables of the next runs. Copies to the device, without a wait, on the stream of the runs.

        Args:
            scored: the groups, and where their candidates and scores lie.
            selected: their lengths, windows and budgets, in the same order; `prefix_len` is that of the list where
                candidates are listed. `score_start` and `score_stride` say nothing here: `score_begins` do.

        Raises:
            ValueError: as `ScoreTables.plan` says; another number of groups in one than in the other; prefixes,
                budgets or blocks that are larger than there is room for; or candidates that are not the blocks of the
                prefix. The plan before stays in force.
        """
        if len(scored) != len(selected):
            raise ValueError(
                f"expected as many groups scored as selected, got {len(scored)} and {len(selected)}; plan both together"
            )
        shifts = torch.zeros(self._block_shifts.shape, dtype=torch.int32)
        for g, (of, group) in enumerate(zip(scored, selected, strict=True)):
            sizes = group.block_sizes(self.shape.num_kv_heads)
            self._check_group(of, group, sizes)
            if g < self.max_groups:
                shifts[g] = torch.tensor([size.bit_length() - 1 for size in sizes])
        if self.config.specialized:
            specialized.check_rows(self.config, scored)
        self._tables.plan(scored)
        self._send_items(selected, self.programs_of_a_head, self._items)
        if self.config.specialized:
            self._send_items(selected, self._score_programs, self._score_items)
        send(shifts, self._block_shifts)
        ends = [begin + count for of in scored for begin, count in zip(of.score_begins, of.counts, strict=True)]
        # Scores of tokens are read four at a time.
        self._scores_end = max(ends, default=0)
        self._scores_end += -self._scores_end % _ALIGNED if self._tokens else 0
        self._slots_end = 0
        if not self._tables.listed or self.shape.source is Source.KEYS:
            self._slots_end = max((group.slot_start + group.prefix_len for group in selected), default=0)

    def _send_items(self, selected: Sequence[SelectionGroup], programs: int, buffer: Tensor) -> None:
        table = torch.zeros(buffer.shape, dtype=torch.int64)
        table[:, 0] = -1
        items = make_items(selected, self.max_groups, programs)
        table[: len(items)] = torch.tensor(items, dtype=torch.int64)
        send(table, buffer)

    def run(
        self,
        inputs: ScoreInputs,
        scores: Tensor,
        lists: SelectedLists,
        *,
        slot_table: Tensor | None = None,
        pad: bool = True,
    ) -> None:
        """Select as planned, in one launch, two where sm_90's own kernel scores, or in four (`form`).

        Args:
            inputs: queries and what they are scored against; `raw` as in `PooledScores.run`, for few rows.
            scores: fp32 arena, written at the groups' `score_begins`: natural log of the pooled share of attention.
                Not written for a group whose budget holds all of its tokens.
            lists: written; every entry, unless `pad` is off.
            slot_table: int32 or int64 arena in which the groups' position-to-slot tables lie; with `lists.slots`.
            pad: write -1 behind the counts.

        Raises:
            ValueError: a tensor that the source needs is missing, or of another shape or dtype than planned for; slots
                without a table; or one launch in Triton's interpreter.
            RuntimeError: CUDA's, where one launch does not fit the GPU; take fewer `num_programs`, or `Form.SPLIT`.
        """
        if self.form is Form.JOINED and knobs.runtime.interpret:
            raise ValueError("expected Form.SPLIT in Triton's interpreter, where no program waits for a later one")
        arguments = self._tables.arguments(inputs, scores)
        if scores.dim() != 1 or scores.shape[0] < self._scores_end or (self._tokens and scores.data_ptr() % 16):
            raise ValueError(
                f"expected scores [arena] of {self._scores_end} entries or more, at a multiple of 16 bytes, got "
                f"{tuple(scores.shape)} at {scores.data_ptr() % 16}; was it planned so?"
            )
        if inputs.lists is not None and inputs.lists.data_ptr() == lists.positions.data_ptr():
            raise ValueError(
                "expected candidates apart from the lists that are written, got one tensor; use new_lists()"
            )
        shape = (self.max_groups, self.shape.num_kv_heads, self.max_budget)
        check_lists(lists, shape, slot_table, self._slots_end)
        arguments |= self._own_arguments(inputs, lists, slot_table) | {"PAD": pad}
        joined, heads = self.form is Form.JOINED, self.shape.num_kv_heads
        if self.config.specialized:
            specialized.check_inputs(inputs)
            items = {"items_ptr": self._score_items, "max_items": self._score_items.shape[0]}
            specialized.launch_scores(self.config, (self._score_programs, heads), arguments | items, joined=joined)
        first = 3 if self.config.specialized else 1
        for begin, last in ((first, _PHASES),) if joined else ((phase, phase) for phase in range(first, _PHASES + 1)):
            of_phases = {"FIRST_PHASE": begin, "LAST_PHASE": last}
            options = self._listing.launch_options(joined=joined)
            start = launch_behind if joined and self.config.specialized else launch
            start(select_kernel, (self.programs_of_a_head, heads), {**arguments, **of_phases}, **options)

    @property
    def listed(self) -> bool:
        """Whether candidates are named by a list."""
        return self._tables.listed

    @property
    def _tokens(self) -> bool:
        return self.max_block_size == 1

    def _own_arguments(self, inputs: ScoreInputs, lists: SelectedLists, slot_table: Tensor | None) -> dict[str, Any]:
        config = self._listing
        # Raw scores of few rows fill a tile that is not as wide, and higher.
        raw_m = config.block_m if inputs.raw is None else min(config.block_m, block_of(inputs.raw.shape[2]))
        return {
            **config.scoring(self.programs_of_a_head).arguments(self.shape),
            "peak_ptr": self._peak,
            "total_ptr": self._total,
            "items_ptr": self._items,
            "block_shifts_ptr": self._block_shifts,
            "at_least_ptr": self._at_least,
            "higher_ptr": self._higher,
            "all_at_least_ptr": self._all_at_least,
            "num_totals": self._arrived.numel(),
            "arrived_ptr": self._arrived,
            "slot_table_ptr": self._block_shifts if slot_table is None else slot_table,
            "positions_ptr": lists.positions,
            "slots_ptr": lists.positions if lists.slots is None else lists.slots,
            "counts_ptr": lists.counts,
            "max_rows": self._tables.max_rows,
            "max_items": self._items.shape[0],
            "max_budget": self.max_budget,
            "ITEM_FIELDS": ITEM_FIELDS,
            "SOURCE": int(self.shape.source),
            "POOL": POOL[self.shape.pooling],
            "REREAD": inputs.raw is not None,
            "RAW_M": raw_m,
            "RAW_N": config.block_n * config.block_m // raw_m,
            "TILE": 32 * config.num_warps * _TOKENS_OF_A_THREAD,
            "TOKENS": self._tokens,
            "HAS_SLOTS": lists.slots is not None,
        }

    def _check_group(self, of: ScoredGroup, group: SelectionGroup, sizes: list[int]) -> None:
        if group.prefix_len > self.max_prefix_len or group.count > self.max_budget or max(sizes) > self.max_block_size:
            raise ValueError(
                f"expected at most {self.max_prefix_len} tokens of a prefix, {self.max_budget} selected and blocks of "
                f"{self.max_block_size}, got {group.prefix_len}, {group.count} and {max(sizes)}; raise the limits"
            )
        if group.num_candidates is not None:
            raise ValueError(
                f"expected no num_candidates, got {group.num_candidates}; give the list's length as prefix_len"
            )
        wanted = tuple(-(-group.prefix_len // size) for size in sizes)
        if tuple(of.counts) != wanted:
            raise ValueError(
                f"expected {wanted} candidates, the blocks of {group.prefix_len} tokens, got {tuple(of.counts)}; plan "
                "the same candidates for both"
            )
        if self._tokens and any(begin % _ALIGNED for begin in of.score_begins):
            raise ValueError(
                f"expected scores of tokens to begin at multiples of {_ALIGNED}, got {of.score_begins}; pad the rows"
            )


def programs_at_once(device: torch.device, config: AnchorConfig) -> int:
    """Programs that run at the same time on a device; 1 where it is no GPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count * config.programs_per_sm


def _in_rounds(programs: int) -> int:
    """Fewer programs where a last round of reading what all of them counted would be for an eighth of them or less."""
    rest = programs % _CHUNKS_AT_ONCE
    return programs - rest if programs > _CHUNKS_AT_ONCE and 8 * rest <= programs else programs
