"""Top-k selection of a batch of groups: planned on the host, then run without a wait or an allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_kernels.launching import launch, programs_at_once, send
from prefix_kernels.top_k_selection.kernels import count_digits_kernel, list_selected_kernel
from prefix_kernels.top_k_selection.plan import NUM_FIELDS, SelectionGroup, cut_groups
from prefix_kernels.types import SelectedLists, check_lists, new_lists

_NUM_DIGITS = 256
_DIGIT_BITS = 8
_MOST_TOKENS = 2**30
_CHUNKS_AT_ONCE = 32
_ALIGNED = 4


@dataclass(frozen=True)
class TopKConfig:
    """How a chunk is read. All of it is a matter of speed, none of it of the result.

    Attributes:
        tile: tokens that a program holds at a time; a power of 2 from 32 * num_warps to 16384.
        num_warps: of a program.
        programs_per_sm: programs that fill one multiprocessor.

    Raises:
        ValueError: another tile.
    """

    tile: int
    num_warps: int
    programs_per_sm: int = 2

    def __post_init__(self) -> None:
        if not 32 * self.num_warps <= self.tile <= 16384 or self.tile & (self.tile - 1):
            raise ValueError(
                f"expected tile as a power of 2 from {32 * self.num_warps} (32 a warp) to 16384, got {self.tile}"
            )

    @property
    def max_registers(self) -> int:
        """Registers of a thread that let `programs_per_sm` programs share the 65536 of a multiprocessor."""
        return min(255, 65536 // (32 * self.num_warps * self.programs_per_sm))


def default_config(max_prefix_len: int, target: int) -> TopKConfig:
    """What runs where nothing was tuned: one tile a chunk where one group fills the device, 16 tokens a thread.

    Args:
        max_prefix_len: tokens.
        target: programs of a KV head that fill the device.
    """
    chunk = -(-max_prefix_len // min(max(target, 1), 2 * _CHUNKS_AT_ONCE))
    tile = min(max(1 << (chunk - 1).bit_length(), 512), 4096)
    return TopKConfig(tile, 8 if tile >= 4096 else 4)


class TopKSelection:
    """Exactly min(budget, prefix_len) positions per group and KV head: sink, recent window, then the best blocks.

    Tokens rank by their block's score; among equal scores the most recent comes first, and -inf and NaN rank last. The
    device buffers are made once: `run()` can be captured in a CUDA graph and replayed after another `plan()`.

    Args:
        max_groups: groups of a batch, at most.
        num_kv_heads: KV heads.
        max_prefix_len: tokens of a prefix, or candidates where they are listed, at most.
        list_entries: of the lists of all groups and KV heads together, at most.
        device: where everything lies.
        key_bits: how scores are told apart. 32: as they are. 24: in relative steps of 2^-15, one launch less. 16:
            natural logarithms of probabilities, in steps of 6.7e-4 from -44 to 0 (what lies outside ties at the ends),
            two launches less.
        config: None: `default_config`.
        num_programs: programs that fill the device; None asks it.
        max_block_size: tokens per score, at most. At 1, loads are wide, and scores must begin at multiples of 4.

    Raises:
        ValueError: sizes below 1, a prefix of 2^30 tokens or more, or other key bits.
    """

    def __init__(
        self,
        max_groups: int,
        num_kv_heads: int,
        max_prefix_len: int,
        list_entries: int,
        device: torch.device,
        *,
        key_bits: int = 32,
        config: TopKConfig | None = None,
        num_programs: int | None = None,
        max_block_size: int = 64,
    ) -> None:
        sizes = (max_groups, num_kv_heads, max_prefix_len, list_entries)
        if min(sizes) < 1 or max_prefix_len >= _MOST_TOKENS:
            raise ValueError(
                "expected max_groups, num_kv_heads, max_prefix_len and list_entries of at least 1 and max_prefix_len < "
                f"2^30, got {sizes}"
            )
        if key_bits not in (16, 24, 32):
            raise ValueError(f"expected key_bits 16, 24 or 32, got {key_bits}; 32 ranks any scores exactly")
        self.max_groups, self.num_kv_heads, self.max_prefix_len, self.list_entries = sizes
        self.key_bits, self.max_block_size = key_bits, max_block_size
        per_sm = 2 if config is None else config.programs_per_sm
        self._target = max(1, (num_programs or programs_at_once(device, per_sm)) // num_kv_heads)
        self.config = config or default_config(max_prefix_len, self._target)
        self._max_items = self._target + max_groups
        num_passes = key_bits // _DIGIT_BITS

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._items = integers(self._max_items, NUM_FIELDS, dtype=torch.int64)
        self._block_shifts = integers(max_groups, num_kv_heads)
        self._at_least = integers(num_passes, num_kv_heads, self._max_items, _NUM_DIGITS)
        self._fixed = integers(num_passes, max_groups, num_kv_heads, 2)
        self._above = integers(num_passes, num_kv_heads, self._max_items)
        self._scores_end = self._slots_end = self._lists_end = 0
        self.plan(())

    def new_lists(self, *, with_slots: bool = False) -> SelectedLists:
        """Buffers for `run()`, holding no selection. One for each layer whose lists must outlive the next run."""
        counts = (self.max_groups, self.num_kv_heads)
        return new_lists(self.list_entries, counts, self._items.device, with_slots=with_slots)

    def plan(self, groups: Sequence[SelectionGroup]) -> None:
        """Write the tables of the next runs. Copies to the device, without a wait.

        Args:
            groups: row g of the counts is that of the group at place g; rows behind the last are left as they are.

        Raises:
            ValueError: more groups, longer prefixes or longer lists than there is room for, lists of KV heads that
                overlap, or another number of block sizes than KV heads.
        """
        if len(groups) > self.max_groups:
            raise ValueError(f"expected at most {self.max_groups} groups, got {len(groups)}; raise max_groups")
        if len({group.num_candidates is None for group in groups}) > 1:
            raise ValueError(
                f"expected num_candidates of all groups or of none, got {[group.num_candidates for group in groups]}; "
                "list all positions of the others, or select from them apart"
            )
        for group in groups:
            if group.num_scored > self.max_prefix_len or group.lists_end(self.num_kv_heads) > self.list_entries:
                raise ValueError(
                    f"expected at most {self.max_prefix_len} tokens of a prefix and {self.list_entries} entries of "
                    f"lists, got {group.num_scored} and {group.lists_end(self.num_kv_heads)}; raise max_prefix_len or "
                    "list_entries"
                )
            if max(group.block_sizes(self.num_kv_heads)) > self.max_block_size:
                raise ValueError(
                    f"expected blocks of at most {self.max_block_size} tokens, got {group.block_size}; "
                    "raise max_block_size"
                )
            if self.max_block_size == 1 and (group.score_start % _ALIGNED or group.score_stride % _ALIGNED):
                raise ValueError(
                    f"expected score_start and score_stride as multiples of {_ALIGNED}, got {group.score_start} and "
                    f"{group.score_stride}; round the stride up, or raise max_block_size"
                )
        shifts = torch.zeros(self._block_shifts.shape, dtype=torch.int32)
        for g, group in enumerate(groups):
            shifts[g] = torch.tensor([size.bit_length() - 1 for size in group.block_sizes(self.num_kv_heads)])
        table = torch.zeros(self._items.shape, dtype=torch.int64)
        table[:, 0] = -1
        items = cut_groups(groups, self._target, self.config.tile)
        if items:
            table[: len(items)] = torch.tensor(items, dtype=torch.int64)
        send(table, self._items)
        send(shifts, self._block_shifts)
        self._scores_end = max((group.scores_end(self.num_kv_heads) for group in groups), default=0)
        if self.max_block_size == 1:
            self._scores_end += -self._scores_end % _ALIGNED
        self._slots_end = max((group.slot_start + group.prefix_len for group in groups), default=0)
        self._lists_end = max((group.lists_end(self.num_kv_heads) for group in groups), default=0)
        # An empty plan fits either kind of run, for instance the one that is captured.
        self._listed = groups[0].num_candidates is not None if groups else None
        self._most_candidates = max((group.num_candidates or 0 for group in groups), default=0)

    def run(
        self,
        scores: Tensor,
        lists: SelectedLists,
        *,
        slot_table: Tensor | None = None,
        candidates: Tensor | None = None,
    ) -> None:
        """Select as planned: one launch for every 8 bits of a key, one that writes the lists.

        Args:
            scores: fp32 arena in which the groups' scores lie, higher is better. -inf and NaN rank last. Not written.
            lists: written, up to the counts.
            slot_table: int32 or int64 arena in which the groups' position-to-slot tables lie; with `lists.slots`.
            candidates: int32 [max_groups, num_kv_heads, most candidates of a group, or more], adjacent entries: of each
                KV head the ascending positions that its scores are of, where the plan has `num_candidates`. Not
                written; not `lists.positions`.

        Raises:
            ValueError: tensors of another shape or dtype than planned for, slots without a table, or candidates that
                were not planned.
        """
        self._check_run(scores, lists, slot_table)
        self._check_candidates(candidates, lists)
        config = self.config
        grid = (self.num_kv_heads, self._max_items)
        num_passes = self.key_bits // _DIGIT_BITS
        common = {
            "scores_ptr": scores,
            "items_ptr": self._items,
            "block_shifts_ptr": self._block_shifts,
            "NUM_FIELDS": NUM_FIELDS,
            "KEY_BITS": self.key_bits,
            "TILE": config.tile,
            "TOKENS": self.max_block_size == 1,
            "BLOCK_C": _CHUNKS_AT_ONCE,
        }
        for number in range(num_passes):
            arguments = {
                **common,
                "before_ptr": self._at_least[max(number - 1, 0)],
                "at_least_ptr": self._at_least[number],
                "fixed_before_ptr": self._fixed[max(number - 1, 0)],
                "fixed_ptr": self._fixed[number],
                "above_before_ptr": self._above[max(number - 1, 0)],
                "above_ptr": self._above[number],
                "PASS": number,
            }
            launch(count_digits_kernel, grid, arguments, num_warps=config.num_warps)
        arguments = {
            **common,
            "at_least_ptr": self._at_least[num_passes - 1],
            "fixed_ptr": self._fixed[num_passes - 1],
            "above_ptr": self._above[num_passes - 1],
            "candidates_ptr": self._block_shifts if candidates is None else candidates,
            "candidates_stride_group": 0 if candidates is None else candidates.stride(0),
            "candidates_stride_head": 0 if candidates is None else candidates.stride(1),
            "LISTED": candidates is not None,
            "slot_table_ptr": self._block_shifts if slot_table is None else slot_table,
            "positions_ptr": lists.positions,
            "slots_ptr": lists.positions if lists.slots is None else lists.slots,
            "counts_ptr": lists.counts,
            "HAS_SLOTS": lists.slots is not None,
        }
        # Left alone, the compiler takes so many registers that only half of the programs run at a time.
        launch(list_selected_kernel, grid, arguments, num_warps=config.num_warps, maxnreg=config.max_registers)

    def _check_run(self, scores: Tensor, lists: SelectedLists, slot_table: Tensor | None) -> None:
        if scores.dim() != 1 or scores.dtype is not torch.float32 or not scores.is_contiguous():
            raise ValueError(f"expected scores [arena] fp32 contiguous, got {tuple(scores.shape)} {scores.dtype}")
        if scores.shape[0] < self._scores_end:
            raise ValueError(
                f"expected an arena of {self._scores_end} scores, got {scores.shape[0]}; was it planned so?"
            )
        check_lists(lists, (self.max_groups, self.num_kv_heads), self._lists_end, slot_table, self._slots_end)

    def _check_candidates(self, candidates: Tensor | None, lists: SelectedLists) -> None:
        if self._listed is not None and self._listed != (candidates is not None):
            raise ValueError(
                "expected candidates and groups with num_candidates both or none of them, got one; plan for what is "
                "handed in"
            )
        if candidates is None:
            return
        wanted = (self.max_groups, self.num_kv_heads, self._most_candidates)
        good = candidates.dim() == 3 and candidates.dtype is torch.int32 and tuple(candidates.shape[:2]) == wanted[:2]
        if not good or candidates.shape[2] < wanted[2] or candidates.stride(2) != 1:
            raise ValueError(
                f"expected candidates {wanted} or longer, int32 with adjacent entries, got {tuple(candidates.shape)} "
                f"{candidates.dtype} of strides {candidates.stride()}"
            )
        if candidates.data_ptr() == lists.positions.data_ptr():
            raise ValueError(
                "expected candidates apart from the lists that are written, got one tensor; use new_lists()"
            )
