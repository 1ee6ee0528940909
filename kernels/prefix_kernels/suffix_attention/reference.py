"""Reference of `suffix_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels._tile import ELEMENTS_PER_CHUNK, attend, gather_kv
from prefix_kernels.types import AttnState, PagedKV

MAX_CHUNK = 256
"""Longest piece of a suffix in tokens: the most padding that a request gets; 32K tokens are 128 pieces."""


def suffix_attention_reference(
    q: Tensor, kv: PagedKV, kv_indptr: Tensor, kv_indices: Tensor, sm_scale: float
) -> AttnState:
    """Cut every suffix into pieces of equal length, attend them in batches, merge per request.

    Pieces (b, c) of request b cover kv_indices[indptr[b] + c * chunk : min(indptr[b] + (c + 1) * chunk,
    indptr[b + 1])]. Each gives (out, lse); per request, m = max lse, w = exp(lse - m), out = sum w * out /
    sum w and lse = m + log sum w. Work and memory follow the number of tokens, not batch times the longest
    suffix.
    """
    batch, num_qo_heads, head_dim = q.shape
    num_kv_heads, v_dim = kv.num_kv_heads, kv.v_cache.shape[2]
    indptr = kv_indptr.long().cpu()
    check_indptr(indptr, kv_indices)
    lengths = indptr.diff()
    longest = int(lengths.max()) if batch else 0
    if longest == 0:
        out = q.new_zeros(batch, num_qo_heads, v_dim, dtype=torch.float32)
        return AttnState(out, q.new_full((batch, num_qo_heads), -torch.inf, dtype=torch.float32))
    chunk = min(MAX_CHUNK, longest)
    owner, start, length = (piece.to(q.device) for piece in _pieces(indptr, lengths, chunk))
    gqa = num_qo_heads // num_kv_heads
    tile = q.float().view(batch, num_kv_heads, gqa, head_dim) * sm_scale
    kv_slots = kv_indices.long()
    column = torch.arange(chunk, device=q.device)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    per_call = max(1, ELEMENTS_PER_CHUNK // (num_kv_heads * chunk * max(head_dim, v_dim, gqa)))
    for first in range(0, owner.shape[0], per_call):
        part = slice(first, first + per_call)
        valid = column < length[part, None]
        index = kv_slots[torch.where(valid, start[part, None] + column, start[part, None])]
        index = index[:, None, :].expand(-1, num_kv_heads, -1)
        k, v = gather_kv(kv, index)
        out, lse = attend(tile[owner[part]], k, v, valid[:, None, :].expand(-1, num_kv_heads, -1))
        outs.append(out.reshape(-1, num_qo_heads, v_dim))
        lses.append(lse.reshape(-1, num_qo_heads))
    return _merge_pieces(torch.cat(outs), torch.cat(lses), owner, batch)


def check_indptr(indptr: Tensor, kv_indices: Tensor) -> None:
    """Raise ValueError unless `indptr` (on the host) ascends from 0 to at most the length of `kv_indices`."""
    if int(indptr[0]) != 0 or bool((indptr.diff() < 0).any()) or int(indptr[-1]) > kv_indices.shape[0]:
        raise ValueError(
            f"expected kv_indptr ascending from 0 to at most {kv_indices.shape[0]} (kv_indices), got "
            f"{indptr[:4].tolist()} ... {int(indptr[-1])}"
        )


def _pieces(indptr: Tensor, lengths: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Owner, first index and length of every piece, each [num_pieces] int64."""
    per_request = (lengths + chunk - 1) // chunk
    owner = torch.repeat_interleave(torch.arange(lengths.shape[0]), per_request)
    first_piece = per_request.cumsum(0) - per_request
    within = (torch.arange(owner.shape[0]) - first_piece[owner]) * chunk
    return owner, indptr[:-1][owner] + within, (lengths[owner] - within).clamp_max(chunk)


def _merge_pieces(out: Tensor, lse: Tensor, owner: Tensor, batch: int) -> AttnState:
    """Segmented merge: out [num_pieces, num_qo_heads, v_head_dim], lse [num_pieces, num_qo_heads]."""
    index = owner[:, None].expand_as(lse)
    peak = lse.new_full((batch, lse.shape[1]), -torch.inf).scatter_reduce_(0, index, lse, "amax")
    safe = peak.masked_fill(peak == -torch.inf, 0.0)
    weight = (lse - safe[owner]).exp()
    total = torch.zeros_like(safe).index_add_(0, owner, weight)
    merged = out.new_zeros(batch, *out.shape[1:]).index_add_(0, owner, weight[..., None] * out)
    return AttnState(merged / total.masked_fill(total == 0, 1.0)[..., None], safe + total.log())
