"""Prefills that select: a few queries of a request behind host memory attend tokens that its index names.

All query tokens of a forward behind one prefix are a group, as the requests of a decode step are: one list for each KV
head, pooled over them, whose tokens are gathered from host memory. Their budget is a request's times the square root of
the queries, at most half of the prefix.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.launching import sent
from prefix_kernels.residents import gather_listed
from prefix_kernels.types import SelectedLists, SelectionGroup, new_lists
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.decode.buffers import head_maps, num_sets
from sglang_ext.decode.select_op import ListSizes, ReferenceOp, Selecting
from sglang_ext.decode.sparse import ROOM, SparseDecode
from sglang_ext.methods.layer_plan import LayerMode
from sglang_ext.offload.directory import Offload
from sglang_ext.offload.host import HostPool
from sglang_ext.prefix.residency import ResidentIndex

logger = logging.getLogger(__name__)

_ROWS, _GROUPS = 2048, 64
"""Of a forward, at most: queries that select, and prefixes that they are behind."""
_LISTED = 1 << 18
"""Tokens that all prefixes' lists have, of each KV head, at most."""
_SCORED = 1 << 22
"""Of a prefix, at most: its tokens times queries behind it, where each query head's scores of all of these are held at
once, as `ReferenceOp` does: 512 MiB of 32 heads, some three times."""
_GATHERED = 4096
"""Tokens that are on the device at once, of one layer."""
SELECTING_BYTES = 768 << 20
"""Of the device, for all that prefills select with: more than any method takes for 64 query heads, 8 KV heads and
contexts of 131,072 tokens on a GPU of 132 multiprocessors (`union` 700 MiB, `token_index` 200)."""


class Behind(NamedTuple):
    """Queries of a forward behind one prefix, of requests that may use its index.

    Attributes:
        offload: the prefix.
        by: its index, ready.
        rows: [num_queries] int64 on the host, ascending.
        budget: tokens of the prefix that they attend, whole pages; `PrefillSelection.fitting` decides.
    """

    offload: Offload
    by: ResidentIndex
    rows: Tensor
    budget: int = 0


@dataclass(frozen=True, eq=False)
class PlannedSelection:
    """Of one forward.

    Attributes:
        groups: what is selected of each prefix, and where it is listed.
        rows: [num_queries] int64 on the device: all queries, one prefix's after another's.
        host_pages: int32 on the device: of each prefix, its pages of the host's pool.
    """

    groups: Sequence[SelectionGroup]
    rows: Tensor
    host_pages: Sequence[Tensor]


