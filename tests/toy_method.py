"""A method in one file: every n-th page of a prefix. For tests of how methods are added.

METHODS["every_nth"] = Method(EveryNthSpec, EveryNthBuilder, EveryNthSelector, "tests.toy_method:EveryNthOp")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from prefix_index import PAGE_TOKENS
from prefix_kernels.launching import send
from prefix_kernels.types import Selection
from sglang_ext.decode.select_op import ListSizes, ReferenceOp
from sglang_ext.methods.arrays import Form
from sglang_ext.methods.base import IndexBuilder, IndexSpec, SelectArgs


@dataclass(frozen=True)
class EveryNthSpec(IndexSpec):
    method: ClassVar[str] = "every_nth"

    def forms(self, size: Any) -> dict[str, Form]:
        return {"first": Form("int32", (1,), 0, PAGE_TOKENS - 1)}


class EveryNthBuilder(IndexBuilder[EveryNthSpec]):
    def build_layer(self, keys: torch.Tensor, queries: Any, prepared: Any = None) -> dict[str, torch.Tensor]:
        return {"first": torch.zeros(keys.shape[1], 1, dtype=torch.int32, device=keys.device)}


@dataclass
class EveryNthSelector:
    spec: EveryNthSpec

    def select(self, arrays: Any, q: torch.Tensor, args: SelectArgs) -> Selection:
        heads = len(arrays["first"])
        return Selection(positions_of(args.prefix_len, args.budget).to(q.device).expand(heads, -1).contiguous(),
                         torch.full((heads,), args.budget, dtype=torch.int32, device=q.device))  # fmt: skip


def positions_of(prefix_len: int, budget: int) -> torch.Tensor:
    """The first tokens of as many evenly spaced pages as the budget fills."""
    pages = -(-prefix_len // PAGE_TOKENS)
    each = max(1, pages * PAGE_TOKENS // budget)
    order = sorted(range(prefix_len), key=lambda token: ((token // PAGE_TOKENS) % each, token))
    return torch.tensor(sorted(order[:budget]), dtype=torch.int32)


class EveryNthOp(ReferenceOp):
    """Lists are written by `plan`; a captured `run` copies them, and looks the slots up in the arena."""

    def __init__(self, layer: Any, config: Any, spec: EveryNthSpec, num_layers: int, sizes: ListSizes, device: Any):
        super().__init__(EveryNthSelector(spec), None)  # type: ignore[arg-type]
        self.counts = torch.zeros(sizes.max_groups, layer.num_kv_heads, dtype=torch.int32, device=device)
        self.positions, self.at = torch.zeros(2, sizes.list_entries, dtype=torch.int32, device=device)
        self.buffers = (self.counts, self.positions, self.at)

    def plan(self, size: int, rows: Any, groups: Any, indexes: Any) -> None:
        counts, positions, at = (torch.zeros(own.shape, dtype=own.dtype) for own in self.buffers)
        for number, group in enumerate(groups):
            chosen = positions_of(group.prefix_len, group.budget)
            counts[number] = group.budget
            group.lists_in(positions, counts.shape[1])[:] = chosen
            group.lists_in(at, counts.shape[1])[:] = chosen + group.slot_start
        for table, own in zip((counts, positions, at), self.buffers, strict=True):
            send(table, own)

    def plan_probe(self, size: int, rows: Any, groups: Any) -> None:
        self.plan(size, (), groups, ())

    def run(
        self, size: int, q: torch.Tensor, sm_scale: float, slot_table: torch.Tensor, layer: Any, lists: Any
    ) -> None:
        lists.counts.copy_(self.counts)
        lists.positions.copy_(self.positions)
        lists.slots.copy_(slot_table[self.at.long()])
