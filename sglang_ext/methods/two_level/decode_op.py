"""`SelectOp` of two levels: the first method's lists are the second one's candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.top_k_selection.plan import SelectionGroup, list_stride, pack_lists
from prefix_kernels.types import CandidateForm, SelectedLists, new_lists
from sglang_ext.decode.select_op import ListSizes, graph_op
from sglang_ext.decode.types import Index
from sglang_ext.methods.combined_op import CombinedOp
from sglang_ext.methods.token_index import TokenIndexSpec
from sglang_ext.methods.token_index.decode_op import TokenIndexOp
from sglang_ext.methods.two_level import TwoLevelSpec
from sglang_ext.options import SparseAttnConfig


class TwoLevelOp(CombinedOp):
    """Selects candidates as the first method does, then among them by a token index.

    Args:
        shape, config, spec, num_layers, sizes, device: see `decode.select_op.op_maker`.

    Raises:
        ValueError: the second method is another one, or the first has no operation for decode graphs.
    """

    def __init__(
        self,
        shape: AttentionShape,
        config: SparseAttnConfig,
        spec: TwoLevelSpec,
        num_layers: int,
        sizes: ListSizes,
        device: torch.device,
    ) -> None:
        if not isinstance(spec.second, TokenIndexSpec):
            raise ValueError(
                f"expected token_index as two_level.second in decode graphs, got {spec.second.method}; name it"
            )
        self._spec, self._heads = spec, shape.num_kv_heads
        # Of each prefix no more candidates than tokens.
        entries = self._heads * (sizes.room + sizes.max_groups * list_stride(1))
        of_first = replace(sizes, list_entries=entries)
        self._first = graph_op(shape, config, spec.first, num_layers, of_first, device)
        self._second = TokenIndexOp(shape, config, spec.second, num_layers, sizes, device, CandidateForm.LISTED)
        self._lists = new_lists(entries, (sizes.max_groups, self._heads), device, with_slots=False)
        self._second.candidates = self._lists.positions
        super().__init__(self._first, self._second)

    def plan(
        self, size: int, rows: Sequence[tuple[int, ...]], groups: Sequence[SelectionGroup], indexes: Sequence[Index]
    ) -> None:
        first, second = self._levels(groups)
        parts = [self.parts(index) for index in indexes]
        self._first.plan(size, rows, first, [one for one, _ in parts])
        self._second.plan(size, rows, second, [one for _, one in parts], listed=first)

    def plan_probe(self, size: int, rows: Sequence[tuple[int, ...]], groups: Sequence[SelectionGroup]) -> None:
        first, second = self._levels(groups)
        self._first.plan_probe(size, rows, first)
        self._second.plan_probe(size, rows, second, listed=first, lengths=[group.prefix_len for group in groups])

    def _levels(self, groups: Sequence[SelectionGroup]) -> tuple[list[SelectionGroup], list[SelectionGroup]]:
        """What each level selects. Windows are candidates, and so as many at either end of their list."""
        counts = [self._spec.num_candidates(group.prefix_len, group.budget) for group in groups]
        first = [replace(group, budget=count) for group, count in zip(groups, counts, strict=True)]
        second = [replace(group, prefix_len=count) for group, count in zip(groups, counts, strict=True)]
        return pack_lists(first, self._heads), second

    def run(
        self,
        size: int,
        q: Tensor,
        sm_scale: float,
        slot_table: Tensor | None,
        layer: int | None,
        lists: SelectedLists,
    ) -> None:
        self._first.run(size, q, sm_scale, None, layer, self._lists)
        self._second.run(size, q, sm_scale, slot_table, layer, lists)

    @property
    def nbytes(self) -> int:
        own = self._lists.positions.nbytes + self._lists.counts.nbytes
        return self._first.nbytes + self._second.nbytes + own