class PrefillSelection:
    """Selects for forwards, one after another, on one stream.

    Args:
        sparse: whose method, budgets and layer plan these are; some layer of it selects.
        pool: of host memory.
        num_kv_heads: KV heads.
        max_prefix_len: tokens of a prefix, at most.
        device: of the KV pool.
    """

    def __init__(
        self, sparse: SparseDecode, pool: HostPool, num_kv_heads: int, max_prefix_len: int, device: torch.device
    ) -> None:
        self._sparse, self._pool, self._device, self._num_kv_heads = sparse, pool, device, num_kv_heads
        self._modes = [role.mode for role in sparse.layer_plan.layers]
        self._head_maps = head_maps(sparse.layer_plan, device)
        tokens = min(_GROUPS * max_prefix_len, pool.num_pages * PAGE_TOKENS) + _GROUPS * PAGE_TOKENS
        room = min(tokens, max(ROOM, max_prefix_len + PAGE_TOKENS))
        self._sizes = ListSizes(_GROUPS, _LISTED * num_kv_heads, _ROWS, max_prefix_len, room, 1)
        self._op = sparse.op_for(self._sizes)
        roles, anchors = sparse.layer_plan.layers, sparse.layer_plan.anchor_layers
        lists = [self._new_lists() for _ in range(num_sets(sparse.layer_plan, 1))]
        self._lists = {layer: lists[number % len(lists)] for number, layer in enumerate(anchors)}
        self._list_of = [layer if role.anchor_layer is None else role.anchor_layer for layer, role in enumerate(roles)]
        page = pool.layer(0)
        self._gathered = torch.zeros(_GATHERED // PAGE_TOKENS, *page.shape[1:], dtype=page.dtype, device=device)

    def _new_lists(self) -> SelectedLists:
        counts = (self._sizes.max_groups, self._num_kv_heads)
        return new_lists(self._sizes.list_entries, counts, self._device, with_slots=False)

    def warm(self, num_qo_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Compile what forwards launch, on CUDA; arguments as of `StagedAttention.warm`."""
        if self._device.type != "cuda" or isinstance(self._op, ReferenceOp):
            return
        lists = next(iter(self._lists.values()))
        for rows in (1, 2, 4, 8, 16, 32, _ROWS):
            queries = torch.zeros(rows, num_qo_heads, head_dim, dtype=dtype, device=self._device)
            tokens = min(2 * PAGE_TOKENS * PAGE_TOKENS, self._sizes.max_prefix_len)
            groups = self._sparse.packed([(tokens, tokens // 2, 0)])
            self._op.plan_probe(Selecting(rows, [tuple(range(rows))], groups))
            self._op.run(rows, queries, 1.0, None, None, lists)
            self._op.plan(Selecting(rows), ())
        lists.positions.zero_()
        [group] = self._sparse.packed([(PAGE_TOKENS, PAGE_TOKENS, 0)])
        pages = torch.zeros(1, dtype=torch.int32, device=self._device)
        for head_map in (None, next((one for one in self._head_maps if one is not None), None)):
            gather_listed(self._pool.layer(0), pages, lists.positions, group, 0, self._gathered[:1], head_map=head_map)

    def selects(self, layer: int) -> bool:
        """Whether a layer of such a forward selects, or takes a selection over."""
        return self._modes[layer] is not LayerMode.DENSE

    def _budget(self, behind: Behind) -> int:
        """Tokens for all queries behind a prefix, whole pages; 0 where that is more than half of it, or there are more
        queries than can be scored.
        """
        tokens = behind.offload.prefix_len
        if isinstance(self._op, ReferenceOp) and tokens * len(behind.rows) > _SCORED:
            return 0
        one = self._sparse.budget(tokens, self._sparse.factor_of(behind.by.entry.digest))
        grown = min(math.ceil(one * math.sqrt(len(behind.rows))), tokens // 2)
        return 0 if one > tokens // 2 else -(-grown // PAGE_TOKENS) * PAGE_TOKENS

    def _knows(self, index: ResidentIndex) -> bool:
        try:
            self._op.number_of(index)
        except Exception as error:  # the server lives on, as it does with such a decode step
            logger.error("sparse attention: a prefill cannot select by index %s", index.entry.digest, exc_info=error)
            return False
        return True

    def fitting(self, wanted: Sequence[Behind]) -> list[Behind]:
        """Those that select together, with their budgets; the others attend all. Few queries come before many."""
        chosen = list[Behind]()
        for one in sorted(wanted, key=lambda behind: len(behind.rows)):
            behind = one._replace(budget=self._budget(one))
            if behind.budget and self._fit([*chosen, behind]) and self._knows(behind.by):
                chosen.append(behind)
        return chosen

    def _fit(self, some: Sequence[Behind]) -> bool:
        budgets = [one.budget for one in some]
        few = sum(len(one.rows) for one in some) <= _ROWS and len(some) <= _GROUPS
        return few and sum(budgets) <= _LISTED and self._op.fits([one.offload.prefix_len for one in some], budgets)

    def plan(self, chosen: Sequence[Behind]) -> PlannedSelection:
        """Write the tables of the forward that runs next, without a wait.

        Args:
            chosen: that `fitting` chose.
        """
        groups = self._sparse.packed([(one.offload.prefix_len, one.budget, 0) for one in chosen])
        ends = list(accumulate(len(one.rows) for one in chosen))
        rows = [tuple(range(end - len(one.rows), end)) for one, end in zip(chosen, ends, strict=True)]
        self._op.plan(Selecting(ends[-1], rows, groups), [one.by for one in chosen])
        pages = [sent(one.offload.pages.int(), self._device) for one in chosen]
        return PlannedSelection(groups, sent(torch.cat([one.rows for one in chosen]), self._device), pages)

    def run(self, planned: PlannedSelection, layer: int, q: Tensor, sm_scale: float) -> Iterator[tuple[int, Tensor]]:
        """One layer that selects, or takes a selection over. Nothing waits for the device.

        Args:
            planned: of the running forward.
            layer: its number.
            q: [num_tokens or more, num_qo_heads, head_dim].
            sm_scale: attention scale.

        Yields:
            A group's number, and pages [num_pages, num_kv_heads, PAGE_TOKENS, k_dim + v_dim] of what its queries attend
            of the prefix, to be attended before the next ones are asked for.
        """
        lists, host = self._lists[self._list_of[layer]], self._pool.layer(layer)
        if self._modes[layer] is LayerMode.ANCHOR:
            self._op.run(len(planned.rows), q.index_select(0, planned.rows), sm_scale, None, layer, lists)
        for number, (group, host_pages) in enumerate(zip(planned.groups, planned.host_pages, strict=True)):
            for first in range(0, group.count, _GATHERED):
                pages = self._gathered[: min(_GATHERED, group.count - first) // PAGE_TOKENS]
                head_map = self._head_maps[layer]
                gather_listed(host, host_pages, lists.positions, group, first, pages, head_map=head_map)
                yield number, pages

    @property
    def nbytes(self) -> int:
        """Device memory."""
        each = {id(one): one for one in self._lists.values()}.values()
        lists = sum(one.positions.nbytes + one.counts.nbytes for one in each)
        return self._op.nbytes + self._gathered.nbytes + lists
