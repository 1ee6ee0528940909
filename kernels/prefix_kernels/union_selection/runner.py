"""A selection from two methods' scores: a token comes at the smaller one of its depths in their lists. In Triton.

The depth of a token in a method's list is how many tokens have its key or a higher one (`top_k_selection.log_ranks`).
The counts that the method's scores left behind say that for every key; keys of depths then rank as scores do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prefix_kernels.anchor_selection.programs import LIST_WARPS, TOKENS_OF_A_THREAD, Programs, ScoredTokens
from prefix_kernels.kernels import NUM_BINS
from prefix_kernels.launching import launch, programs_at_once, send
from prefix_kernels.types import ALIGNED, CandidateForm, SelectedLists, SelectionGroup, place_scores
from prefix_kernels.union_selection.kernels import depth_kernel, merge_kernel

_STRETCH = 128
"""Tokens that a program's stretch is a multiple of."""
_PARTS = 8
"""Programs that look up the depths of a group, KV head and method."""
_PROGRAMS = 2
"""Of a multiprocessor."""


class UnionSelection:
    """Exactly min(budget, prefix_len) positions per group and KV head: sink, recent window, then by depth.

    Runs of one object follow each other on one stream.

    Args:
        num_kv_heads: KV heads.
        max_groups: groups of a batch, at most.
        room: tokens of all prefixes of a batch, at most.
        device: where the buffers are made.
    """

    def __init__(self, num_kv_heads: int, max_groups: int, room: int, device: torch.device) -> None:
        self._heads, self._max_groups = num_kv_heads, max_groups
        on_gpu = device.type == "cuda"
        programs = programs_at_once(device, _PROGRAMS) if on_gpu else 2 * num_kv_heads
        self._programs = Programs(num_kv_heads, max(1, programs // num_kv_heads), max_groups, _STRETCH, device)

        integers = partial(torch.zeros, dtype=torch.int64, device=device)
        self._stretches = integers(max_groups, 4)
        self._windows = integers(max_groups, dtype=torch.int32)
        self._tables = integers(max_groups, num_kv_heads, 4)
        depths = (2, max_groups, num_kv_heads, NUM_BINS.value)
        self._depths = torch.zeros(depths, dtype=torch.float32, device=device)
        self._scores = torch.zeros(num_kv_heads * (room + ALIGNED * max_groups), device=device)

    def plan(
        self,
        groups: Sequence[SelectionGroup],
        first: dict[int, tuple[int, int]],
        second: dict[int, tuple[int, int]],
    ) -> None:
        """Write the tables of the next runs, without a wait.

        Args:
            groups: as the methods' own selections were planned with.
            first, second: `stretches` of these selections.
        """
        stretches = torch.zeros(self._stretches.shape, dtype=torch.int64)
        windows = torch.full(self._windows.shape, -1, dtype=torch.int32)
        tables = torch.zeros(self._tables.shape, dtype=torch.int64)
        begins = place_scores([group.prefix_len for group in groups], self._heads)
        for number, group in enumerate(groups):
            stretches[number] = torch.tensor([*first[number], *second[number]])
            windows[number] = group.num_sink + group.num_recent if group.count < group.prefix_len else -1
            tables[number, :, 0] = group.prefix_len
            tables[number, :, 3] = torch.tensor(begins[number])
        end = begins[-1][-1] + groups[-1].prefix_len if groups else 0
        if end > len(self._scores):
            raise ValueError(f"expected groups of at most {len(self._scores)} scores, got {end}; leave some out")
        self._programs.plan(groups)
        for table, buffer in ((stretches, self._stretches), (windows, self._windows), (tables, self._tables)):
            send(table, buffer)

    def run(
        self,
        first: ScoredTokens,
        second: ScoredTokens,
        lists: SelectedLists,
        *,
        slot_table: Tensor | None = None,
        num_groups: int | None = None,
    ) -> None:
        """Select as planned, in three launches.

        Args:
            first, second: what the methods' scores left behind, planned with the same groups.
            lists: written, up to the counts.
            slot_table: as of `AnchorSelection.run`.
            num_groups: that a plan of this batch size may have; None: as many as ever.
        """
        arguments: dict[str, Any] = self._programs.arguments | {
            "stretches_ptr": self._stretches,
            "windows_ptr": self._windows,
            "first_ptr": first.at_least,
            "second_ptr": second.at_least,
            "depths_ptr": self._depths,
            "max_groups": self._max_groups,
            "BINS": NUM_BINS.value // _PARTS,
            "heads_ptr": self._tables,
            "first_heads_ptr": first.heads,
            "second_heads_ptr": second.heads,
            "first_scores_ptr": first.scores,
            "second_scores_ptr": second.scores,
            "scores_ptr": self._scores,
            "FIRST_BLOCKS": first.form.is_block,
            "SECOND_BLOCKS": second.form.is_block,
            "TILE": 32 * LIST_WARPS * TOKENS_OF_A_THREAD,
        }
        depths = (_PARTS * min(num_groups or self._max_groups, self._max_groups), self._heads, 2)
        for kernel, grid in ((depth_kernel, depths), (merge_kernel, self._programs.grid)):
            launch(kernel, grid, arguments, num_warps=LIST_WARPS)
        found = ScoredTokens(self._scores, self._tables, self._programs.at_least, CandidateForm.TOKEN)
        self._programs.make_lists(found, lists, slot_table)

    @property
    def nbytes(self) -> int:
        """Device memory of scores and depths."""
        return self._scores.nbytes + self._depths.nbytes
