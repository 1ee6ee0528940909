"""What `offload.py swap` and `offload.py prefill` measure.

`swap`: residents of one layer, whose steps replace a given share of the tokens. KV of the prefixes lies in pinned host
memory, one behind the other, as serving has it. Each KV head of each group wants as many tokens as its budget says, and
the residents have a multiple of that many cells. From one step to the next a share of these tokens, the churn, gives
way to others, in turns so long that all of the turn before have left their cells. The gate looks at a replay that
follows another: the residents count what sets say, and each slot of the last step's lists holds the very bytes that the
host has for its position.

`prefill`: exact attention of requests' suffixes behind one prefix in host memory. All layers of a forward one after
another, without the rest of a model: what is left of the link's time would be hidden by that, or not. Host pages of the
prefix lie side by side, as they are given out. Queries are large, so that a few keys have most of the weight: a piece
that is missing is seen. The gate looks at the layers' outputs, beside attention in fp32 over a gathered copy of the
prefix and the suffix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_problem import Gate
from torch import Tensor

from prefix_kernels import PagedKV
from prefix_kernels.prefill_attention import Reference, Span
from prefix_kernels.residents import PAGE_TOKENS, ResidentGroup, Residents, ResidentShape, from_pages
from prefix_kernels.top_k_selection.plan import SelectionGroup, pack_lists
from prefix_kernels.types import SelectedLists, new_lists
from sglang_ext.offload.attention import StagedAttention
from sglang_ext.offload.directory import Offload

LINK_RATE = 51e9
"""Bytes a second that a kernel reads of pinned memory, in pieces of 16 KiB (PCIe 5.0 x16)."""


@dataclass(frozen=True)
class SwapSizes:
    """One row's sizes.

    Attributes:
        context: tokens of a prefix.
        groups: prefixes.
        budget: tokens of a list.
        churn: share of the wanted tokens that the step before did not want.
        room: cells of the residents for each token that a step wants.
        heads, dim: KV heads and their width.
        dtype: of the KV.
        steps: in one graph.
    """

    context: int
    groups: int
    budget: int
    churn: float
    room: float
    heads: int
    dim: int
    dtype: torch.dtype
    steps: int

    @property
    def fresh(self) -> int:
        """Of a list's tokens so many are new."""
        return round(self.churn * self.budget)

    @property
    def cells(self) -> int:
        """Of the residents."""
        return self.groups * round(self.budget * self.room)

    @property
    def nbytes(self) -> int:
        """That a step moves."""
        return self.groups * self.heads * self.fresh * 2 * self.dim * self.dtype.itemsize


