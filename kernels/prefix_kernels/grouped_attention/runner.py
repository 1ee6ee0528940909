"""Decode attention of a batch over lists of slots: planned on the host, then run without a wait or an allocation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prefix_kernels.grouped_attention.config import (
    AttentionConfig,
    AttentionShape,
    has_specialized,
    specialized_at_once,
)
from prefix_kernels.grouped_attention.items import DIRECT, ITEM_FIELDS, SPAN_FIELDS, Segment, cut
from prefix_kernels.grouped_attention.kernels import attend_items_kernel, merge_items_kernel
from prefix_kernels.launching import block_of, launch, launch_behind, programs_at_once, send
from prefix_kernels.types import PagedKV, check_arena, check_int32

_MERGED_AT_ONCE = 64
"""Parts of a row, at most."""
_MERGED_NUMBERS = 64 * 128
"""Values of these parts, at most: what the registers hold."""
_LEAST_BLOCK = 16
"""Of a tensor core's operand."""


class _Pass:
    """Segments of one kind, as groups or single requests: at most one segment of a batch row.

    Args:
        config: tile and schedule.
        max_batch: requests of a batch, at most.
        target: items that fill the GPU once.
    """

    def __init__(self, config: AttentionConfig, max_batch: int, target: int) -> None:
        self.config = config
        self.target = target
        self.max_items = target + max_batch

    def partial_rows(self, num_kv_heads: int) -> int:
        """Partial rows that its items may write."""
        return self.max_items * num_kv_heads * self.config.block_m


class _Launch:
    """One launch of an attention kernel: the items of its passes, in fixed device buffers."""

    def __init__(self, passes: Sequence[int], all_passes: Sequence[_Pass], max_batch: int, device: torch.device):
        self.passes = passes
        self.config = all_passes[passes[0]].config
        self.target = all_passes[passes[0]].target
        self.max_items = sum(all_passes[number].max_items for number in passes)
        self.items = torch.zeros(self.max_items, ITEM_FIELDS, dtype=torch.int32, device=device)
        self.rows = torch.zeros(len(passes) * max_batch, dtype=torch.int32, device=device)
        self.num_items = torch.zeros(2, dtype=torch.int32, device=device)

    @property
    def programs(self) -> int:
        """Programs per KV head: one an item, or, where each takes item after item, what fills the GPU."""
        return self.target if self.config.specialized else self.max_items


def _joined(passes: Sequence[AttentionConfig]) -> list[list[int]]:
    """Numbers of the passes by launch: neighbours of one specialized configuration together, others alone."""
    found: list[list[int]] = []
    for number, config in enumerate(passes):
        if found and config.specialized and config == passes[found[-1][0]]:
            found[-1].append(number)
        else:
            found.append([number])
    return found


