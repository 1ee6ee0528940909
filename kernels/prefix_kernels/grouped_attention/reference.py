"""Reference of grouped attention: row by row, with the plan and run of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefix_kernels.grouped_attention.items import Segment, check_rows
from prefix_kernels.types import PagedKV


class ReferenceAttention:
    """What `GroupedAttention` computes, in torch and fp32, on any device: for CPUs and as an oracle. It waits and
    allocates as it likes.

    Args:
        max_batch: requests of a batch, at most.
    """

    def __init__(self, max_batch: int) -> None:
        self.max_batch = max_batch
        self._segments: list[Segment] = []

    def plan(self, *segments: Sequence[Segment]) -> None:
        """As `GroupedAttention.plan`. Raises ValueError for a row out of range or twice in a pass."""
        for of_pass in segments:
            check_rows([row for segment in of_pass for row in segment.rows if segment.length], self.max_batch)
        self._segments = [segment for of_pass in segments for segment in of_pass]

    def run(
        self,
        q: Tensor,
        kv: PagedKV,
        slots: Tensor,
        sm_scale: float,
        out: Tensor,
        lse: Tensor,
        *,
        counts: Tensor | None = None,
        head_map: Tensor | None = None,
        head_slots: Tensor | None = None,
        after_lists: bool = False,  # nothing runs at the same time here
    ) -> None:
        """As `GroupedAttention.run`: out = softmax(sm_scale * q k^T) v over all entries of the row's segments."""
        gqa = q.shape[1] // kv.num_kv_heads
        arenas = (slots, slots if head_slots is None else head_slots)
        out.zero_()
        lse.fill_(-torch.inf)
        for row in range(q.shape[0]):
            for head in range(kv.num_kv_heads):
                listed = self._slots_of(row, head if head_map is None else int(head_map[head]), arenas, counts)
                if listed is None:
                    continue
                part = slice(head * gqa, (head + 1) * gqa)
                scores = sm_scale * kv.k_scale * q[row, part].float() @ kv.k_cache[listed, head].float().T
                lse[row, part] = scores.logsumexp(dim=1)
                values = kv.v_scale * kv.v_cache[listed, head].float()
                out[row, part] = (scores.softmax(dim=1) @ values).to(out.dtype)

    def _slots_of(self, row: int, head: int, arenas: tuple[Tensor, Tensor], counts: Tensor | None) -> Tensor | None:
        parts = []
        for segment in (one for one in self._segments if row in one.rows):
            length = segment.length
            if segment.list_id >= 0:
                if counts is None:
                    raise ValueError("expected counts of the lists that segments name, got none; hand in counts")
                length = min(length, int(counts[segment.list_id, head]))
            begin = segment.list_begin + head * segment.head_stride
            parts.append(arenas[segment.head_stride > 0][begin : begin + length])
        found = torch.cat(parts).long() if parts else None
        return found if found is not None and len(found) else None
