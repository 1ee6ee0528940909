"""A method in one file: pages of a prefix, every fourth one first. For tests of how methods are added.

METHODS["every_nth"] = Method(EveryNthSpec, EveryNthBuilder, EveryNthSelector, "tests.toy_method:EveryNthOp")
"""

from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from prefix_index import PAGE_TOKENS
from sglang_ext.decode.select_op import OpContext, ReferenceOp, Selecting
from sglang_ext.methods.arrays import Form
from sglang_ext.methods.base import IndexBuilder, IndexSpec, Selector


class EveryNthSpec(IndexSpec):
    method: ClassVar[str] = "every_nth"

    def forms(self, size: Any) -> dict[str, Form]:
        return {"first": Form("int32", (1,), 0, PAGE_TOKENS - 1)}


class EveryNthBuilder(IndexBuilder[EveryNthSpec]):
    def build_layer(self, keys: torch.Tensor, queries: Any) -> dict[str, torch.Tensor]:
        return {"first": torch.zeros(keys.shape[1], 1, dtype=torch.int32, device=keys.device)}


class EveryNthSelector(Selector[EveryNthSpec]):
    def token_scores(self, arrays: Any, q: torch.Tensor, args: Any, candidates: Any = None) -> torch.Tensor:
        page = torch.arange(args.prefix_len, device=q.device) // PAGE_TOKENS
        return (page % 4 == 0).float().expand(len(arrays["first"]), -1)


class EveryNthOp(ReferenceOp):
    """Lists are written by `plan`, for any index and any queries alike; a captured `run` copies them."""

    def __init__(self, spec: EveryNthSpec, context: OpContext) -> None:
        super().__init__(EveryNthSelector(spec), context.config.pooling)
        shape, sizes, on = context.shape, context.sizes, {"dtype": torch.int32, "device": context.device}
        self.counts = torch.zeros(sizes.max_groups, shape.num_kv_heads, **on)
        self.positions, self.at = torch.zeros(2, sizes.list_entries, **on)
        self.index: Any = SimpleNamespace(layers=[{"first": self.counts.T}])

    def plan(self, step: Selecting, indexes: Any = ()) -> None:
        self.counts.zero_()
        for number, group in enumerate(step.groups):
            found = self.select(self.counts, group, self.index, 0, 1.0, self.counts.shape[1])
            self.counts[number] = found.counts
            group.lists_in(self.positions, self.counts.shape[1])[:] = found.positions
            group.lists_in(self.at, self.counts.shape[1])[:] = found.positions + group.slot_start

    plan_probe = plan

    def run(self, size: int, q: Any, sm_scale: float, slot_table: torch.Tensor, layer: Any, lists: Any) -> None:
        lists.counts.copy_(self.counts)
        lists.positions.copy_(self.positions)
        lists.slots.copy_(slot_table[self.at.long()])
