"""`SelectOp` of the union: both methods score, and a token comes at the smaller one of its depths."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from prefix_kernels.types import SelectedLists
from prefix_kernels.union_selection import UnionSelection
from sglang_ext.decode.select_op import OpContext, ScoringOp, Selecting, graph_op
from sglang_ext.decode.types import Index
from sglang_ext.methods.combined_op import CombinedOp
from sglang_ext.methods.union import UnionSpec


class UnionOp(CombinedOp):
    """Selects by two methods whose operations can score.

    Raises:
        ValueError: a method has no such operation for decode graphs.
    """

    ends_in_lists = True

    def __init__(self, spec: UnionSpec, context: OpContext) -> None:
        made = []
        for name, part in spec.nested.items():
            op = graph_op(part, context)
            if not isinstance(op, ScoringOp):
                raise ValueError(
                    f"expected union.{name} in decode graphs as a method that scores, got {part.method}; name "
                    "csattention, ab_sparse or token_index"
                )
            made.append(op)
        self._first, self._second = made
        super().__init__(*made)
        sizes = context.sizes
        self._groups_of_a_row = sizes.groups_of_a_row
        self._selection = UnionSelection(context.shape.num_kv_heads, sizes.max_groups, sizes.room, context.device)

    def plan(self, step: Selecting, indexes: Sequence[Index]) -> None:
        of_first, of_second = self.parts(indexes)
        self._first.plan(step, of_first)
        self._second.plan(step, of_second)
        self._merge(step)

    def plan_probe(self, step: Selecting) -> None:
        self._first.plan_probe(step)
        self._second.plan_probe(step)
        self._merge(step)

    def _merge(self, step: Selecting) -> None:
        self._selection.plan(step.groups, self._first.stretches(step.size), self._second.stretches(step.size))

    def run(
        self,
        size: int,
        q: Tensor,
        sm_scale: float,
        slot_table: Tensor | None,
        layer: int | None,
        lists: SelectedLists,
    ) -> None:
        first = self._first.score(size, q, sm_scale, layer)
        second = self._second.score(size, q, sm_scale, layer)
        groups = size * self._groups_of_a_row
        self._selection.run(first, second, lists, slot_table=slot_table, num_groups=groups)

    @property
    def nbytes(self) -> int:
        return self._first.nbytes + self._second.nbytes + self._selection.nbytes
