"""Decode attention of a batch over lists of slots: planned on the host, then run without a wait or an allocation."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prefix_kernels.grouped_attention.config import AttentionConfig, AttentionShape, check_hopper
from prefix_kernels.grouped_attention.items import ITEM_FIELDS, SPAN_FIELDS, Segment, check_rows, cut, join
from prefix_kernels.grouped_attention.kernels import attend_items_kernel, merge_items_kernel
from prefix_kernels.launching import block_of, launch, launch_behind, programs_at_once, send
from prefix_kernels.types import PagedKV, check_arena, check_table

_MERGED_AT_ONCE = 32
"""Parts of a row, at most."""
_MERGED_NUMBERS = 512
"""Values of one of these parts, of all heads of a program, at most: what the registers hold. Where a program has a
quarter of them, as of a lone request, it takes twice as many parts at once, a list's 32 and the suffix among them."""
_MERGE_PROGRAMS = 256
"""Heads are merged together where there would be more: each has a start. Fewer are slower where rows are few."""
_LEAST_BLOCK = 16
"""Of a tensor core's operand."""


class _Launch:
    """One launch of an attention kernel: the items of its passes, in fixed device buffers.

    Args:
        passes: numbers and configurations: neighbours of one specialized configuration, or one.
        target: items of a pass that fill the GPU once.
        max_batch: requests of a batch, at most.
        device: where the buffers are made.
    """

    def __init__(
        self, passes: Sequence[tuple[int, AttentionConfig]], target: int, max_batch: int, device: torch.device
    ) -> None:
        self.passes = [number for number, _ in passes]
        self.config, self.target = passes[0][1], target
        self.items_of_a_pass = target + max_batch
        self.items = torch.zeros(len(passes) * self.items_of_a_pass, ITEM_FIELDS, dtype=torch.int32, device=device)
        self.rows = torch.zeros(len(passes) * max_batch, dtype=torch.int32, device=device)
        self.num_items = torch.zeros(1, dtype=torch.int32, device=device)
        # Per KV head: one an item, or, where each takes item after item, what fills the GPU.
        self.programs = target if self.config.specialized else len(self.items)

    def partial_rows(self, num_kv_heads: int) -> int:
        """Partial rows that the items of a pass may write."""
        return self.items_of_a_pass * num_kv_heads * self.config.block_m


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
        self.shape, self.max_batch, heads = shape, max_batch, shape.num_kv_heads
        self._launches: list[_Launch] = []
        # Neighbours of one specialized configuration together, others alone.
        joined = itertools.groupby(enumerate(passes), lambda one: one[1] if one[1].specialized else one[0])
        for _, same in joined:
            (_, config), *_ = of_launch = list(same)
            target = max(1, (num_programs or programs_at_once(device, config.programs_per_sm)) // heads)
            if config.specialized:
                _check_fits(config, shape, device)
            self._launches.append(_Launch(of_launch, target, max_batch, device))
        num_rows = sum(len(one.passes) * one.partial_rows(heads) for one in self._launches)
        if scratch_of is not None and scratch_of.shape == shape and len(scratch_of._partial_lse) >= num_rows:
            self._partial_out: Tensor = scratch_of._partial_out
            self._partial_lse: Tensor = scratch_of._partial_lse
        else:
            self._partial_out = torch.empty(num_rows, shape.v_head_dim, dtype=torch.float32, device=device)
            self._partial_lse = torch.empty(num_rows, dtype=torch.float32, device=device)
        self._spans = torch.zeros(max_batch, len(passes), SPAN_FIELDS, dtype=torch.int32, device=device)
        self._own_heads = torch.arange(heads, dtype=torch.int32, device=device)
        self._no_counts = torch.zeros(1, heads, dtype=torch.int32, device=device)
        self._most_rows = self._most_lists = 0

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
        most = self._spans.shape[1]
        if len(segments) > most:
            raise ValueError(f"expected segments of at most {most} passes, got {len(segments)}")
        for of_pass in segments:
            check_rows([row for s in of_pass if s.length for row in s.rows], self.max_batch)
        attended = Counter(row for of_pass in segments for s in of_pass if s.length for row in s.rows)
        alone = {row for row, times in attended.items() if times == 1}
        spans = torch.zeros(self._spans.shape, dtype=torch.int32)
        tables: list[tuple[Tensor, Tensor]] = [(spans, self._spans)]
        first_partial = 0
        for one in self._launches:
            rows: list[int] = []
            listed: list[tuple[int, ...]] = []
            sizes = {
                "gqa": self.shape.gqa,
                "block_m": one.config.block_m,
                "block_n": one.config.block_n,
                "target": one.target,
            }
            ring = one.config.num_stages * one.config.block_n  # fetched while a list is waited for
            of_passes = [segments[n] if n < len(segments) else () for n in one.passes]
            joined = join(of_passes, attended, **sizes, longest=ring)
            for number, of_pass in zip(one.passes, joined, strict=True):
                items = cut(
                    of_pass,
                    **sizes,
                    num_kv_heads=self.shape.num_kv_heads,
                    first_partial=first_partial,
                    first_row=len(rows),
                    alone=alone,
                )
                assert len(items.items) <= one.items_of_a_pass
                if items.spans:
                    at = torch.tensor(items.spans, dtype=torch.int32)
                    spans[at[:, 0].long(), number] = at[:, 1:]
                rows += items.rows
                listed += items.items
                first_partial += one.partial_rows(self.shape.num_kv_heads)
            # Those first that have no list of each KV head: they can be attended while these are made.
            listed.sort(key=_has_head_lists)
            table = torch.zeros(one.items.shape, dtype=torch.int32)
            if listed:
                table[: len(listed)] = torch.tensor(listed, dtype=torch.int32)
            tables += [
                (table, one.items),
                (torch.tensor(rows, dtype=torch.int32), one.rows),
                (torch.tensor([len(listed)], dtype=torch.int32), one.num_items),
            ]
        for table, buffer in tables:
            send(table, buffer)
        self._most_rows = max(attended, default=-1) + 1
        self._most_lists = max((s.list_id + 1 for of_pass in segments for s in of_pass), default=0)

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
        after_lists: bool = False,
    ) -> None:
        """Attend as planned. One launch per pass and one for the merge.

        Neighbouring passes of one specialized configuration share a launch. Runs of one object follow each other on one
        stream: they share the parts' states. Run once before a capture, so that the kernels are compiled; the pool's
        scales are constants of the captured graph.

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
            after_lists: the launch before on this stream writes `head_slots`, the counts of lists that lie there, and
                nothing else that is read here; and it lets others begin once all launches before it have ended, as the
                last one of a selection does. So programs begin while it runs, with the other lists.

        Raises:
            ValueError: tensors of another shape than planned for, or what the specialized kernel cannot read.
        """
        head_slots = slots if head_slots is None else head_slots
        self._check_run(q, kv, slots, head_slots, out, lse)
        self._check_lists(q, counts, head_map)
        if any(one.config.specialized for one in self._launches):
            _check_inputs(q, kv, sm_scale)
        shape = self.shape
        arguments: dict[str, Any] = {
            "q_ptr": q,
            "k_ptr": kv.k_cache,
            "v_ptr": kv.v_cache,
            "slots_ptr": slots,
            "head_slots_ptr": head_slots,
            "counts_ptr": self._no_counts if counts is None else counts,
            "head_map_ptr": self._own_heads if head_map is None else head_map,
            "partial_out_ptr": self._partial_out,
            "partial_lse_ptr": self._partial_lse,
            "spans_ptr": self._spans,
            "out_ptr": out,
            "lse_ptr": lse,
            "sm_scale": float(sm_scale * kv.k_scale),
            "v_scale": float(kv.v_scale),
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
            "BLOCK_D": block_of(shape.head_dim - kv.latent * shape.v_head_dim, _LEAST_BLOCK),
            "V_DIM": shape.v_head_dim,
            "BLOCK_V": block_of(shape.v_head_dim, _LEAST_BLOCK),
            "LATENT": kv.latent,
            "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
            "NUM_SPANS": self._spans.shape[1],
            "num_qo_heads": shape.num_qo_heads,
            "AFTER_LISTS": after_lists,
        }
        for one in self._launches:
            self._attend(one, arguments)
            # Between two launches of attention there is no list to wait for.
            arguments["AFTER_LISTS"] = False
        self._merge(arguments)

    def _merge(self, arguments: dict[str, Any]) -> None:
        heads, (batch, *_), block_v = self.shape.num_qo_heads, arguments["q_ptr"].shape, arguments["BLOCK_V"]
        wanted = min(block_of(-(-heads * batch // _MERGE_PROGRAMS)), block_of(heads))
        block_h = max(1, min(wanted, _MERGED_NUMBERS // block_v))
        most = max(one.target for one in self._launches) + self._spans.shape[1] - 1
        at_once = 2 * _MERGED_AT_ONCE if 4 * block_h * block_v <= _MERGED_NUMBERS else _MERGED_AT_ONCE
        sizes = {"BLOCK_H": block_h, "BLOCK_S": min(at_once, block_of(most, _LEAST_BLOCK))}
        warps = 4 if 2 * block_h * block_v <= _MERGED_NUMBERS else 8
        launch_behind(merge_items_kernel, (-(-heads // block_h), batch), arguments | sizes, num_warps=warps)

    def _attend(self, one: _Launch, arguments: dict[str, Any]) -> None:
        config = one.config
        arguments = arguments | {
            "rows_ptr": one.rows,
            "items_ptr": one.items,
            "num_items_ptr": one.num_items,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "STAGES": config.num_stages,
            "RING": config.num_stages,
        }
        grid = (self.shape.num_kv_heads, one.programs)
        options = {"num_warps": config.num_warps, "maxnreg": config.max_registers}
        if config.specialized:
            from prefix_kernels.grouped_attention.sm90_kernels import attend_items_sm90_kernel

            launch_behind(attend_items_sm90_kernel, grid, arguments, **options)
        else:
            launch(attend_items_kernel, grid, arguments, num_stages=config.num_stages, **options)

    def _check_run(self, q: Tensor, kv: PagedKV, slots: Tensor, head_slots: Tensor, out: Tensor, lse: Tensor) -> None:
        shape = self.shape
        heads = (q.shape[0], shape.num_qo_heads)
        if AttentionShape.of(q, kv) != shape or q.shape[0] > self.max_batch or q.shape[2] != shape.head_dim:
            raise ValueError(
                f"expected queries and KV of {shape} and at most {self.max_batch} rows, got q {tuple(q.shape)} "
                f"{q.dtype} and k_cache {tuple(kv.k_cache.shape)} {kv.k_cache.dtype}"
            )
        check_table("lse", lse, heads, torch.float32)
        if tuple(out.shape) != (*heads, shape.v_head_dim):
            raise ValueError(f"expected out {(*heads, shape.v_head_dim)}, got {tuple(out.shape)}")
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
            check_table("counts", counts, (lists, heads))
        if head_map is not None:
            check_table("head_map", head_map, (heads,))


def _has_head_lists(item: Sequence[int]) -> bool:
    """Whether an item's list is in the arena of such lists."""
    _, _, _, head_stride, *_ = item
    return head_stride > 0


def _check_fits(config: AttentionConfig, shape: AttentionShape, device: torch.device) -> None:
    """A specialized configuration; on a CPU, where it can be compiled only, the device is not asked."""
    if not shape.fits_specialized(config.block_m):
        raise ValueError(
            "expected a shape that the specialized kernel has (bf16 or fp16, also the KV; 64 or 128 channels; "
            f"at most {config.block_m} query heads to a KV head), got {shape}; use a portable configuration"
        )
    check_hopper(device)


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
