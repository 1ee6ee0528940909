"""Decode with indexes: anchor layers select, reuse layers take a selection over, all attend by lists of slots.

The host writes tables when a group or its members change. What runs in a layer finds in them whose queries, which
index, which slots. Positions become slots by the group's own table.
"""

from __future__ import annotations

import functools
import logging
import sys
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from prefix_kernels.grouped_attention import AttentionShape, Segment
from prefix_kernels.launching import block_of
from prefix_kernels.types import PagedKV, SelectionGroup, list_stride, pack_lists
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.decode.attention import Attends, Attentions
from sglang_ext.decode.base import DecodeBackend
from sglang_ext.decode.buffers import (
    KEPT_BYTES,
    LIST_BYTES,
    AnchorLists,
    StepBuffers,
    StepLayout,
    list_entries,
    num_sets,
)
from sglang_ext.decode.cache_rank.client import CacheRank
from sglang_ext.decode.costs import Line, Lines, StepCosts, measure_us, numbers_of_groups
from sglang_ext.decode.grouping import SlotTracker, StepGroups, first_that_fit
from sglang_ext.decode.select_op import AheadOp, ListSizes, Selecting, SelectOp, selection_group
from sglang_ext.decode.swap import HostKV, SwapIn
from sglang_ext.decode.trace import SelectionCopies
from sglang_ext.decode.turns import SearchTurns
from sglang_ext.decode.types import DecodeBatch, GroupRead, HostPrefix, Index, PrefixGroup, StepPath
from sglang_ext.methods.layer_plan import LayerMode, LayerPlan
from sglang_ext.options import SparseAttnConfig
from sglang_ext.prefix.residency import ResidentIndex
from sglang_ext.ranks import Ranks

logger = logging.getLogger(__name__)

ROOM = 1 << 21
"""Tokens of all prefixes that a step selects from, at most, unless one prefix alone may have more."""
_FAR, _NEAR = 65536, 4
"""Tokens that costs are measured with, and by how much the shorter list is shorter."""


_IndexT = TypeVar("_IndexT", bound=Index)


class _Selects(NamedTuple):
    """What the tables of selections are made of; lists of suffix tokens may grow beside it."""

    tile: Hashable
    prefixes: tuple[PrefixGroup, ...]
    budgets: tuple[int, ...]


@dataclass(frozen=True)
class _Kernels:
    whole: Attends
    selected: Attends
    size: int


class _Tables(NamedTuple):
    """All that the tables of a step are made of."""

    kernels: _Kernels
    layout: StepLayout
    selects: _Selects


@dataclass(frozen=True)
class SparsePlan:
    """A batch's groups with an index.

    Attributes:
        reads: of each prefix.
        suffix_reads: of requests' suffixes.
        selects: what is selected.
        indexes: of the prefixes, then of the suffixes.
        settled: `selects`, where the groups' slots stay as they are.
        own: tokens that are in no group.
        others: requests that are in no prefix's group.
        surplus: rows among them whose index there was no room for: they attend all.
    """

    reads: tuple[GroupRead, ...]
    suffix_reads: tuple[GroupRead, ...]
    selects: _Selects
    indexes: tuple[Index, ...]
    settled: _Selects | None
    kernels: _Kernels
    own: int
    others: int
    surplus: tuple[int, ...]


