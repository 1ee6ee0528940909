"""Where the selections of anchor layers lie in the buffers that captured kernels read."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import Segment
from prefix_kernels.top_k_selection.lists import SelectedLists
from sglang_ext.attention.step_buffers import StepBuffers
from sglang_ext.indexing.layer_plan import LayerPlan


class AnchorLists:
    """Lists of one anchor layer after the other, or of each of them a set of its own.

    A segment of a group names its list in the first set. A layer reads another set by its head map: list and count of a
    KV head are found by (begin of the list) + head * width and (row of the counts) * num_kv_heads + head, so a map that
    adds groups * num_kv_heads to each head for each set reaches the next set's lists. Rows of counts of requests' own
    lists lie between those of two sets: by so many rows the counts that are handed over begin later.

    Attributes:
        shape: (max_groups, num_kv_heads, max_budget) of each set.
        head_maps: per layer, int32 [num_kv_heads] for attention of what it or its anchor layer selected; None: its own
            heads, of the first set.

    Args:
        layer_plan: role of each layer.
        buffers: whose arena begins with the sets' slots, and whose counts have as many copies.
        shape: see above.
        device: of the KV pool.
    """

    def __init__(
        self, layer_plan: LayerPlan, buffers: StepBuffers, shape: tuple[int, int, int], device: torch.device
    ) -> None:
        groups, heads, width = self.shape = shape
        self._buffers = buffers
        listed = groups * heads * width
        # Attention reads slots; positions are read by nobody but a trace, at once.
        positions = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._sets = [
            SelectedLists(
                positions,
                buffers.counts_of(number)[buffers.max_batch :],
                buffers.arena[number * listed :][:listed].view(shape),
            )
            for number in range(buffers.num_sets)
        ]
        own_sets = buffers.num_sets > 1
        number_of = {layer: number if own_sets else 0 for number, layer in enumerate(layer_plan.anchor_layers)}
        self._set_of: list[int] = []
        self.head_maps: list[Tensor | None] = []
        for layer, role in enumerate(layer_plan.layers):
            number = number_of.get(layer if role.anchor_layer is None else role.anchor_layer, 0)
            heads_read = range(heads) if role.anchor_layer is None else role.head_map
            own = role.anchor_layer is None and number == 0
            mapped = [number * groups * heads + head for head in heads_read]
            self.head_maps.append(None if own else torch.tensor(mapped, dtype=torch.int32, device=device))
            self._set_of.append(number)

    @property
    def first(self) -> SelectedLists:
        """The first set."""
        return self._sets[0]

    def of(self, layer: int) -> SelectedLists:
        """That a layer writes, or reads."""
        return self._sets[self._set_of[layer]]

    def counts(self, layer: int) -> Tensor:
        """int32 [num_lists, num_kv_heads], as attention of a layer takes it together with its head map."""
        return self._buffers.counts[self._set_of[layer] * self._buffers.max_batch :]

    def segment(self, number: int, rows: tuple[int, ...], budget: int) -> Segment:
        """Of a group and its selection, in the first set."""
        _, heads, width = self.shape
        first = number * heads * width
        return Segment(rows, budget, list_begin=first, head_stride=width, list_id=self._buffers.max_batch + number)
