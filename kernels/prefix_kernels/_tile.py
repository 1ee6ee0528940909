"""Shared by the references: query tile of a group, gathers per KV head, attention of one tile."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.types import PagedKV, rows_of

ELEMENTS_PER_CHUNK = 1 << 24
"""Upper bound, in elements, of the largest temporary a reference makes (64 MiB in fp32)."""


def check_queries(q: Tensor, num_kv_heads: int, head_dim: int) -> None:
    """Raise unless `q` is [num_rows, num_qo_heads, head_dim] with whole groups of query heads per KV head."""
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] == 0 or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"expected q [num_rows, num_qo_heads, head_dim={head_dim}] with num_qo_heads a multiple of "
            f"num_kv_heads={num_kv_heads}, got {tuple(q.shape)}"
        )
    if not q.dtype.is_floating_point:
        raise ValueError(f"expected q in a floating dtype, got {q.dtype}")


def to_tile(q: Tensor, num_kv_heads: int) -> Tensor:
    """[num_rows, num_qo_heads, head_dim] -> fp32 [num_kv_heads, num_rows * gqa, head_dim]."""
    num_rows, num_qo_heads, head_dim = q.shape
    gqa = num_qo_heads // num_kv_heads
    tile = q.float().view(num_rows, num_kv_heads, gqa, head_dim).transpose(0, 1)
    return tile.reshape(num_kv_heads, num_rows * gqa, head_dim)


def from_tile(tile: Tensor, num_rows: int) -> Tensor:
    """[num_kv_heads, num_rows * gqa, ...] -> [num_rows, num_qo_heads, ...], contiguous."""
    num_kv_heads, rows_gqa = tile.shape[:2]
    split = tile.view(num_kv_heads, num_rows, rows_gqa // max(num_rows, 1), *tile.shape[2:])
    return split.transpose(0, 1).reshape(num_rows, -1, *tile.shape[2:])


def gather_heads(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows of a pool buffer per KV head, in fp32.

    Args:
        cache: [num_slots, num_kv_heads, head_dim].
        slots: [..., num_kv_heads, n] int64.

    Returns:
        [..., num_kv_heads, n, head_dim] fp32, new memory.
    """
    num_slots, num_kv_heads, head_dim = cache.shape
    head = torch.arange(num_kv_heads, device=slots.device)[:, None]
    if cache.is_contiguous():
        flat = slots * num_kv_heads + head
        rows = rows_of(cache.view(num_slots * num_kv_heads, head_dim), flat.reshape(-1))
        return rows.view(*slots.shape, head_dim).float()
    return cache[slots, head].float()


def gather_kv(kv: PagedKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values per KV head in fp32, times their scales: `gather_heads` of both."""
    k, v = gather_heads(kv.k_cache, slots), gather_heads(kv.v_cache, slots)
    return k if kv.k_scale == 1 else k * kv.k_scale, v if kv.v_scale == 1 else v * kv.v_scale


def attend(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention of a tile over one chunk of keys. Writes into `v`.

    Args:
        q: [..., rows, head_dim] fp32, already multiplied by sm_scale.
        k: [..., n, head_dim] fp32, n >= 1.
        v: [..., n, v_head_dim] fp32, owned by this call: rows that are not valid are zeroed, because a weight
            of zero does not silence a NaN.
        valid: bool [..., n].

    Returns:
        out [..., rows, v_head_dim] fp32, zero where nothing is valid, and lse [..., rows] fp32 (natural log),
        -inf there.
    """
    scores = (q @ k.transpose(-1, -2)).masked_fill_(~valid[..., None, :], -torch.inf)
    peak = scores.amax(dim=-1, keepdim=True)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weight = (scores - peak).exp_()
    total = weight.sum(dim=-1, keepdim=True)
    out = weight @ v.masked_fill_(~valid[..., None], 0.0)
    lse = peak + total.log()
    return out / total.masked_fill(total == 0, 1.0), lse.squeeze(-1)