class SparseDecode(DecodeBackend[SparsePlan]):
    """Decode steps whose prefixes have indexes.

    Attributes:
        sizes: what the operation holds.
        width: tokens of a budget, at most: what lists were made for.
        factor_of: digest of an index -> factor of its budget.
        cache_rank: names the candidates of the next step; None: this process does.
        op_for, layer_plan: as given.

    Args:
        shape: of a layer.
        config: budgets, pooling, sink and recent window.
        op_for: the method's operation for such lists.
        layer_plan: role of each layer.
        tracker: what is known of the requests' slots; the caller makes it learn.
        arena_size: slots of all lists of a batch, at most, the selected ones apart.
        max_prefix_len: tokens of a prefix, at most.
        device: of the KV pool.
        costs: by `block_of` a captured size, what `measure` found. Not owned, written here.
        captured: whether decode steps replay graphs.
        beside: of exact steps, whose scratch serves here, too.
        ranks: of this process: the slowest one's costs count.
        host: KV of prefixes in host memory; None: there are none.

    Raises:
        ListsTooLargeError: no room to keep what a search finds.
    """

    def __init__(
        self,
        shape: AttentionShape,
        config: SparseAttnConfig,
        op_for: Callable[[ListSizes], SelectOp],
        layer_plan: LayerPlan,
        tracker: SlotTracker,
        *,
        arena_size: int,
        max_prefix_len: int,
        device: torch.device,
        costs: dict[int, StepCosts] | None = None,
        captured: bool = False,
        beside: Attentions | None = None,
        ranks: Ranks | None = None,
        host: HostKV | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self._config, self.layer_plan, self._device = config, layer_plan, device
        self.op_for = op_for
        self._shape = shape
        self._budget_of = functools.lru_cache(1 << 10)(config.group_budget)
        self._largest_group = tracker.max_batch
        heads, batch = shape.num_kv_heads, tracker.max_batch
        self._num_passes = 2 if config.suffix_dense_tokens is None else 3
        sets, self.width = num_sets(layer_plan, config.steps_per_search), config.group_budget(max_prefix_len, batch)
        self.factor_of: Callable[[str], int] = lambda digest: 1
        max_groups = batch * (self._num_passes - 1)
        traced = config.trace_folder is not None
        # A trace has a copy of each anchor layer's lists: as if all of these were kept.
        copies = max(sets, len(layer_plan.anchor_layers) if traced else 1)
        entries = list_entries(max_groups, copies, heads, self.width, LIST_BYTES if captured else KEPT_BYTES)
        self._buffers = StepBuffers(batch, heads, arena_size, device, reserved_counts=max_groups, num_sets=sets)
        self._lists = AnchorLists(layer_plan, self._buffers, entries, device)
        self.swap = None if host is None else SwapIn(host, layer_plan, heads, max_groups, entries, device)
        most = max(ROOM, max_prefix_len + PAGE_TOKENS) if captured else arena_size
        self._room = min(arena_size, most, max_groups * (max_prefix_len + PAGE_TOKENS))
        self._max_prefix_len = max_prefix_len
        ahead = layer_plan.anchor_layers if config.select_ahead else ()
        passes = self._num_passes - 1
        self.sizes = ListSizes(max_groups, entries, batch, max_prefix_len, self._room, passes, ahead)
        self.op = op_for(self.sizes)
        self._ahead = self.op if ahead and isinstance(self.op, AheadOp) else None
        self.cache_rank: CacheRank | None = None
        self._warn_of_room()
        self._asked: dict[int, tuple[Tensor, float]] = {}
        self._groups = StepGroups(tracker.prefixes, self.op.number_of)
        self.lse = torch.zeros(batch, shape.num_qo_heads, dtype=torch.float32, device=device)
        passes = self._num_passes
        self._whole = Attentions(shape, batch, device, captured=captured, num_passes=passes, beside=beside)
        self._selected = Attentions(
            shape, batch, device, captured=captured, num_passes=passes, beside=beside or self._whole, short=True
        )
        self.copies = SelectionCopies(layer_plan, self._lists.of, queries=not captured) if traced else None
        self._costs = {} if costs is None else costs
        self._active: _Kernels | None = None
        self._planned: _Tables | None = None
        # Behind one that named its own, any number of steps may have their candidates of the one before.
        period = config.steps_per_search if self._ahead is None else sys.maxsize
        self._turns = SearchTurns(period if layer_plan.anchor_layers else 1)
        self.plans = 0

    @property
    def period(self) -> int:
        """Steps that may use one search, at most."""
        return self._turns.period

    @property
    def paths(self) -> tuple[StepPath, ...]:
        """See the base: the second one where steps may attend what an earlier one selected."""
        return (StepPath.SPARSE, StepPath.KEPT) if self.period > 1 else (StepPath.SPARSE,)

    def _warn_of_room(self) -> None:
        """Say what of the largest batch candidates named ahead have no room for; a step would say `no_room` only."""
        if self._ahead is None:
            return
        config, most, batch = self._config, self._max_prefix_len, self._largest_group
        fits, least = self.op.fits, min(most, max(PAGE_TOKENS, config.min_sparse_prompt_len))
        tokens = bisect_right(range(1, most + 1), False, key=lambda n: not fits([n], [config.group_budget(n, batch)]))
        groups = bisect_right(
            range(1, batch + 1), False, key=lambda n: not fits([least] * n, [config.budget(least)] * n)
        )
        if tokens < most or groups < batch:
            logger.warning(
                "sparse attention: expected room for candidates that select_ahead names of one group of %d requests "
                "behind %d tokens and of %d groups, got room behind %d tokens and of %d groups: what is more decodes "
                "exactly (no_room). Lower --context-length, --cuda-graph-max-bs, two_level.candidate_ratio or the "
                "number of anchor layers, or set select_ahead to false",
                batch, most, batch, tokens, groups,
            )  # fmt: skip

    def _kernels(self, size: int) -> _Kernels:
        size = self._whole.padded(size)
        return _Kernels(self._whole.of(size), self._selected.of(size), size)

    # -- a step --------------------------------------------------------------------------------------------

    def plan(self, batch: DecodeBatch) -> SparsePlan | None:
        """A batch's groups, by index and slots, as far as there is room; None without one."""
        found = self._groups.of(batch.serials, batch.indexes, batch.hosts) if batch.indexes else []
        size = len(batch.serials)
        if not found or not self._whole.fits(size):
            return None
        groups = self._fitting(found)
        hosted = self._hosted_budgets(groups, batch.hosts)
        if not groups or hosted is None:
            return None
        # A row whose prefix is in no group attends all; so only others' suffixes are selected from.
        grouped = {row for prefix, _ in groups for row in prefix.rows}
        suffixes = self._fitting(self._groups.suffixes(groups, batch.suffix), groups)
        all_groups: list[tuple[PrefixGroup, Index]] = [*groups, *suffixes]
        prefixes = tuple(rows for rows, _ in all_groups)
        budgets = tuple((hosted and hosted.get(one[0])) or self._budget(*one) for one in all_groups)
        reads = [GroupRead(len(one.rows), one.length, n) for one, n in zip(prefixes, budgets, strict=True)]
        kernels = self._kernels(size)
        selects = _Selects(self.op.tile(kernels.size), prefixes, budgets)
        return SparsePlan(
            tuple(reads[: len(groups)]),
            tuple(reads[len(groups) :]),
            selects,
            tuple(index for _, index in all_groups),
            selects if self._groups.settled(batch.serials, groups) else None,
            kernels,
            sum(batch.seq_lens) - sum(one.length * len(one.rows) for one in prefixes),
            size - len(grouped),
            tuple(row for prefix, _ in found for row in prefix.rows if row not in grouped),
        )

    def set_budget(self, config: SparseAttnConfig) -> None:
        """Take the budget of a configuration from the next step on.

        Raises:
            ValueError: the longest prefix's is more than lists were made for.
        """
        longest, rows = self._max_prefix_len, self._largest_group
        wanted = config.group_budget(longest, rows)
        if wanted > self.width:
            with_top_k = functools.partial(msgspec.structs.replace, config, keep_ratio=None)
            most = bisect_right(
                range(1, longest), self.width, key=lambda k: with_top_k(top_k=k).group_budget(longest, rows)
            )
            raise ValueError(
                f"expected a budget of at most {self.width} tokens, for which lists were made at the start; got "
                f"{wanted}, of a prefix of {longest}: set top_k to at most {most}, beside keep_ratio if you like, or "
                "restart with the larger budget"
            )
        self._config = config
        self._budget_of = functools.lru_cache(1 << 10)(config.group_budget)

    def budget(self, prefix_len: int, factor: int = 1, num_rows: int = 1) -> int:
        """Tokens that are selected of a prefix for so many requests, `factor` times what the configuration says, as far
        as it and the lists have them. All layers that select have the same: one layout serves them.
        """
        one = self._budget_of(prefix_len, num_rows)
        return min(factor * one, max(one, self.width), prefix_len)

    def _budget(self, prefix: PrefixGroup, index: Index) -> int:
        factor = self.factor_of(index.entry.digest) if isinstance(index, ResidentIndex) else 1
        return self.budget(prefix.length, factor, len(prefix.rows))

    def _fitting(
        self, groups: Sequence[tuple[PrefixGroup, _IndexT]], before: Sequence[tuple[PrefixGroup, Index]] = ()
    ) -> list[tuple[PrefixGroup, _IndexT]]:
        """The groups that a step selects for beside those that stand before: all, or, where there is no room, first
        those that save most.
        """
        before_all = [self._sizes(*one) for one in before]
        sizes = {one: self._sizes(*one) for one in groups}

        def fits(some: Sequence[tuple[PrefixGroup, _IndexT]]) -> bool:
            every = before_all + [sizes[one] for one in some]
            lengths, budgets, entries = zip(*every, strict=True) if every else ((), (), ())
            short = max(lengths, default=0) <= self._max_prefix_len and sum(entries) <= self._lists.entries
            return short and (not some or self.op.fits(lengths, budgets))

        if fits(groups):
            return list(groups)
        saved = {one: len(one[0].rows) * one[0].length - sizes[one][1] for one in groups}
        wanted = sorted(saved, key=lambda one: (-saved[one], one[0].rows))
        kept = first_that_fit(wanted, sizes, fits)
        return [one for one in groups if one in kept]

    def _sizes(self, prefix: PrefixGroup, index: Index) -> tuple[int, int, int]:
        """Tokens of a prefix, of its budget, and entries of its lists."""
        budget = self._budget(prefix, index)
        return prefix.length, budget, self._shape.num_kv_heads * list_stride(budget)

    def swaps(self, prefix_len: int) -> bool:
        """Whether a request alone may have a prefix of so many tokens in host memory."""
        one = [self.budget(prefix_len)]
        return self.swap is not None and self.swap.budgets([prefix_len], one, one) is not None

    def _hosted_budgets(
        self, groups: Sequence[tuple[PrefixGroup, Index]], hosts: Sequence[HostPrefix | None]
    ) -> dict[PrefixGroup, int] | None:
        """Budgets of groups whose prefix lies in host memory; None: not all such rows can be attended in one step."""
        hosted = [one for one in groups if one[0].host is not None]
        if not hosted or self.swap is None:
            return None if any(host is not None for host in hosts) else {}
        rows = {row for prefix, _ in hosted for row in prefix.rows}
        if any(host is not None and row not in rows for row, host in enumerate(hosts)):
            return None
        dense = any(role.mode is LayerMode.DENSE for role in self.layer_plan.layers)
        if dense and any(host is not None and host.dense_slots is None for host in hosts):
            return None
        lengths = [prefix.length for prefix, _ in hosted]
        alone = [(prefix._replace(rows=prefix.rows[:1]), index) for prefix, index in hosted]
        budgets = self.swap.budgets(lengths, *([self._budget(*one) for one in groups] for groups in (hosted, alone)))
        return None if budgets is None else {one: n for (one, _), n in zip(hosted, budgets, strict=True)}

    def cost_us(self, plan: SparsePlan, *, lasting: bool = False) -> float | None:
        """See the base; of a search as many steps have a part as are likely to use it; `lasting`: as may use it."""
        costs = self._costs.get(block_of(plan.kernels.size))
        if costs is None:
            return None
        lengths = [prefix.length for prefix in plan.selects.prefixes]
        alone = self.cache_rank is not None and not self.cache_rank.knows_plan
        steps = self.period if lasting else 1 if alone else self._turns.steps_of(plan.settled)
        return costs.sparse_us(lengths, plan.selects.budgets, plan.own, plan.others, steps)

    def begin(self, plan: SparsePlan, batch: DecodeBatch) -> StepPath | None:
        before = self._planned.layout if self._planned else None
        layout = self._buffers.lay_out(batch.seq_lens, plan.selects.prefixes, before)
        if layout is None:
            return None
        tables = _Tables(plan.kernels, layout, plan.selects)
        if self._planned != tables:
            self._write(tables, plan.indexes, len(plan.reads), batch)
        elif plan.settled is None:
            self._buffers.copy_prefixes(layout, batch)  # slots of a request that nothing is known of may yet change
        self._buffers.refresh(batch)
        self._active = plan.kernels
        self._turns.take(plan.settled, must=self.cache_rank is not None and not self.cache_rank.serves())
        if self.copies is not None:
            groups = zip(layout.prefixes, plan.indexes, strict=True)
            self.copies.groups = [
                (rows.rows, rows.length, index.entry.digest)
                for rows, index in groups
                if isinstance(index, ResidentIndex)
            ]
        return StepPath.SPARSE if self._turns.searches else StepPath.KEPT

    def skip(self, plan: SparsePlan | None = None) -> None:
        """A decode step is attended otherwise: what was selected before it is too old behind it.

        Args:
            plan: of this step, where there is one.
        """
        self._turns.skip(None if plan is None else plan.settled)

    def _write(self, tables: _Tables, indexes: Sequence[Index], num_prefixes: int, batch: DecodeBatch) -> None:
        kernels, layout, selects = tables
        before, self._planned = self._planned, None  # until all of it is written
        groups = list(zip(layout.prefixes, layout.begins, selects.budgets, strict=True))
        rows = [prefix.rows for prefix in layout.prefixes]
        chosen = self.packed([(prefix.length, budget, begin) for prefix, begin, budget in groups])
        if before is None or selects != before.selects:
            step = Selecting(kernels.size, rows, chosen)
            self.op.plan(step, indexes)
            if self.cache_rank is not None:
                self.cache_rank.plan(step, indexes)
            if self.swap is not None:
                self.swap.plan(chosen, [prefix.host for prefix in layout.prefixes])
        if self.copies is not None:
            self.copies.places = chosen
        whole = [Segment(prefix.rows, prefix.length, list_begin=begin) for prefix, begin, _ in groups]
        selected = [self._lists.segment(n, *of) for n, of in enumerate(zip(rows, chosen, strict=True))]
        for attention, listed in ((kernels.whole, whole), (kernels.selected, selected)):
            # A row's prefix and its suffix are segments of two passes.
            own = [listed[num_prefixes:]] if self._num_passes == 3 else []
            attention.plan(listed[:num_prefixes], *own, layout.suffix)
        self._buffers.place(layout)
        self._buffers.copy_prefixes(layout, batch)
        self._planned = tables
        self.plans += 1

    def packed(self, groups: Sequence[tuple[int, int, int]]) -> list[SelectionGroup]:
        """What is selected, and where it is listed, of each prefix's (tokens, budget, place of its table of slots)."""
        return pack_lists([selection_group(self._config, *one) for one in groups], self._shape.num_kv_heads)

    def run(self, q: Tensor, kv: PagedKV, layer: int, sm_scale: float) -> Tensor:
        """See the base; by the layer's role. A batch that SGLang runs without a graph is padded as its tables are."""
        assert self._active is not None
        rows, size = q.shape[0], self._active.size
        if rows < size:
            return self.run(pad(q, (0, 0, 0, 0, 0, size - rows)), kv, layer, sm_scale)[:rows]
        kernels, arena, counts = self._active, self._buffers.arena, self._lists.counts(layer)
        lists, head_map = self._lists.of(layer), self._lists.head_maps[layer]
        out = q.new_empty(q.shape[0], q.shape[1], kv.v_cache.shape[2])
        lse = self.lse[: q.shape[0]]
        mode = self.layer_plan.layers[layer].mode
        if mode is LayerMode.DENSE:
            kernels.whole.run(q, kv, arena, sm_scale, out, lse, counts=counts)
            return out
        selects = self._turns.searches or self._ahead is not None
        anchors = mode is LayerMode.ANCHOR and selects
        if self.cache_rank is not None and not self._turns.searches and layer == self.layer_plan.anchor_layers[0]:
            self.cache_rank.take()
        if anchors:
            select = self.op.run if self._turns.searches or self._ahead is None else self._ahead.run_behind
            select(kernels.size, q, sm_scale, arena, layer, lists)
            if self.copies is not None:
                self.copies.copy(layer, q)
        if self.swap is not None and selects:
            self.swap.before(layer, lists, kv)
        kernels.selected.run(
            q, kv, arena, sm_scale, out, lse, counts=counts, head_map=head_map, head_slots=lists.slots,
            after_lists=anchors and self.op.ends_in_lists and self.copies is None and self.swap is None,
        )  # fmt: skip
        if self._ahead is not None and mode is LayerMode.ANCHOR:
            self._look_ahead(kernels.size, q, layer, sm_scale)
        return out

    def _look_ahead(self, size: int, q: Tensor, layer: int, sm_scale: float) -> None:
        """Behind the last anchor layer the step's queries, held until then, name the candidates of the next one."""
        self._asked[layer] = q, sm_scale
        layers = self.layer_plan.anchor_layers
        if layer != layers[-1]:
            return
        asked = [self._asked.pop(one) for one in layers]
        assert self._ahead is not None
        queries = [q if of == sm_scale else q * (of / sm_scale) for q, of in asked]
        if self.cache_rank is not None and not self._turns.searches:
            self.cache_rank.ask(size, queries)
            return
        self._ahead.look_ahead(size, queries, sm_scale)
        if self.cache_rank is not None:
            self.cache_rank.forget(sm_scale)

    def attended(self, plan: SparsePlan) -> list[int]:
        """Tokens of prefixes that each layer of a step attends, a token once for each request."""
        whole = sum(one.rows * one.prefix_len for one in plan.reads)
        selected = sum(one.rows * one.budget for one in plan.reads)
        return [whole if role.mode is LayerMode.DENSE else selected for role in self.layer_plan.layers]

    def attended_suffix(self, plan: SparsePlan) -> tuple[int, int]:
        """Of requests' suffixes: tokens that all layers of a step attend, and that they have."""
        have = sum(one.prefix_len for one in plan.suffix_reads)
        budgets = sum(one.budget for one in plan.suffix_reads)
        roles = [role.mode for role in self.layer_plan.layers]
        return sum(have if mode is LayerMode.DENSE else budgets for mode in roles), have * len(roles)

    # -- graphs and costs ----------------------------------------------------------------------------------

    @contextmanager
    def capturing(self, size: int, path: StepPath) -> Iterator[None]:
        self._whole.will_capture(size)
        self._selected.will_capture(size)
        self._active = kernels = self._kernels(size)
        self._turns.begin(searches=path is StepPath.SPARSE)
        self._clear(kernels)
        try:
            yield
        finally:
            self._active = None

    def _clear(self, kernels: _Kernels) -> None:
        self.op.plan(Selecting(kernels.size), ())
        if self.swap is not None:
            self.swap.plan((), ())
        kernels.whole.plan()
        kernels.selected.plan()
        self._planned = None

    def measure(self, size: int, kv: PagedKV) -> StepCosts | None:
        """Time a layer's parts for batches of that size on this GPU, once; costs are told by it. Waits; not in a
        capture.

        Args:
            size: requests of a batch, in one group, in some, and each in its own.
            kv: a layer's pool buffers; read only.

        Returns:
            What was measured; None where it was before, of this size or of one that is less than twice as large, or
            where the pool is too small for any prefix.
        """
        kernels, shape, config = self._kernels(size), self._shape, self._config
        if block_of(kernels.size) in self._costs:
            return None
        far, listed = min(_FAR, kv.k_cache.shape[0]), self._lists.entries // shape.num_kv_heads
        tokens = {n: min(far, n * self._max_prefix_len, self._room - n * PAGE_TOKENS) for n in numbers_of_groups(size)}
        tokens = {n: most for n, most in tokens.items() if most >= _NEAR * n and self.op.fits(*[[most // n] * n] * 2)}
        if not tokens:
            return None
        q = torch.zeros(size, shape.num_qo_heads, kv.head_dim, dtype=shape.dtype, device=self._device)
        out, lse = q.new_empty(size, shape.num_qo_heads, kv.v_cache.shape[2]), self.lse[:size]
        slots = torch.arange(far, dtype=torch.int32, device=self._device)

        def attend() -> None:
            kernels.whole.run(q, kv, slots, 1.0, out, lse)

        def select() -> None:
            self.op.run(kernels.size, q, 1.0, slots, None, self._lists.of(0))

        parts: list[Callable[[], None]] = [attend, select]
        op = self._ahead
        if op is not None:
            asked = [q] * len(self.layer_plan.anchor_layers)
            parts.append(lambda: op.look_ahead(kernels.size, asked, 1.0))
            parts.append(lambda: op.run_behind(kernels.size, q, 1.0, slots, None, self._lists.of(0)))
        measured = [Lines() for _ in parts]
        for number, most in tokens.items():
            rows = [tuple(range(n, size, number)) for n in range(number)]
            points = []  # all ranks measure, at the same capture: a collective is in order
            for each in (most // _NEAR // number, most // number):
                begins = range(0, number * each, each)
                kernels.whole.plan([Segment(own, each, begin) for own, begin in zip(rows, begins, strict=True)])
                # Of short prefixes a half, so that each is searched; and no more than lists have room for.
                budget = min(config.group_budget(each, len(rows[0])), max(1, each // 2), listed // number // 4 * 4)
                groups = self.packed([(each, budget, begin) for begin in begins])
                self.op.plan_probe(Selecting(kernels.size, rows, groups))
                times = self._ranks.most([measure_us(run, self._device) for run in parts])
                points.append([(number * each, us) for us in times])
            for lines, of in zip(measured, zip(*points, strict=True), strict=True):
                lines[number] = Line.through(*of)
        self._clear(kernels)
        modes = [role.mode for role in self.layer_plan.layers]
        dense, anchors, reuse = (modes.count(mode) for mode in (LayerMode.DENSE, LayerMode.ANCHOR, LayerMode.REUSE))
        attending, selecting, *later = measured
        costs = StepCosts(attending, selecting, dense, anchors, reuse, elsewhere=self.cache_rank is not None)
        if later:
            costs = replace(costs, ahead=later[0], behind=later[1])
        self._costs[block_of(kernels.size)] = costs
        return costs

    @property
    def nbytes(self) -> int:
        """See the base; scratch of the kernels apart."""
        beside = sum(one.nbytes for one in (self.swap, self.cache_rank) if one is not None)
        return self._buffers.nbytes + self._lists.nbytes + self.op.nbytes + self.lse.nbytes + beside
