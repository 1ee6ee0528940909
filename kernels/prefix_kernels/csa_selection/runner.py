"""A selection on CSAttention's lists, from queries to positions: planned on the host, run in three or four launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from prefix_kernels.anchor_selection.programs import (
    CHUNKS_AT_ONCE,
    LIST_WARPS,
    POOL,
    TOKENS_OF_A_THREAD,
    Form,
    Programs,
    ScoredTokens,
    check_groups,
    check_queries,
    check_rows,
    check_sizes,
)
from prefix_kernels.csa_scores import BLOCK_POSITIONS
from prefix_kernels.csa_selection.kernels import STEP_POSITIONS, pick_kernel, score_kernel
from prefix_kernels.launching import (
    block_of,
    check_power_of_2,
    launch,
    programs_at_once,
    send,
    shared_registers,
)
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import ALIGNED, CandidateForm, SelectedLists, SelectionGroup, check_scores, check_table

_GROUP_FIELDS = 5
"""int64 fields of a group: first of the members, requests, prefix_len, chunks, entries of a list."""
_SLOTS = 2048
"""Entries of all lists of a row that are added at a time."""
_CHANNELS_AT_ONCE = 4096
"""Channels of centroids that a query is multiplied with at a time."""
_MOST_ENTRIES = 2**31
"""Of a KV head, that it can number."""


@dataclass(frozen=True)
class CsaShape:
    """What all groups and layers share.

    Attributes:
        num_qo_heads, num_kv_heads: heads.
        head_dim: channels of a query.
        num_subspaces: m, of neighbouring channels, as many each.
        num_centroids: C of a subspace.
        bits: of a list's scores, 4 or 8.
        pooling: over the rows and query heads of a group.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    num_subspaces: int
    num_centroids: int
    bits: int = 4
    pooling: Pooling = Pooling.MAX

    @property
    def gqa(self) -> int:
        """Query heads of a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def lead(self) -> tuple[int, int, int]:
        """Leading dims of the lists: [num_kv_heads, num_subspaces, num_centroids]."""
        return self.num_kv_heads, self.num_subspaces, self.num_centroids


class CsaArrays(NamedTuple):
    """The tables of a prefix in a layer, contiguous; leading dims [num_kv_heads, num_subspaces, num_centroids].

    Attributes:
        centroids: [..., head_dim / num_subspaces] fp16, unit vectors.
        places, counts, codes, scale, zero: as `csa_scores.CompactLists`.
    """

    centroids: Tensor
    places: Tensor
    counts: Tensor
    codes: Tensor
    scale: Tensor
    zero: Tensor


@dataclass(frozen=True)
class CsaGroup:
    """A group and what it is scored by.

    Attributes:
        rows, score_begins: as of `ScoredGroup`.
        arrays: of the prefix, in one of the layers. Kept alive by the caller while runs may read them.
    """

    rows: tuple[int, ...]
    score_begins: tuple[int, ...]
    arrays: CsaArrays


@dataclass(frozen=True)
class CsaConfig:
    """A matter of speed; scores have the same bits, up to the order of a row's sum of exponentials.

    Attributes:
        entries: of each list that are added at a time, a power of 2 of at least 32.
        num_warps: of a program.
        programs_per_sm: programs that a multiprocessor holds at a time. Registers are bounded so that it does.

    Raises:
        ValueError: no power of 2, or a program that has fewer than 64 registers a thread.
    """

    entries: int
    num_warps: int = 8
    programs_per_sm: int = 2

    def __post_init__(self) -> None:
        check_power_of_2("entries", self.entries, 32)
        check_power_of_2("num_warps", self.num_warps, 1)
        shared_registers(self.num_warps, self.programs_per_sm)

    @property
    def max_registers(self) -> int:
        """Registers of a thread that let `programs_per_sm` programs share those of a multiprocessor."""
        return shared_registers(self.num_warps, self.programs_per_sm)


def default_config(shape: CsaShape) -> CsaConfig:
    """Launch parameters: a thread adds eight entries at a time, of 32 to a list, or more."""
    return CsaConfig(max(_SLOTS // block_of(shape.num_subspaces), 32))


class CsaSelection:
    """Exactly min(budget, prefix_len) positions per group and KV head: sink, recent window, then the best tokens.

    Scores are those of `csa_scores.csa_scores_compact`, pooled by `pooling.pool_scores`. A list's step and zero are
    rounded by at most 2^-26 of the largest score that a row's lists can give, with 16 subspaces; with twice as many by
    twice as much. A step counts as often as a code says: scores of 32 lists of 8 bits are within 2^-12. Tokens rank by
    keys, as in `AnchorSelection`. Source: CSAttention, 3.3.

    Runs of one object follow each other on one stream, and none follows one that died half-way.

    Args:
        shape: of heads and tables.
        config: schedule.
        groups_of_a_row: that a request may stand in.
        max_batch, max_groups, max_prefix_len, list_entries, device, form, num_programs: as of `AnchorSelection`.

    Raises:
        ValueError: sizes below 1, or 2^30 tokens of all KV heads or more.
    """

    def __init__(
        self,
        shape: CsaShape,
        max_batch: int,
        max_groups: int,
        max_prefix_len: int,
        list_entries: int,
        config: CsaConfig,
        device: torch.device,
        *,
        groups_of_a_row: int = 1,
        form: Form = Form.FUSED,
        num_programs: int | None = None,
    ) -> None:
        heads = shape.num_kv_heads
        check_sizes(
            max_prefix_len, heads, max_batch=max_batch, max_groups=max_groups, list_entries=list_entries,
            groups_of_a_row=groups_of_a_row,
        )  # fmt: skip
        # Of fewer entries than a program has threads some would add copies, see `kernels.add_counts`.
        if block_of(shape.num_subspaces) * config.entries < 32 * config.num_warps:
            raise ValueError(
                f"expected entries of {shape.num_subspaces} lists for each of {32 * config.num_warps} threads, got "
                f"{config.entries} of each list; raise entries"
            )
        self.shape, self.config, self.form = shape, config, form
        self.max_batch, self.max_groups, self.groups_of_a_row = max_batch, max_groups, groups_of_a_row
        self.max_prefix_len, self.list_entries = max_prefix_len, list_entries
        max_members = max_batch * groups_of_a_row
        max_rows = max_members * shape.gqa
        of_a_head = max(1, (num_programs or programs_at_once(device, config.programs_per_sm)) // heads)
        self.programs = Programs(heads, of_a_head, max_groups, STEP_POSITIONS, device, max_rows=max_rows)

        integers = partial(torch.zeros, dtype=torch.int32, device=device)
        picks = (max_rows, heads)
        self._members = integers(max_members, 2)
        self._groups = integers(max_groups, _GROUP_FIELDS, dtype=torch.int64)
        self._heads = integers(max_groups, heads, 4, dtype=torch.int64)
        self._arrays = integers(max_groups, len(CsaArrays._fields), dtype=torch.int64)
        self._lists = integers(*picks, shape.num_subspaces)
        self._factors = integers(*picks, shape.num_subspaces, 2)
        self._units = torch.zeros(picks, dtype=torch.float32, device=device)
        self._max_chunks = min(of_a_head, -(-max_prefix_len // STEP_POSITIONS))
        self._begins = integers(*picks, self._max_chunks, shape.num_subspaces)
        self._scratch = integers(of_a_head * heads if knobs.runtime.interpret else 1, STEP_POSITIONS)
        self._num_members = self._most_rows = self._scores_end = 0
        self.plan((), ())

    def plan(self, scored: Sequence[CsaGroup], selected: Sequence[SelectionGroup]) -> None:
        """Write the tables of the next runs. Copies to the device, without a wait, on the stream of the runs.

        Args:
            scored: the groups' rows, tables, and places of scores.
            selected: their lengths, windows and budgets, in the same order.

        Raises:
            ValueError: another number of groups in one than in the other, or more of them, of rows, tokens or entries
                than there is room for; a group without rows, or a row out of range; scores that begin elsewhere; or
                tables that the kernels cannot read. The plan before stays in force.
        """
        check_groups(scored, selected, self.shape.num_kv_heads, (self.max_prefix_len, self.list_entries))
        rows = check_rows(scored, self.max_groups, len(self._members), self.max_batch, self.max_batch)
        groups = list(zip(scored, selected, strict=True))
        addresses = [array_addresses(self.shape, of.arrays, group.prefix_len) for of, group in groups]
        self.programs.plan(selected)
        stretches = self.programs.stretches
        members = torch.full(self._members.shape, -1, dtype=torch.int32)
        tables = torch.zeros(self._groups.shape, dtype=torch.int64)
        begins = torch.zeros(self._heads.shape, dtype=torch.int64)
        arrays = torch.zeros(self._arrays.shape, dtype=torch.int64)
        first = 0
        for number, (of, group) in enumerate(groups):
            arrays[number] = torch.tensor(addresses[number])
            entries = of.arrays.places.shape[-1]
            tables[number] = torch.tensor([first, len(of.rows), group.prefix_len, stretches[number][1], entries])
            begins[number, :, 0], begins[number, :, 3] = group.prefix_len, torch.tensor(of.score_begins)
            last = first + len(of.rows)
            # Who attends all of a prefix looks nothing up.
            members[first:last, 0] = number if group.count < group.prefix_len else -1
            members[first:last, 1] = torch.tensor(of.rows, dtype=torch.int32)
            first = last
        buffers = (self._members, self._groups, self._heads, self._arrays)
        for table, buffer in zip((members, tables, begins, arrays), buffers, strict=True):
            send(table, buffer)
        self._num_members = first
        self._most_rows = max(rows, default=-1) + 1
        ends = (max(of.score_begins) + group.prefix_len for of, group in groups)
        self._scores_end = -(-max(ends, default=0) // ALIGNED) * ALIGNED

    def run(
        self,
        q: Tensor,
        sm_scale: float,
        scores: Tensor,
        lists: SelectedLists,
        *,
        arrays: Tensor | None = None,
        slot_table: Tensor | None = None,
    ) -> None:
        """Select as planned, in three launches, or in four (`form`).

        Args:
            q: [batch, num_qo_heads, head_dim] post-RoPE queries, fp32, fp16 or bf16.
            sm_scale: multiplies q.k before the softmax.
            arrays: int64 [max_groups, 6], another layer's `array_addresses`; None for those of the plan.
            scores, lists, slot_table: as of `AnchorSelection.run`, as are the errors. Scores are -inf where no row's
                lists hold the position.
        """
        self.programs.make_lists(self.score(q, sm_scale, scores, arrays=arrays), lists, slot_table)

    def score(self, q: Tensor, sm_scale: float, scores: Tensor, *, arrays: Tensor | None = None) -> ScoredTokens:
        """The launches of `run` up to scores, whose counts and tables are returned: of fixed place."""
        check_scores(scores, self._scores_end)
        rows = max(self._most_rows, -(-self._num_members // self.groups_of_a_row))
        check_queries(q, (rows, self.max_batch), self.shape.num_qo_heads, self.shape.head_dim)
        if arrays is not None:
            check_table("arrays", arrays, tuple(self._arrays.shape), torch.int64)
        arguments, shape, config = self._arguments(q, float(sm_scale), scores, arrays), self.shape, self.config
        picks = (q.shape[0] * self.groups_of_a_row * shape.gqa, shape.num_kv_heads)
        launch(pick_kernel, picks, arguments, num_warps=LIST_WARPS)
        options = {"num_warps": config.num_warps, "maxnreg": config.max_registers}
        self.programs.score(score_kernel, self.form, arguments, **options)
        return ScoredTokens(scores, self._heads, self.programs.at_least, CandidateForm.TOKEN)

    def _arguments(self, q: Tensor, sm_scale: float, scores: Tensor, arrays: Tensor | None) -> dict[str, Any]:
        """What kernels are told, by parameter name; of programs apart."""
        shape, config = self.shape, self.config
        dim, subspaces = shape.head_dim // shape.num_subspaces, block_of(shape.num_subspaces)
        return {
            "q_ptr": q,
            "members_ptr": self._members,
            "groups_ptr": self._groups,
            "heads_ptr": self._heads,
            "arrays_ptr": self._arrays if arrays is None else arrays,
            "lists_ptr": self._lists,
            "factors_ptr": self._factors,
            "units_ptr": self._units,
            "begins_ptr": self._begins,
            "scratch_ptr": self._scratch,
            "scores_ptr": scores,
            "sm_scale": sm_scale,
            "q_stride_row": q.stride(0),
            "q_stride_head": q.stride(1),
            "max_chunks": self._max_chunks,
            "GROUP_FIELDS": _GROUP_FIELDS,
            "GQA": shape.gqa,
            "SUBSPACES": shape.num_subspaces,
            "BLOCK_B": subspaces,
            "DIM": dim,
            "BLOCK_D": block_of(dim),
            "CENTROIDS": shape.num_centroids,
            "BLOCK_C": min(block_of(shape.num_centroids), max(1, _CHANNELS_AT_ONCE // (subspaces * block_of(dim)))),
            "BLOCK_COUNTS": max(16, _SLOTS // subspaces),
            "BITS": shape.bits,
            # Of so many lists a position may be in each.
            "FLAG": shape.num_subspaces.bit_length(),
            "ENTRIES": config.entries,
            "POOL": POOL[shape.pooling],
            "BLOCK_CHUNKS": CHUNKS_AT_ONCE,
            "KEYS_TILE": 32 * config.num_warps * TOKENS_OF_A_THREAD,
        }


def array_addresses(shape: CsaShape, arrays: CsaArrays, prefix_len: int) -> list[int]:
    """A group's row of the table of addresses that the kernels read: 6 of them.

    Raises:
        ValueError: another dtype or shape than those of such a prefix, strided arrays, or too many entries.
    """
    lead, entries = shape.lead, arrays.places.shape[-1]
    if math.prod(lead[1:]) * entries >= _MOST_ENTRIES:
        raise ValueError(f"expected fewer than 2^31 entries of a KV head's lists, got {lead[1:]} of {entries}")
    dtypes = (torch.float16, torch.uint8, torch.int16, torch.uint8, torch.float16, torch.float16)
    ends: tuple[tuple[int, ...], ...] = (
        (shape.head_dim // shape.num_subspaces,),
        (entries,),
        (-(-prefix_len // BLOCK_POSITIONS),),
        (-(-entries * shape.bits // 8),),
        (),
        (),
    )
    for name, array, dtype, end in zip(CsaArrays._fields, arrays, dtypes, ends, strict=True):
        check_table(name, array, (*lead, *end), dtype, "; is the index of another prefix or spec?")
    return [array.data_ptr() for array in arrays]