class GroupedAttention:
    """Attention of a batch: every request over its group's list, over its own list, or over both, merged.

    The device buffers are made once: `run()` can be captured in a CUDA graph and replayed after another `plan()`.

    Args:
        shape: of the layers.
        max_batch: requests of a batch, at most.
        passes: configurations. Segments of the first element of `plan(...)` run with the first one, and so on.
            Several passes serve tiles of different height, as a group's and a single request's.
        device: where everything lies.
        num_programs: thread blocks that fill the device, per pass; None asks the device.
        scratch_of: another object of the same shape whose runs and these follow each other on one stream: its scratch
            serves both, where it is large enough.

    Raises:
        ValueError: no pass, a batch of no request, or a specialized configuration that does not fit the
            shape or the device.
    """

    def __init__(
        self,
        shape: AttentionShape,
        max_batch: int,
        passes: Sequence[AttentionConfig],
        device: torch.device,
        *,
        num_programs: int | None = None,
        scratch_of: GroupedAttention | None = None,
    ) -> None:
        if not passes or max_batch < 1:
            raise ValueError(f"expected one pass or more and max_batch >= 1, got {len(passes)} and {max_batch}")
        for config in passes:
            if config.specialized:
                _check_fits(config, shape, device, num_programs)
        self.shape = shape
        self.max_batch = max_batch
        self.passes = [
            _Pass(
                config,
                max_batch,
                max(1, (num_programs or programs_at_once(device, config.programs_per_sm)) // shape.num_kv_heads),
            )
            for config in passes
        ]
        self._launches = [_Launch(same, self.passes, max_batch, device) for same in _joined(passes)]
        self._merges_itself = len(self._launches) == 1 and passes[0].specialized
        self._arrived = torch.zeros(shape.num_kv_heads, dtype=torch.int64, device=device)
        num_rows = sum(one.partial_rows(shape.num_kv_heads) for one in self.passes)
        self._make_workspace(num_rows, device, scratch_of)
        self._spans = torch.zeros(max_batch, len(passes), SPAN_FIELDS, dtype=torch.int32, device=device)
        self._own_heads = torch.arange(shape.num_kv_heads, dtype=torch.int32, device=device)
        self._no_counts = torch.zeros(1, shape.num_kv_heads, dtype=torch.int32, device=device)
        self._most_rows = self._most_lists = 0

    def _make_workspace(self, num_rows: int, device: torch.device, shared: GroupedAttention | None) -> None:
        if shared is not None and shared.shape == self.shape and shared._partial_lse.shape[0] >= num_rows:
            self._partial_out: Tensor = shared._partial_out
            self._partial_lse: Tensor = shared._partial_lse
            return
        self._partial_out = torch.empty(num_rows, self.shape.v_head_dim, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(num_rows, dtype=torch.float32, device=device)

    @property
    def workspace_bytes(self) -> int:
        """Device memory of the parts' states."""
        return self._partial_out.nbytes + self._partial_lse.nbytes

    def plan(self, *segments: Sequence[Segment]) -> None:
        """Write the tables of the next runs. Copies to the device, without a wait, on the stream of the runs.

        Args:
            *segments: per pass. A batch row stands in at most one segment of a pass, and is a row of `run`'s q.

        Raises:
            ValueError: more passes than there are, or a row out of range or twice in a pass. The plan before stays in
                force.
        """
        if len(segments) > len(self.passes):
            raise ValueError(f"expected segments of at most {len(self.passes)} passes, got {len(segments)}")
        attended = Counter(row for of_pass in segments for s in of_pass if s.length for row in s.rows)
        alone = {row for row, times in attended.items() if times == 1}
        spans = torch.zeros(self._spans.shape, dtype=torch.int32)
        tables: list[tuple[Tensor, Tensor]] = [(spans, self._spans)]
        first_partial = 0
        most_rows = max((row + 1 for row in attended), default=0)
        for one in self._launches:
            rows: list[int] = []
            listed: list[tuple[int, ...]] = []
            for number in one.passes:
                items = cut(
                    segments[number] if number < len(segments) else (),
                    gqa=self.shape.gqa,
                    num_kv_heads=self.shape.num_kv_heads,
                    block_m=one.config.block_m,
                    block_n=one.config.block_n,
                    target=one.target,
                    first_partial=first_partial,
                    first_row=len(rows),
                    alone=alone,
                )
                self._check(items.rows, number)
                assert len(items.items) <= self.passes[number].max_items
                if items.spans:
                    at = torch.tensor(items.spans, dtype=torch.int32)
                    spans[at[:, 0].long(), number] = at[:, 1:]
                rows += items.rows
                listed += items.items
                first_partial += self.passes[number].partial_rows(self.shape.num_kv_heads)
            table = torch.zeros(one.items.shape, dtype=torch.int32)
            if listed:
                table[: len(listed)] = torch.tensor(listed, dtype=torch.int32)
            tables += [
                (table, one.items),
                (torch.tensor(rows, dtype=torch.int32), one.rows),
                (torch.tensor([len(listed), any(x[-1] != DIRECT for x in listed)], dtype=torch.int32), one.num_items),
            ]
        for table, buffer in tables:
            send(table, buffer)
        self._most_rows = most_rows
        self._most_lists = max((s.list_id + 1 for of_pass in segments for s in of_pass), default=0)

    def _check(self, rows: list[int], number: int) -> None:
        if len(set(rows)) < len(rows) or (rows and max(rows) >= self.max_batch):
            raise ValueError(
                f"expected each batch row below {self.max_batch} once in a pass, got {sorted(rows)} in pass {number}"
            )

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
    ) -> None:
        """Attend as planned. One launch per pass and one for the merge.

        Neighbouring passes of one specialized configuration share a launch; where that is all, it merges, too. Runs of
        one object follow each other on one stream: they share the parts' states. Run once before a capture, so that the
        kernels are compiled; the pool's scales are constants of the captured graph.

        Args:
            q: [batch, num_qo_heads, head_dim] post-RoPE queries.
            kv: the layer's pool buffers and scales; only listed slots are read.
            slots: int32 or int64 arena of the segments' lists. Slots must be in the pool (not checked: that would wait
                for the device).
            sm_scale: multiplies q.k before the softmax; positive where a pass is specialized.
            out: [batch, num_qo_heads, v_head_dim], written: 0 where a row has nothing to attend.
            lse: [batch, num_qo_heads] fp32, written, natural log: -inf where a row has nothing to attend.
            counts: int32 [num_lists, num_kv_heads], entries of the lists that segments name by `list_id`.
            head_map: int32 [num_kv_heads], for a reuse layer: KV head h reads the list and count of head `head_map[h]`;
                None: its own.
            head_slots: the arena, like `slots`, of the segments with a `head_stride`: together with `counts` the lists
                of a layer. None: `slots`.

        Raises:
            ValueError: tensors of another shape than planned for, or what the specialized kernel cannot read.
        """
        head_slots = slots if head_slots is None else head_slots
        self._check_run(q, kv, slots, head_slots, out, lse)
        self._check_lists(q, counts, head_map)
        if any(one.config.specialized for one in self._launches):
            _check_inputs(q, kv, sm_scale)
        shape = self.shape
        counts = self._no_counts if counts is None else counts
        head_map = self._own_heads if head_map is None else head_map
        scales = {"sm_scale": float(sm_scale * kv.k_scale), "v_scale": float(kv.v_scale)}
        for one in self._launches:
            arguments = {**self._arguments(one, q, kv, slots, head_slots, out, lse, counts, head_map), **scales}
            if one.config.specialized:
                num_spans = len(self.passes) if self._merges_itself else 0
                merging = {"spans_ptr": self._spans, "arrived_ptr": self._arrived, "NUM_SPANS": num_spans}
                _launch_specialized(one, {**arguments, **merging}, shape.num_kv_heads)
                continue
            launch(
                attend_items_kernel,
                (shape.num_kv_heads, one.programs),
                {
                    **arguments,
                    "BLOCK_D": block_of(shape.head_dim - kv.latent * shape.v_head_dim, _LEAST_BLOCK),
                    "BLOCK_V": block_of(shape.v_head_dim, _LEAST_BLOCK),
                    "STAGES": one.config.num_stages,
                    "LATENT": kv.latent,
                    "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
                },
                num_warps=one.config.num_warps,
                num_stages=one.config.num_stages,
                maxnreg=one.config.max_registers,
            )
        if self._merges_itself:
            return
        launch(
            merge_items_kernel,
            (shape.num_qo_heads, q.shape[0]),
            {
                "partial_out_ptr": self._partial_out,
                "partial_lse_ptr": self._partial_lse,
                "spans_ptr": self._spans,
                "out_ptr": out,
                "lse_ptr": lse,
                "v_scale": float(kv.v_scale),
                "out_stride_row": out.stride(0),
                "out_stride_head": out.stride(1),
                "GQA": shape.gqa,
                "V_DIM": shape.v_head_dim,
                "BLOCK_V": block_of(shape.v_head_dim, _LEAST_BLOCK),
                "NUM_SPANS": len(self.passes),
                "BLOCK_S": min(_merged_at_once(shape), block_of(max(one.target for one in self.passes), _LEAST_BLOCK)),
            },
            num_warps=4,
        )

    def _arguments(
        self,
        one: _Launch,
        q: Tensor,
        kv: PagedKV,
        slots: Tensor,
        head_slots: Tensor,
        out: Tensor,
        lse: Tensor,
        counts: Tensor,
        head_map: Tensor,
    ) -> dict[str, Any]:
        """Of both attention kernels; without scales."""
        shape = self.shape
        return {
            "q_ptr": q,
            "k_ptr": kv.k_cache,
            "v_ptr": kv.v_cache,
            "slots_ptr": slots,
            "head_slots_ptr": head_slots,
            "rows_ptr": one.rows,
            "counts_ptr": counts,
            "head_map_ptr": head_map,
            "items_ptr": one.items,
            "partial_out_ptr": self._partial_out,
            "partial_lse_ptr": self._partial_lse,
            "out_ptr": out,
            "lse_ptr": lse,
            "batch": q.shape[0],
            "q_stride_row": q.stride(0),
            "q_stride_head": q.stride(1),
            "k_stride_slot": kv.k_cache.stride(0),
            "k_stride_head": kv.k_cache.stride(1),
            "v_stride_slot": kv.v_cache.stride(0),
            "v_stride_head": kv.v_cache.stride(1),
            "out_stride_row": out.stride(0),
            "out_stride_head": out.stride(1),
            "GQA": shape.gqa,
            "HEAD_DIM": shape.head_dim,
            "V_DIM": shape.v_head_dim,
            "BLOCK_M": one.config.block_m,
            "BLOCK_N": one.config.block_n,
        }

    def _check_run(self, q: Tensor, kv: PagedKV, slots: Tensor, head_slots: Tensor, out: Tensor, lse: Tensor) -> None:
        shape = self.shape
        heads = (q.shape[0], shape.num_qo_heads)
        if AttentionShape.of(q, kv) != shape or q.shape[0] > self.max_batch or q.shape[2] != shape.head_dim:
            raise ValueError(
                f"expected queries and KV of {shape} and at most {self.max_batch} rows, got q {tuple(q.shape)} "
                f"{q.dtype} and k_cache {tuple(kv.k_cache.shape)} {kv.k_cache.dtype}"
            )
        for name, tensor, wanted in (("out", out, (*heads, shape.v_head_dim)), ("lse", lse, heads)):
            if tuple(tensor.shape) != wanted:
                raise ValueError(f"expected {name} {wanted}, got {tuple(tensor.shape)}")
        if lse.dtype is not torch.float32 or not lse.is_contiguous():
            raise ValueError(f"expected lse contiguous in float32, got {lse.dtype}")
        check_arena("slots", slots)
        check_arena("head_slots", head_slots)
        if head_slots.dtype is not slots.dtype:
            raise ValueError(f"expected head_slots in the dtype of slots, {slots.dtype}, got {head_slots.dtype}")
        for name, tensor in (("q", q), ("k_cache", kv.k_cache), ("v_cache", kv.v_cache), ("out", out)):
            if tensor.stride(2) != 1:
                raise ValueError(f"expected {name} with adjacent channels, got strides {tensor.stride()}")

    def _check_lists(self, q: Tensor, counts: Tensor | None, head_map: Tensor | None) -> None:
        if q.shape[0] < self._most_rows:
            raise ValueError(
                f"expected q of {self._most_rows} rows or more, as planned, got {q.shape[0]}; plan for this batch"
            )
        heads = self.shape.num_kv_heads
        lists = 0 if counts is None else counts.shape[0]
        if lists < self._most_lists:
            raise ValueError(
                f"expected counts of {self._most_lists} lists or more, as planned, got {lists}; hand in counts"
            )
        if counts is not None:
            check_int32("counts", counts, (lists, heads))
        if head_map is not None:
            check_int32("head_map", head_map, (heads,))


def _merged_at_once(shape: AttentionShape) -> int:
    return min(_MERGED_AT_ONCE, _MERGED_NUMBERS // block_of(shape.v_head_dim, _LEAST_BLOCK))


def _check_fits(config: AttentionConfig, shape: AttentionShape, device: torch.device, num_programs: int | None) -> None:
    """A specialized configuration; on a CPU, where it can be compiled only, the device is not asked."""
    if not shape.fits_specialized(config.block_m):
        raise ValueError(
            "expected a shape that the specialized kernel has (bf16 or fp16, also the KV; 64 or 128 channels; "
            f"at most {config.block_m} query heads to a KV head), got {shape}; use a portable configuration"
        )
    if device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(device)
    if not has_specialized(device):
        raise ValueError(f"expected sm_90 for the specialized kernel, got {properties.name}; use a portable one")
    item = shape.dtype.itemsize
    at_once = specialized_at_once(
        config,
        config.block_n * (shape.head_dim + shape.v_head_dim) * item,
        config.block_m * shape.head_dim * item,
        properties.shared_memory_per_multiprocessor,
    )
    most = at_once * properties.multi_processor_count
    heads = shape.num_kv_heads
    wanted = heads * max((num_programs or programs_at_once(device, config.programs_per_sm)) // heads, 1)
    if wanted > most:
        # They wait for each other.
        raise ValueError(
            f"expected at most {most} programs of {config} at a time on this GPU, got {wanted}; lower programs_per_sm, "
            "num_programs or the ring, or use a portable configuration"
        )


def _check_inputs(q: Tensor, kv: PagedKV, scale: float) -> None:
    """It copies 16 bytes at a time, and takes the largest score before it scales."""
    if not scale > 0:
        raise ValueError(f"expected a positive scale of the scores, got {scale}; use a portable configuration")
    for name, tensor in (("q", q), ("k_cache", kv.k_cache), ("v_cache", kv.v_cache)):
        if tensor.data_ptr() % 16 or any(stride % 16 for stride in tensor.stride()[:2]):
            raise ValueError(
                f"expected {name} aligned to 16 bytes with strides of multiples of 16 elements, got "
                f"{tensor.data_ptr() % 16} bytes off and strides {tensor.stride()}; use a portable configuration"
            )


def _launch_specialized(one: _Launch, arguments: dict[str, Any], num_kv_heads: int) -> None:
    from prefix_kernels.grouped_attention.sm90_kernels import attend_items_sm90_kernel

    launch_behind(
        attend_items_sm90_kernel,
        (num_kv_heads, one.programs),
        {**arguments, "num_items_ptr": one.num_items, "RING": one.config.num_stages},
        num_warps=one.config.num_warps,
        maxnreg=one.config.max_registers,
        # Its programs wait for each other: started together, or refused with an error where they do not fit.
        launch_cooperative_grid=arguments["NUM_SPANS"] > 0,
    )