def pinned(pages: int, heads: int, dim: int, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """A layer of prefixes of any values in pinned memory: [pages, heads, PAGE_TOKENS, 2 * dim]."""
    on_gpu = gen.device.type == "cuda"
    kv = torch.empty(pages, heads, PAGE_TOKENS, 2 * dim, dtype=dtype, pin_memory=on_gpu)
    for part in kv.split(1 << 12):
        part.copy_(torch.randn(part.shape, generator=gen, device=gen.device).to(dtype))
    return kv


class Host:
    """Prefixes of a layer; made once for all rows of the same sizes."""

    def __init__(self, sizes: SwapSizes, device: torch.device, seed: int) -> None:
        pages = sizes.groups * sizes.context // PAGE_TOKENS
        gen = torch.Generator(device).manual_seed(seed)
        self.kv = pinned(pages, sizes.heads, sizes.dim, sizes.dtype, gen)
        self.tables = torch.arange(pages, dtype=torch.int32, device=device)


class Swap:
    """A case: `steps` runs of a set, each with lists of its own.

    Args:
        sizes: see there.
        part: "exact": the run of a layer that selects, all that its attention waits for; "reuse": the copy alone, of a
            layer that reuses its selection.
        host: the prefixes.
        device: of the residents.
        seed: of the lists.
    """

    def __init__(self, sizes: SwapSizes, part: str, host: Host, device: torch.device, seed: int) -> None:
        self.sizes, self._host, self._device, self._part = sizes, host, device, part
        cells = sizes.cells
        pages = len(host.tables)
        self._shape = ResidentShape(1, sizes.heads, cells, pages, PAGE_TOKENS)
        pool = torch.empty(PAGE_TOKENS + cells, sizes.heads, sizes.dim, dtype=sizes.dtype, device=device)
        self.pool = PagedKV(pool, torch.empty_like(pool))
        packed = pack_lists([SelectionGroup(sizes.context, sizes.budget)] * sizes.groups, sizes.heads)
        self._groups = [ResidentGroup(n, group, n * sizes.context // PAGE_TOKENS) for n, group in enumerate(packed)]
        self._entries = self._groups[-1].group.lists_end(sizes.heads)
        self._lists = _lists(sizes, self._groups, self._entries, device, seed)
        self.residents = Residents(self._shape, sizes.groups, self._entries, device, implementation="triton")
        self.residents.plan(self._groups)
        self.config = {"cells": cells, "part": part}
        self.layers, self.nbytes = sizes.steps, sizes.nbytes

    def run(self) -> None:
        """All steps."""
        for lists in self._lists:
            if self._part == "reuse":
                self.residents.fetch(0, self._host.kv, self.pool)
            else:
                self._select(lists)

    def _select(self, lists: SelectedLists) -> None:
        self.residents.run(0, self._host.tables, lists, self._host.kv, self.pool)

    def poison(self) -> None:
        """Residents hold nothing, and what they hold is NaN; then each step has been once."""
        state = self.residents.state
        for tensor, value in ((state.row_of_cell, -1), (state.cell_of_row, -1), (state.counters, 0)):
            tensor.fill_(value)
        self._forget()
        for lists in self._lists:
            self._select(lists)
        if self._part == "reuse":
            self._forget()
        self._before = self.residents.counters[0].tolist()

    def _forget(self) -> None:
        for cache in (self.pool.k_cache, self.pool.v_cache):
            cache.fill_(torch.nan)

    def check(self) -> Gate:
        """Counts, and bytes, behind a run."""
        sizes = self.sizes
        self.residents.state.check_integrity()
        found = [now - before for now, before in zip(self.residents.counters[0].tolist(), self._before, strict=True)]
        each = sizes.steps * sizes.groups * sizes.heads
        expected = [0, 0] if self._part == "reuse" else [each * sizes.budget, each * sizes.fresh]
        figures = {
            "wrong_counts": float(sum(one != other for one, other in zip(found, expected, strict=True))),
            "wrong_rows": float(self._check_bytes()),
        }
        return Gate(0.0 if not any(figures.values()) else torch.inf, figures)

    def _check_bytes(self) -> int:
        """Listed rows of the last step that differ from the host's; of a copy alone those of what was copied."""
        state, wrong = self.residents.state, 0
        if self._part == "reuse":
            for head in range(self.sizes.heads):
                count = int(state.num_fetched[0, head])
                rows, cells = (one[0, head, :count].long() for one in (state.fetched_rows, state.fetched_cells))
                wrong += self._differing(head, rows, PAGE_TOKENS + cells)
            return wrong
        lists = self._lists[-1]
        for one in self._groups:
            positions, slots = (one.group.lists_in(arena, self.sizes.heads) for arena in (lists.positions, lists.slots))
            for head, (of_head, at) in enumerate(zip(positions.long(), slots.long(), strict=True)):
                page = self._host.tables[one.table_begin + of_head // PAGE_TOKENS].long()
                wrong += self._differing(head, page * PAGE_TOKENS + of_head % PAGE_TOKENS, at)
        return wrong

    def _differing(self, head: int, rows: Tensor, slots: Tensor) -> int:
        rows = rows.cpu()
        held = torch.cat([cache[slots, head] for cache in (self.pool.k_cache, self.pool.v_cache)], dim=1)
        there = self._host.kv[rows // PAGE_TOKENS, head, rows % PAGE_TOKENS].to(self._device)
        return int((held != there).any(dim=1).sum())


def _lists(
    sizes: SwapSizes, groups: list[ResidentGroup], entries: int, device: torch.device, seed: int
) -> list[SelectedLists]:
    """Of each step: tokens that all steps want, and others in turns, as many turns as the prefix has tokens for."""
    gen = torch.Generator().manual_seed(seed)
    fixed, fresh, tokens = sizes.budget - sizes.fresh, sizes.fresh, sizes.context
    turns = min(sizes.steps, (tokens - fixed) // fresh) if fresh else 1
    if fresh and (turns < 2 or sizes.steps % turns):
        turns = max((n for n in range(2, turns + 1) if sizes.steps % n == 0), default=0)
    if not turns:
        raise ValueError(f"expected tokens for two turns of {fresh} and {fixed} others, got {tokens}; lower the budget")
    if fresh and fixed + (turns - 1) * fresh < sizes.budget * sizes.room:
        raise ValueError(f"expected turns that fill {sizes.room} cells a token, got {turns} of {fresh}; more --steps")
    found = [
        new_lists(entries, (sizes.groups, sizes.heads), torch.device("cpu"), with_slots=True)
        for _ in range(sizes.steps)
    ]
    for one in groups:
        for head in range(sizes.heads):
            order = torch.randperm(tokens, generator=gen)
            for step, lists in enumerate(found):
                begin = fixed + step % turns * fresh
                wanted = torch.cat([order[:fixed], order[begin : begin + fresh]]).sort().values.int()
                one.group.lists_in(lists.positions, sizes.heads)[head] = wanted
                lists.counts[one.number, head] = len(wanted)
    return [
        SelectedLists(lists.positions.to(device), lists.counts.to(device), lists.slots.to(device)) for lists in found
    ]


#: Of a query's channels: a score's spread is this.
SPREAD = 4.0
#: Of the error's norm beside the output's.
ALLOWED = {torch.bfloat16: 0.01, torch.float16: 0.005, torch.float32: 1e-5}


@dataclass(frozen=True)
class PrefillSizes:
    """One row's sizes.

    Attributes:
        context: tokens of the prefix.
        suffix: new tokens of a request.
        requests: behind it.
        staging: tokens of a piece.
        layers: of the forward.
        qo_heads, heads, dim: query heads, KV heads and their width.
        dtype: of queries and KV.
    """

    context: int
    suffix: int
    requests: int
    staging: int
    layers: int
    qo_heads: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """K and V of the prefix in all layers."""
        return 2 * self.layers * self.context * self.heads * self.dim * self.dtype.itemsize


class PinnedLayers:
    """A prefix in pinned memory, as a `HostPool` has it: only `layer` is asked for."""

    def __init__(self, sizes: PrefillSizes, device: torch.device, seed: int) -> None:
        gen = torch.Generator(device).manual_seed(seed)
        layer = (sizes.context // PAGE_TOKENS, sizes.heads, sizes.dim, sizes.dtype, gen)
        self.kv = [pinned(*layer) for _ in range(sizes.layers)]

    def layer(self, layer: int) -> Tensor:
        """See `HostPool.layer`."""
        return self.kv[layer]


class Prefill:
    """A case.

    Args:
        sizes: see there.
        host: the prefix, of as many tokens.
        device: of the suffixes.
        seed: of them.
        implementation: of `StagedAttention`.
    """

    def __init__(
        self, sizes: PrefillSizes, host: PinnedLayers, device: torch.device, seed: int, implementation: str | None
    ) -> None:
        self.sizes, self._host, self._device = sizes, host, device
        gen = torch.Generator(device).manual_seed(seed)
        new = sizes.requests * sizes.suffix

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, device=device)

        pool = (2, PAGE_TOKENS + new, sizes.heads, sizes.dim)
        self._pools = [drawn(*pool).to(sizes.dtype) for _ in range(sizes.layers)]
        self._q = [(SPREAD * drawn(new, sizes.qo_heads, sizes.dim)).to(sizes.dtype) for _ in range(sizes.layers)]
        slots = (torch.randperm(new, generator=torch.Generator().manual_seed(seed)) + PAGE_TOKENS).to(device)
        self._spans = [
            Span(slice(at, at + sizes.suffix), slots[at : at + sizes.suffix]) for at in range(0, new, sizes.suffix)
        ]
        self._front = Offload("", sizes.context, torch.arange(sizes.context // PAGE_TOKENS))
        self._attention = StagedAttention(
            host,  # type: ignore[arg-type]
            sizes.staging,
            sizes.layers,
            device,
            implementation=implementation,
        )
        self._found: list[Tensor] = []
        self.layers, self.nbytes, self.config = 1, sizes.nbytes, dict[str, int]()  # a time is that of all layers

    def _kv(self, layer: int) -> PagedKV:
        return PagedKV(*self._pools[layer])

    def run(self) -> None:
        """A forward's plan, and all layers."""
        rows = torch.arange(self.sizes.requests * self.sizes.suffix)
        step = self._attention.plan(self._spans, [(self._front, rows)])
        scale = self.sizes.dim**-0.5
        self._found = [
            self._attention.run(step, self._q[layer], self._kv(layer), layer, scale)
            for layer in range(self.sizes.layers)
        ]

    def poison(self) -> None:
        """What places hold, and what nobody may read."""
        self._attention.places.fill_(torch.nan)
        for pool in self._pools:
            pool[:, :PAGE_TOKENS] = torch.nan

    def check(self) -> Gate:
        """The last run's outputs."""
        sizes, worst = self.sizes, 0.0
        for layer, found in enumerate(self._found):
            caches = [torch.cat([own.new_empty(sizes.context, *own.shape[1:]), own]) for own in self._pools[layer]]
            keys, values = (cache[: sizes.context] for cache in caches)
            from_pages(self._host.layer(layer).to(self._device), keys, values)
            before = torch.arange(sizes.context, device=self._device)
            spans = [Span(rows, torch.cat([before, sizes.context + slots])) for rows, slots in self._spans]
            oracle = Reference(spans, [], self._device)
            expected = oracle.own(self._q[layer], PagedKV(*caches), sizes.dim**-0.5).out
            error = (found.float() - expected).norm() / expected.norm()
            worst = max(worst, float(error.nan_to_num(torch.inf)))
        return Gate(worst / ALLOWED[sizes.dtype], {"error": worst})
