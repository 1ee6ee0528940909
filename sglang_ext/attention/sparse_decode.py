"""Sparse decode inside CUDA graphs: anchor layers select by the token index, all launches read buffers of fixed place.

The operations are those of `decode.GroupedDecode`, which is their reference. Where that makes tensors in each step and
layer, here the host writes tables when a group or its members change, and the kernels find in them whose queries,
which index, which slots. Positions become slots by the group's own table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorSelection, Form, default_config
from prefix_kernels.budget import BudgetGrowth, budget_for_group
from prefix_kernels.grouped_attention import Segment
from prefix_kernels.launching import send
from prefix_kernels.pooled_scores import ScoreShape, Source
from prefix_kernels.pooled_scores.tables import ScoredGroup, ScoreInputs, array_addresses
from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection.lists import SelectedLists
from prefix_kernels.top_k_selection.plan import SelectionGroup
from prefix_kernels.types import PagedKV
from sglang_ext.attention.attentions import Attends, Attentions, LayerShape
from sglang_ext.attention.slot_tracker import DecodeBatch, SlotTracker
from sglang_ext.attention.step_buffers import PrefixRows, StepBuffers, StepLayout
from sglang_ext.attention.step_costs import Line, StepCosts, measure_us
from sglang_ext.config import PAGE_TOKENS, SparseAttnConfig
from sglang_ext.indexing.base import IndexSpec
from sglang_ext.indexing.layer_plan import LayerMode, LayerPlan
from sglang_ext.indexing.token_index import TokenIndexSpec
from sglang_ext.prefix.residency import ResidentIndex

MAX_GROUPS = 16
"""Prefixes of a batch with an index, at most: the lists of all of them have room for the largest budget."""

_ALIGNED = 4
_RAW_ROWS = 8
_FAR, _NEAR = 65536, 4
"""Tokens that costs are measured with, and by how much the shorter list is shorter."""
_numbers = itertools.count()


class Kept(NamedTuple):
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
class _Plan:
    selection: AnchorSelection
    whole: Attends
    selected: Attends
    layout: StepLayout
    budgets: tuple[int, ...]


def graph_refusal(
    config: SparseAttnConfig, spec: IndexSpec, plan: LayerPlan, dense_heads: Sequence[Sequence[int]]
) -> str | None:
    """Why indexes cannot be used inside decode graphs with these settings; None if they can."""
    if not isinstance(spec, TokenIndexSpec):
        return f"method {spec.method} has no kernels in the decode graph yet; token_index has"
    if config.search_period > 1:
        return f"search_period {config.search_period} is not in the decode graph yet; 1 is"
    if any(dense_heads):
        return "dense heads of the profile are not in the decode graph yet"
    latest: int | None = None
    for number, role in enumerate(plan.layers):
        if role.mode is LayerMode.ANCHOR:
            latest = number
        if role.anchor_layer is not None and role.anchor_layer != latest:
            return f"layer {number} reuses layer {role.anchor_layer}, not the last one that selects ({latest})"
    return None


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

    Raises:
        ValueError: settings that `graph_refusal` names.
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
    ) -> None:
        message = graph_refusal(config, spec, layer_plan, ())
        if message or not isinstance(spec, TokenIndexSpec):
            raise ValueError(f"expected settings that the decode graph can hold; got: {message}")
        self._config = config
        self._layer_plan = layer_plan
        self._tracker = tracker
        self._max_prefix_len = max_prefix_len
        self._device = device
        self._form = form or (Form.JOINED if device.type == "cuda" else Form.SPLIT)
        heads, batch = shape.num_kv_heads, tracker.max_batch
        self._score_shape = ScoreShape(
            shape.num_qo_heads,
            heads,
            Source.LOW_BIT,
            channels=spec.kept_channels(shape.head_dim),
            bits=spec.bits,
            listed_channels=True,
            pooling=Pooling(config.pooling),
        )
        self._max_groups = min(MAX_GROUPS, batch)
        self._max_budget = self.budget(max_prefix_len, batch)
        listed = self._max_groups * heads * self._max_budget
        self._buffers = StepBuffers(
            batch,
            heads,
            arena_size,
            device,
            "triton" if device.type == "cuda" or form is not None else "reference",
            reserved=listed,
            reserved_counts=self._max_groups,
        )
        wanted = (self._max_groups, heads, self._max_budget)
        self._lists = SelectedLists(
            torch.full(wanted, -1, dtype=torch.int32, device=device),
            self._buffers.counts[batch:],
            self._buffers.arena[:listed].view(wanted),
        )
        self._room = min(arena_size, self._max_groups * (max_prefix_len + _ALIGNED))
        self._scores = torch.zeros(heads * self._room, dtype=torch.float32, device=device)
        self._addresses = torch.zeros(len(layer_plan), self._max_groups, 5, dtype=torch.int64, device=device)
        self._head_maps = [
            torch.tensor(role.head_map, dtype=torch.int32, device=device) if role.anchor_layer is not None else None
            for role in layer_plan.layers
        ]
        self._lse = torch.zeros(batch, shape.num_qo_heads, dtype=torch.float32, device=device)
        self._whole = Attentions(shape, batch, device)
        self._selected = Attentions(shape, batch, device)
        self._selections: dict[int, AnchorSelection] = {}
        self._known: WeakKeyDictionary[ResidentIndex, tuple[int, Tensor]] = WeakKeyDictionary()
        self._raw: dict[int, Tensor] = {}
        self._costs: dict[int, StepCosts] = {}
        self._active: tuple[AnchorSelection, Attends, Attends, Tensor | None] | None = None
        self._planned: _Plan | None = None
        self.kept: list[Kept] = []
        self.plans = 0

    def budget(self, prefix_len: int, num_rows: int) -> int:
        """Prefix tokens of a group per KV head, never more than the prefix has."""
        one = self._config.budget(prefix_len)
        cap = max(one, int(self._config.max_keep_ratio * prefix_len))
        return min(budget_for_group(one, num_rows, BudgetGrowth(self._config.group_growth), cap), prefix_len)

    # -- a step --------------------------------------------------------------------------------------------

    def prepare(self, batch: DecodeBatch, indexes: Sequence[ResidentIndex | None], *, forced: bool = False) -> bool:
        """Group a batch by index and slots, and write the tables of its step. Never waits for the device.

        Args:
            batch: the step.
            indexes: per row, the ready index to use, shorter than its sequence; None: the row attends all of it.
            forced: also where attending all of the prefixes is faster, or where nothing was measured.

        Returns:
            Whether this step is to be attended here.
        """
        size = len(batch.serials)
        if not any(indexes) or not self._whole.fits(size):
            return False
        groups = self._groups(batch.serials, indexes)
        lengths = [index.prefix_len for _, index in groups]
        if len(groups) > self._max_groups or max(lengths) > self._max_prefix_len:
            return False
        if sum(length + _ALIGNED for length in lengths) > self._room:
            return False
        layout = self._buffers.lay_out(batch.seq_lens, [rows for rows, _ in groups])
        if layout is None:
            return False
        budgets = tuple(self.budget(rows.length, len(rows.rows)) for rows, _ in groups)
        costs = self.measured(size)
        private = sum(batch.seq_lens) - sum(rows.length * len(rows.rows) for rows, _ in groups)
        if not forced and (costs is None or not costs.pays(lengths, budgets, private)):
            return False
        plan = _Plan(
            self._selection(size),
            self._whole.of(size),
            self._selected.of(size),
            layout,
            budgets,
        )
        if self._planned != plan:
            self._write(plan, [index for _, index in groups], batch)
        self._buffers.refresh(batch)
        self._active = (plan.selection, plan.whole, plan.selected, self._raw_scores(size))
        self.kept = [
            Kept(len(rows.rows), rows.length, budget) for (rows, _), budget in zip(groups, plan.budgets, strict=True)
        ]
        return True

    def _groups(
        self, serials: Sequence[int | None], indexes: Sequence[ResidentIndex | None]
    ) -> list[tuple[PrefixRows, ResidentIndex]]:
        """Rows that have one index and, as was shown, one set of slots of its prefix; in the order of first rows."""
        rows: dict[tuple[int, str, int], list[int]] = {}
        found: dict[tuple[int, str, int], ResidentIndex] = {}
        for row, (serial, index) in enumerate(zip(serials, indexes, strict=True)):
            if index is None or serial is None:
                continue
            shared = self._tracker.prefixes.group_of(serial)
            own = ("request", serial)
            if shared is not None and shared.length >= index.prefix_len:
                own = ("group", shared.id)
            key = (self._known_as(index)[0], *own)
            rows.setdefault(key, []).append(row)
            found[key] = index
        return [(PrefixRows(key, tuple(rows[key]), found[key].prefix_len), found[key]) for key in rows]

    def _known_as(self, index: ResidentIndex) -> tuple[int, Tensor]:
        """A number of its own, and its arrays' addresses [num_layers, 5]."""
        if index not in self._known:
            addresses = [array_addresses(self._score_shape, _arrays(layer)) for layer in index.layers]
            self._known[index] = (next(_numbers), torch.tensor(addresses, dtype=torch.int64))
        return self._known[index]

    def _write(self, plan: _Plan, indexes: Sequence[ResidentIndex], batch: DecodeBatch) -> None:
        layout, heads = plan.layout, self._score_shape.num_kv_heads
        before = self._planned
        self._planned = None  # until all of it is written
        if before is None or (before.selection, before.layout.prefixes, before.budgets) != (
            plan.selection,
            layout.prefixes,
            plan.budgets,
        ):
            scored, chosen, at = [], [], 0
            for prefix, begin, budget, index in zip(layout.prefixes, layout.begins, plan.budgets, indexes, strict=True):
                length = prefix.length
                stride = -(-length // _ALIGNED) * _ALIGNED
                places = range(heads)
                scored.append(
                    ScoredGroup(
                        prefix.rows,
                        (length,) * heads,
                        tuple(head * length for head in places),
                        (0,) * heads,
                        tuple(at + head * stride for head in places),
                        _arrays(index.layers[0]),
                    )
                )
                at += heads * stride
                num_sink = min(self._config.num_sink_tokens, budget)
                recent = min(self._config.num_recent_pages * PAGE_TOKENS, max(budget - num_sink, 0))
                chosen.append(SelectionGroup(length, budget, num_sink=num_sink, num_recent=recent, slot_start=begin))
            plan.selection.plan(scored, chosen)
            addresses = torch.zeros(self._addresses.shape, dtype=torch.int64)
            for number, index in enumerate(indexes):
                addresses[:, number] = self._known_as(index)[1]
            send(addresses, self._addresses)
        width = self._max_budget
        whole, selected = [], []
        for number, (prefix, begin, budget) in enumerate(
            zip(layout.prefixes, layout.begins, plan.budgets, strict=True)
        ):
            whole.append(Segment(prefix.rows, prefix.length, list_begin=begin))
            begin, list_id = number * heads * width, self._buffers.max_batch + number
            selected.append(Segment(prefix.rows, budget, list_begin=begin, head_stride=width, list_id=list_id))
        plan.whole.plan(whole, layout.private)
        plan.selected.plan(selected, layout.private)
        self._buffers.place(layout, batch)
        self._planned = plan
        self.plans += 1

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
        selection, whole, selected, raw = self._active
        out = q.new_empty(q.shape[0], q.shape[1], kv.v_cache.shape[2])
        lse, arena, counts = self._lse[: q.shape[0]], self._buffers.arena, self._buffers.counts
        mode = self._layer_plan.layers[layer].mode
        if mode is LayerMode.DENSE:
            whole.run(q, kv, arena, sm_scale, out, lse, counts=counts)
            return out
        if mode is LayerMode.ANCHOR:
            inputs = ScoreInputs(q, sm_scale, raw=raw, arrays=self._addresses[layer])
            selection.run(inputs, self._scores, self._lists, slot_table=arena, pad=False)
        selected.run(q, kv, arena, sm_scale, out, lse, counts=counts, head_map=self._head_maps[layer])
        return out

    @contextmanager
    def capturing(self, size: int) -> Iterator[None]:
        """Within the block `attend` may be captured, for batches of at most `size` requests."""
        self._whole.will_capture(size)
        self._selected.will_capture(size)
        selection, whole, selected = self._selection(size), self._whole.of(size), self._selected.of(size)
        self._active = (selection, whole, selected, self._raw_scores(size))
        selection.plan((), ())
        whole.plan()
        selected.plan()
        self._planned = None
        try:
            yield
        finally:
            self._active = None

    def measure(self, size: int, kv: PagedKV) -> StepCosts:
        """Time a layer's parts for batches of that size on this GPU; `prepare` chooses by it. Waits; not in a capture.

        Args:
            size: requests of a batch, all in one group.
            kv: a layer's pool buffers; read only.
        """
        shape, heads = self._score_shape, self._score_shape.num_kv_heads
        selection, attention, raw = self._selection(size), self._whole.of(size), self._raw_scores(size)
        far = min(_FAR, kv.k_cache.shape[0], self._room, self._max_prefix_len)
        rows = tuple(range(size))
        q = torch.zeros(size, shape.num_qo_heads, kv.head_dim, dtype=kv.k_cache.dtype, device=self._device)
        out = q.new_empty(size, shape.num_qo_heads, kv.v_cache.shape[2])
        slots = torch.arange(far, dtype=torch.int32, device=self._device)
        arrays = (
            torch.arange(shape.channels, dtype=torch.int16, device=self._device).expand(heads, -1).contiguous(),
            torch.randint(256, (heads, far, shape.channels * shape.bits // 8), device=self._device).to(torch.uint8),
            torch.ones(heads, shape.channels, dtype=torch.float32, device=self._device),
        )
        attend, select = [], []
        for tokens in (far // _NEAR, far):
            attention.plan([Segment(rows, tokens)], [])
            lse = self._lse[:size]
            attend.append((tokens, measure_us(lambda: attention.run(q, kv, slots, 1.0, out, lse), self._device)))
            stride = -(-tokens // _ALIGNED) * _ALIGNED
            begins = tuple(head * stride for head in range(heads))
            counts, firsts = (tokens,) * heads, tuple(head * tokens for head in range(heads))
            group = ScoredGroup(rows, counts, firsts, (0,) * heads, begins, arrays)
            selection.plan([group], [SelectionGroup(tokens, self.budget(tokens, size))])
            inputs = ScoreInputs(q, 1.0, raw=raw)

            def run(inputs: ScoreInputs = inputs) -> None:
                selection.run(inputs, self._scores, self._lists, slot_table=slots, pad=False)

            select.append((tokens, measure_us(run, self._device)))
        attention.plan()
        selection.plan((), ())
        self._planned = None
        modes = [role.mode for role in self._layer_plan.layers]
        numbers = [modes.count(mode) for mode in (LayerMode.DENSE, LayerMode.ANCHOR, LayerMode.REUSE)]
        self._costs[selection.config.block_m] = StepCosts(Line.through(*attend), Line.through(*select), *numbers)
        return self._costs[selection.config.block_m]

    def measured(self, size: int) -> StepCosts | None:
        """What `measure` found for batches of that size, or for others of the same tile."""
        return self._costs.get(self._selection(size).config.block_m)

    def attended(self) -> list[int]:
        """Tokens of prefixes that each layer of the prepared step attends, a token once for each request."""
        whole = sum(one.rows * one.prefix_len for one in self.kept)
        selected = sum(one.rows * one.budget for one in self.kept)
        return [whole if role.mode is LayerMode.DENSE else selected for role in self._layer_plan.layers]

    def _raw_scores(self, size: int) -> Tensor | None:
        """Room for raw scores, where so few rows write and read less than codes that are scored twice."""
        size = self._whole.padded(size)
        rows = size * self._score_shape.gqa
        if rows > _RAW_ROWS:
            return None
        if size not in self._raw:
            groups, heads = min(size, self._max_groups), self._score_shape.num_kv_heads
            room = torch.zeros(groups, heads, self._max_prefix_len, rows, dtype=torch.float32, device=self._device)
            self._raw[size] = room.transpose(2, 3)
        return self._raw[size]

    def _selection(self, size: int) -> AnchorSelection:
        """For batches of that size, padded: one for each height of the tile."""
        on_gpu = self._device.type == "cuda"
        capability = torch.cuda.get_device_capability(self._device) if on_gpu else (9, 0)
        config = default_config(self._score_shape, self._whole.padded(size), capability)
        if config.block_m not in self._selections:
            self._selections[config.block_m] = AnchorSelection(
                self._score_shape,
                self._tracker.max_batch,
                self._max_groups,
                self._max_prefix_len,
                self._max_budget,
                config,
                self._device,
                max_block_size=1,
                form=self._form,
                num_programs=None if on_gpu else 2 * self._score_shape.num_kv_heads,
            )
        return self._selections[config.block_m]


def _arrays(layer: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Of a layer's token index, as `ScoredGroup.arrays` names them."""
    return layer["channels"], layer["keys_packed"], layer["keys_scale"]
