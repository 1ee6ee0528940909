"""A prefill's attention on tensor cores: tables of tiles are made once, a layer launches them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefix_kernels.grouped_attention.config import AttentionConfig, AttentionShape, default_config
from prefix_kernels.launching import block_of, launch, sent
from prefix_kernels.prefill_attention.kernels import attend_tiles_kernel
from prefix_kernels.prefill_attention.reference import Span, State
from prefix_kernels.types import PagedKV

HEIGHTS = 64, 128
"""Rows of a tile: few heights, as each is compiled."""
_LEAST_BLOCK = 16
"""Of a tensor core's operand."""


class _Launch(NamedTuple):
    """Tiles [num_tiles, 5] int32 and their rows [num_rows] int32, on the device."""

    config: AttentionConfig
    tiles: Tensor
    rows: Tensor


class PrefillAttention:
    """One forward's attention; methods, shapes and bases are those of `Reference`.

    Sums are fp32; a product's operands have the dtype of the queries, as its weights, at most 1, do.

    Args:
        spans: of all requests, in batch order.
        groups: query rows of each, [num_queries] int64 on the host.
        shape: of the layers.
        device: of the queries. Tables are copied there without a wait, on the stream of the runs.
    """

    def __init__(
        self, spans: Sequence[Span], groups: Sequence[Tensor], shape: AttentionShape, device: torch.device
    ) -> None:
        self._shape = shape
        self._slots = torch.cat([span.slots for span in spans])
        self._num_rows = spans[-1].rows.stop
        tiles, begin = list[tuple[int, ...]](), 0
        config = self._config(max(span.rows.stop - span.rows.start for span in spans))
        for rows, slots in spans:
            new = rows.stop - rows.start
            for first, count in self._cut(config, new):
                seen = len(slots) - new + first + 1
                tiles.append((rows.start + first, count, begin, seen, seen + count - 1))
            begin += len(slots)
        tiles.sort(key=lambda tile: -tile[4])  # the longest begin first
        self._own = self._sent(config, tiles, torch.arange(self._num_rows), device)
        self._groups = []
        for of_group in groups:
            config = self._config(len(of_group))
            tiles = [(first, count, 0, 0, 0) for first, count in self._cut(config, len(of_group))]
            self._groups.append(self._sent(config, tiles, of_group, device))

    def _config(self, queries: int) -> AttentionConfig:
        gqa = self._shape.gqa
        height = next((one for one in HEIGHTS if queries * gqa <= one), HEIGHTS[-1])
        return default_config(self._shape, max(1, height // gqa))

    def _cut(self, config: AttentionConfig, queries: int) -> list[tuple[int, int]]:
        """(First, number) of each tile's queries."""
        height = config.block_m // self._shape.gqa
        return [(first, min(height, queries - first)) for first in range(0, queries, height)]

    def _sent(
        self, config: AttentionConfig, tiles: Sequence[tuple[int, ...]], rows: Tensor, device: torch.device
    ) -> _Launch:
        return _Launch(config, sent(torch.tensor(tiles, dtype=torch.int32), device), sent(rows.int(), device))

    def own(self, q: Tensor, kv: PagedKV, sm_scale: float) -> State:
        """See `Reference.own`. One launch."""
        out = torch.empty(*q.shape[:2], self._shape.v_head_dim, dtype=torch.float32, device=q.device)
        state = State(out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))
        out[self._num_rows :].zero_()
        state.lse[self._num_rows :].fill_(-torch.inf)
        self._run(self._own, state, q, kv, sm_scale, None)
        return state

    def fold(self, state: State, group: int, q: Tensor, kv: PagedKV, pages: Tensor, sm_scale: float) -> None:
        """See `Reference.fold`. One launch."""
        self._run(self._groups[group], state, q, kv, sm_scale, pages)

    def _run(self, one: _Launch, state: State, q: Tensor, kv: PagedKV, sm_scale: float, pages: Tensor | None) -> None:
        shape, config = self._shape, one.config
        keys, values, of_token = kv.k_cache, kv.v_cache, 0
        if pages is not None:
            keys, values, of_token = pages, pages[..., shape.head_dim :], 2
        if q.stride(2) != 1 or keys.stride(-1) != 1 or values.stride(-1) != 1:
            raise ValueError(f"expected q, k_cache and v_cache with adjacent channels, got strides {q.stride()} of q")
        arguments: dict[str, Any] = {
            "q_ptr": q,
            "k_ptr": keys,
            "v_ptr": values,
            "slots_ptr": self._slots,
            "rows_ptr": one.rows,
            "tiles_ptr": one.tiles,
            "out_ptr": state.out,
            "lse_ptr": state.lse,
            "num_keys": 0 if pages is None else pages.shape[0] * pages.shape[2],
            "sm_scale": float(sm_scale * kv.k_scale),
            "v_scale": float(kv.v_scale),
            "q_stride_row": q.stride(0),
            "q_stride_head": q.stride(1),
            "k_stride_slot": keys.stride(of_token),
            "k_stride_head": keys.stride(1),
            "v_stride_slot": values.stride(of_token),
            "v_stride_head": values.stride(1),
            "page_stride": 0 if pages is None else pages.stride(0),
            "GQA": shape.gqa,
            "HEAD_DIM": shape.head_dim,
            "BLOCK_D": block_of(shape.head_dim, _LEAST_BLOCK),
            "V_DIM": shape.v_head_dim,
            "BLOCK_V": block_of(shape.v_head_dim, _LEAST_BLOCK),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "STAGES": config.num_stages,
            "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
            "LISTED": pages is None,
        }
        grid = len(one.tiles), shape.num_kv_heads
        launch(attend_tiles_kernel, grid, arguments, num_warps=config.num_warps, num_stages=config.num_stages)
