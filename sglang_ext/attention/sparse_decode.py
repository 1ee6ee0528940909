"""Sparse decode inside CUDA graphs: anchor layers select by the token index, all launches read buffers of fixed place.

The operations are those of `decode.GroupedDecode`, which is their reference. Where that makes tensors in each step and
layer, here the host writes tables when a group or its members change, and the kernels find in them whose queries,
which index, which slots. Positions become slots by the group's own table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorSelection, Form
from prefix_kernels.budget import BudgetGrowth, budget_for_group
from prefix_kernels.grouped_attention import Segment
from prefix_kernels.launching import block_of
from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection.plan import SelectionGroup
from prefix_kernels.types import PagedKV
from sglang_ext.attention.anchor_lists import AnchorLists
from sglang_ext.attention.attentions import Attends, Attentions, LayerShape
from sglang_ext.attention.graph_refusal import graph_refusal
from sglang_ext.attention.list_sets import KEPT_BYTES, groups_that_fit, num_sets
from sglang_ext.attention.private_index import PrivateIndex
from sglang_ext.attention.search_turns import SearchTurns
from sglang_ext.attention.slot_tracker import DecodeBatch, SlotTracker
from sglang_ext.attention.step_buffers import PrefixRows, StepBuffers, StepLayout
from sglang_ext.attention.step_costs import Line, StepCosts, measure_us
from sglang_ext.attention.step_groups import StepGroups
from sglang_ext.attention.token_selection import TokenSelections
from sglang_ext.attention.trace import SelectionCopies
from sglang_ext.config import PAGE_TOKENS, SparseAttnConfig
from sglang_ext.indexing.base import IndexSpec
from sglang_ext.indexing.layer_plan import LayerMode, LayerPlan
from sglang_ext.indexing.token_index import TokenIndexSpec
from sglang_ext.prefix.residency import ResidentIndex
from sglang_ext.ranks import OneRank, Ranks

logger = logging.getLogger(__name__)

MAX_GROUPS = 16
"""Prefixes of a batch with an index, at most: the lists of all of them have room for the largest budget."""
_FAR, _NEAR = 65536, 4
"""Tokens that costs are measured with, and by how much the shorter list is shorter."""


class GroupRead(NamedTuple):
    """What a prepared step reads of one prefix.

    Attributes:
        rows: requests.
        prefix_len: tokens.
        budget: tokens that layers which select attend.
    """

    rows: int
    prefix_len: int
    budget: int


@dataclass(frozen=True)
class _Kernels:
    selection: AnchorSelection
    whole: Attends
    selected: Attends
    size: int


class _Selects(NamedTuple):
    """What the tables of selections are made of; lists of private tokens may grow beside it."""

    selection: AnchorSelection
    prefixes: tuple[PrefixRows, ...]
    budgets: tuple[int, ...]


@dataclass(frozen=True)
class _Plan:
    kernels: _Kernels
    layout: StepLayout
    selects: _Selects


class SparseDecode:
    """Decode steps whose prefixes have indexes.

    Args:
        shape: of a layer.
        config: budgets, pooling, sink and recent window.
        spec: of the token index.
        layer_plan: role of each layer.
        tracker: what is known of the requests' slots; the caller makes it learn.
        arena_size: slots of all lists of a batch, at most, the selected ones apart.
        max_prefix_len: tokens of a prefix, at most.
        device: of the KV pool.
        form: how selections are launched; None: in one launch on a GPU.
        captured: whether decode steps replay graphs.
        beside: of exact steps, whose scratch serves here, too.
        ranks: of this process: the slowest one's costs count.

    Raises:
        ValueError: settings that `graph_refusal` names.
        ListsTooLargeError: no room to keep what a search finds.
    """

    def __init__(
        self,
        shape: LayerShape,
        config: SparseAttnConfig,
        spec: IndexSpec,
        layer_plan: LayerPlan,
        tracker: SlotTracker,
        *,
        arena_size: int,
        max_prefix_len: int,
        device: torch.device,
        form: Form | None = None,
        captured: bool = False,
        beside: Attentions | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or OneRank()
        message = graph_refusal(config, spec, layer_plan, ())
        if message or not isinstance(spec, TokenIndexSpec):
            raise ValueError(f"expected settings that the decode graph can hold; got: {message}")
        self._config, self._layer_plan, self._tracker, self._device = config, layer_plan, tracker, device
        self._dtype = shape.dtype
        on_gpu, heads, batch = device.type == "cuda", shape.num_kv_heads, tracker.max_batch
        self._num_passes = 2 if config.private_dense_tokens is None else 3
        sets, width = num_sets(layer_plan, config.search_period), self.budget(max_prefix_len, batch)
        wanted = min(MAX_GROUPS, batch * (self._num_passes - 1))
        self._max_groups = max_groups = groups_that_fit(wanted, sets, heads, width)
        if max_groups < wanted:
            logger.warning(
                "sparse attention: with search_period %d a step selects for %d groups of requests at most, not %d: "
                "each has lists in %d layers, %d MiB in all; batches of more groups are attended exactly",
                *(config.search_period, max_groups, wanted, sets, KEPT_BYTES >> 20),
            )
        self._buffers = StepBuffers(
            batch,
            heads,
            arena_size,
            device,
            "triton" if on_gpu else "reference",
            reserved=sets * max_groups * heads * width,
            reserved_counts=max_groups,
            num_sets=sets,
        )
        self._lists = AnchorLists(layer_plan, self._buffers, (max_groups, heads, width), device)
        self._selections = TokenSelections(
            shape,
            spec,
            Pooling(config.pooling),
            config.summed_every,
            len(layer_plan),
            self._lists.first,
            max_batch=batch,
            max_prefix_len=max_prefix_len,
            room=min(arena_size, max_groups * (max_prefix_len + PAGE_TOKENS)),
            form=form or (Form.JOINED if on_gpu else Form.SPLIT),
            device=device,
            groups_of_a_row=self._num_passes - 1,
        )
        self._groups = StepGroups(tracker.prefixes, self._selections.number_of)
        self._lse = torch.zeros(batch, shape.num_qo_heads, dtype=torch.float32, device=device)
        passes = self._num_passes
        self._whole = Attentions(shape, batch, device, captured=captured, num_passes=passes, beside=beside)
        self._selected = Attentions(
            shape, batch, device, captured=captured, num_passes=passes, beside=beside or self._whole
        )
        traced = config.trace_folder is not None
        self.copies = SelectionCopies(layer_plan, self._lists.of) if traced else None
        self._costs: dict[int, StepCosts] = {}
        self._active: _Kernels | None = None
        self._planned: _Plan | None = None
        self._turns = SearchTurns(config.search_period if layer_plan.anchor_layers else 1)
        self.reads: list[GroupRead] = []
        self.private_reads: list[GroupRead] = []
        self.too_dear = False
        self.plans = 0

    def budget(self, prefix_len: int, num_rows: int) -> int:
        """Prefix tokens of a group per KV head, never more than the prefix has."""
        one = self._config.budget(prefix_len)
        cap = max(one, int(self._config.max_keep_ratio * prefix_len))
        return min(budget_for_group(one, num_rows, BudgetGrowth(self._config.group_growth), cap), prefix_len)

    def _kernels(self, size: int) -> _Kernels:
        size = self._whole.padded(size)
        return _Kernels(self._selections.of(size), self._whole.of(size), self._selected.of(size), size)

    # -- a step --------------------------------------------------------------------------------------------

    def prepare(
        self,
        batch: DecodeBatch,
        indexes: Sequence[ResidentIndex | None],
        private: Sequence[PrivateIndex | None] = (),
        *,
        forced: bool = False,
    ) -> bool:
        """Group a batch by index and slots, and write the tables of its step. Never waits for the device.

        Args:
            batch: the step.
            indexes: per row, the ready index to use, shorter than its sequence; None: the row attends all of it.
            private: per row, the index of its own tokens behind that, with the arrays of all layers; None: these are
                attended in full. At most as many as `free_groups` says.
            forced: also where attending all of the prefixes is faster, or where nothing was measured.

        Returns:
            Whether this step is to be attended here.
        """
        size, self.too_dear = len(batch.serials), False
        groups = self._groups.of(batch.serials, indexes)
        stretches = self._groups.stretches(groups, private)
        lengths = [rows.length for rows, _ in (*groups, *stretches)]
        if not groups or not self._whole.fits(size) or not self._selections.fits(lengths):
            self._turns.skip()
            return False
        all_groups: list[tuple[PrefixRows, ResidentIndex | PrivateIndex]] = [*groups, *stretches]
        budgets = tuple(self.budget(rows.length, len(rows.rows)) for rows, _ in all_groups)
        kernels = self._kernels(size)
        selects = _Selects(kernels.selection, tuple(rows for rows, _ in all_groups), budgets)
        settled = selects if self._groups.settled(batch.serials, groups) else None
        if not forced:
            costs = self.measured(size)
            own = sum(batch.seq_lens) - sum(rows.length * len(rows.rows) for rows, _ in all_groups)
            exact = sum(batch.seq_lens) - sum(group.saved for group in self._tracker.prefixes.groups(batch.serials))
            steps = self._turns.steps_of(settled)
            self.too_dear = costs is None or not costs.pays(exact, lengths, budgets, own, steps)
            if self.too_dear:
                self._turns.skip(settled)
                return False
        before = self._planned.layout if self._planned else None
        layout = self._buffers.lay_out(batch.seq_lens, selects.prefixes, before)
        if layout is None:
            self._turns.skip()
            return False
        plan = _Plan(kernels, layout, selects)
        if self._planned != plan:
            self._write(plan, [index for _, index in all_groups], len(groups))
            self._buffers.copy_prefixes(layout, batch)
        elif settled is None:
            self._buffers.copy_prefixes(layout, batch)  # slots of a request that nothing is known of may yet change
        self._buffers.refresh(batch)
        self._active = kernels
        self._turns.take(settled)
        if self.copies is not None:
            self.copies.groups = [(rows.rows, rows.length, index.entry.digest) for rows, index in groups]
        reads = [GroupRead(len(rows.rows), rows.length, n) for (rows, _), n in zip(all_groups, budgets, strict=True)]
        self.reads, self.private_reads = reads[: len(groups)], reads[len(groups) :]
        return True

    @property
    def searches(self) -> bool:
        """Whether anchor layers select in the prepared step, or what they did in an earlier one is attended."""
        return self._turns.searches

    @property
    def keeps_searches(self) -> bool:
        """Whether steps may attend what an earlier one selected, by a graph of their own."""
        return self._turns.period > 1

    def free_groups(self, serials: Sequence[int | None], indexes: Sequence[ResidentIndex | None]) -> int:
        """Stretches of own tokens that a step of these rows has room for beside its prefixes."""
        return max(0, self._max_groups - len(self._groups.of(serials, indexes)))

    def forget_search(self) -> None:
        """A decode step was not attended here: what was selected before it is too old behind it."""
        self._turns.skip()

    def _write(self, plan: _Plan, indexes: Sequence[ResidentIndex | PrivateIndex], num_prefixes: int) -> None:
        layout, kernels = plan.layout, plan.kernels
        before, self._planned = self._planned, None  # until all of it is written
        groups = list(zip(layout.prefixes, layout.begins, plan.selects.budgets, strict=True))
        if before is None or plan.selects != before.selects:
            chosen = [self._selection_group(prefix.length, budget, begin) for prefix, begin, budget in groups]
            rows = [prefix.rows for prefix in layout.prefixes]
            self._selections.plan(kernels.selection, rows, chosen, indexes)
        whole = [Segment(prefix.rows, prefix.length, list_begin=begin) for prefix, begin, _ in groups]
        selected = [self._lists.segment(n, prefix.rows, budget) for n, (prefix, _, budget) in enumerate(groups)]
        for attention, listed in ((kernels.whole, whole), (kernels.selected, selected)):
            # A row's prefix and its own stretch are segments of two passes.
            own = [listed[num_prefixes:]] if self._num_passes == 3 else []
            attention.plan(listed[:num_prefixes], *own, layout.private)
        self._buffers.place(layout)
        self._planned = plan
        self.plans += 1

    def _selection_group(self, prefix_len: int, budget: int, slot_start: int) -> SelectionGroup:
        num_sink = min(self._config.num_sink_tokens, budget)
        recent = min(self._config.num_recent_pages * PAGE_TOKENS, max(budget - num_sink, 0))
        return SelectionGroup(prefix_len, budget, num_sink=num_sink, num_recent=recent, slot_start=slot_start)

    def attend(self, q: Tensor, kv: PagedKV, layer: int, sm_scale: float) -> Tensor:
        """One layer of the prepared step, or of the one being captured.

        Args:
            q: [batch_size or more, num_qo_heads, head_dim]; rows beyond the batch come out as 0.
            kv: the layer's pool buffers; the new tokens' K and V are already written.
            layer: its number.
            sm_scale: attention scale.

        Returns:
            [rows of q, num_qo_heads, v_head_dim] in q's dtype, new memory.
        """
        assert self._active is not None
        kernels, arena, counts = self._active, self._buffers.arena, self._lists.counts(layer)
        out = q.new_empty(q.shape[0], q.shape[1], kv.v_cache.shape[2])
        lse = self._lse[: q.shape[0]]
        mode = self._layer_plan.layers[layer].mode
        if mode is LayerMode.DENSE:
            kernels.whole.run(q, kv, arena, sm_scale, out, lse, counts=counts)
            return out
        if mode is LayerMode.ANCHOR and self.searches:
            self._selections.run(kernels.selection, q, sm_scale, arena, layer, kernels.size, self._lists.of(layer))
            if self.copies is not None:
                self.copies.copy(layer)
        kernels.selected.run(q, kv, arena, sm_scale, out, lse, counts=counts, head_map=self._lists.head_maps[layer])
        return out

    def attended(self) -> list[int]:
        """Tokens of prefixes that each layer of the prepared step attends, a token once for each request."""
        whole = sum(one.rows * one.prefix_len for one in self.reads)
        selected = sum(one.rows * one.budget for one in self.reads)
        return [whole if role.mode is LayerMode.DENSE else selected for role in self._layer_plan.layers]

    def attended_private(self) -> tuple[int, int]:
        """Of requests' own stretches: tokens that all layers of the prepared step attend, and that they have."""
        have = sum(one.prefix_len for one in self.private_reads)
        budgets = sum(one.budget for one in self.private_reads)
        roles = [role.mode for role in self._layer_plan.layers]
        return sum(have if mode is LayerMode.DENSE else budgets for mode in roles), have * len(roles)

    # -- graphs and costs ----------------------------------------------------------------------------------

    @contextmanager
    def capturing(self, size: int, *, searches: bool = True) -> Iterator[None]:
        """Within the block `attend` may be captured, for batches of at most `size` requests; see `searches`."""
        self._whole.will_capture(size)
        self._selected.will_capture(size)
        self._active = kernels = self._kernels(size)
        self._turns.begin(searches=searches)
        kernels.selection.plan((), ())
        kernels.whole.plan()
        kernels.selected.plan()
        self._selections.raw(kernels.selection, size)
        self._planned = None
        try:
            yield
        finally:
            self._active = None

    def measured(self, size: int) -> StepCosts | None:
        """What `measure` found for batches of that size, or of one that is less than twice as large."""
        return self._costs.get(block_of(self._whole.padded(size)))

    def measure(self, size: int, kv: PagedKV) -> StepCosts:
        """Time a layer's parts for batches of that size on this GPU; `prepare` chooses by it. Waits; not in a capture.

        Args:
            size: requests of a batch, all in one group.
            kv: a layer's pool buffers; read only.
        """
        kernels, shape = self._kernels(size), self._selections.shape
        far = min(_FAR, kv.k_cache.shape[0], self._selections.room - PAGE_TOKENS, self._selections.max_prefix_len)
        q = torch.zeros(size, shape.num_qo_heads, kv.head_dim, dtype=self._dtype, device=self._device)
        out, lse = q.new_empty(size, shape.num_qo_heads, kv.v_cache.shape[2]), self._lse[:size]
        slots = torch.arange(far, dtype=torch.int32, device=self._device)
        heads, row_bytes = shape.num_kv_heads, shape.channels * shape.bits // 8
        arrays = (
            torch.arange(shape.channels, dtype=torch.int16, device=self._device).expand(heads, -1).contiguous(),
            torch.randint(256, (heads, far, row_bytes), dtype=torch.uint8, device=self._device),
            torch.ones(heads, shape.channels, dtype=torch.float32, device=self._device),
        )

        def attend() -> None:
            kernels.whole.run(q, kv, slots, 1.0, out, lse)

        def select() -> None:
            self._selections.run(kernels.selection, q, 1.0, slots, None, kernels.size)

        rows, points = tuple(range(size)), []  # all ranks measure, at the same capture: a collective is in order
        for tokens in (far // _NEAR, far):
            kernels.whole.plan([Segment(rows, tokens)])
            group = self._selection_group(tokens, self.budget(tokens, size), 0)
            self._selections.plan_one(kernels.selection, rows, group, arrays)
            times = self._ranks.most([measure_us(run, self._device) for run in (attend, select)])
            points.append([(tokens, us) for us in times])
        kernels.whole.plan()
        kernels.selection.plan((), ())
        self._planned = None
        modes = [role.mode for role in self._layer_plan.layers]
        dense, anchors, reuse = (modes.count(mode) for mode in (LayerMode.DENSE, LayerMode.ANCHOR, LayerMode.REUSE))
        lines = [Line.through(near, far) for near, far in zip(*points, strict=True)]
        costs = StepCosts(lines[0], lines[1], dense, anchors, reuse)
        self._costs[block_of(kernels.size)] = costs
        return costs
