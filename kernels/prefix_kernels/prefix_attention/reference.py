"""Reference of `prefix_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels._tile import ELEMENTS_PER_CHUNK, attend, from_tile, gather_kv, to_tile
from prefix_kernels.merge_state.reference import merge_state_reference
from prefix_kernels.types import AttnState, PagedKV, Selection


def prefix_attention_reference(
    q: Tensor, kv: PagedKV, slots: Tensor, selection: Selection, sm_scale: float
) -> AttnState:
    """Gather K and V once per KV head, attend with the group's whole tile, merge over chunks.

    For KV head h and tile rows r: s[r, i] = sm_scale * q[r] . k[slots[positions[h, i]], h] for i < counts[h];
    lse[r] = log sum_i exp(s[r, i]); out[r] = sum_i exp(s[r, i] - lse[r]) * v[slots[positions[h, i]], h].
    A chunk of the selection is as long as the largest temporary may be, so memory stays bounded.
    """
    num_rows, num_qo_heads, head_dim = q.shape
    num_kv_heads, max_count = selection.positions.shape
    tile = to_tile(q, num_kv_heads) * sm_scale
    if max_count == 0 or num_rows == 0:
        out = q.new_zeros(num_rows, num_qo_heads, kv.v_cache.shape[2], dtype=torch.float32)
        return AttnState(out, q.new_full((num_rows, num_qo_heads), -torch.inf, dtype=torch.float32))
    per_position = num_kv_heads * max(head_dim, tile.shape[1])
    chunk = max(1, ELEMENTS_PER_CHUNK // per_position)
    token_slots = slots.long()
    states: list[AttnState] = []
    for start in range(0, max_count, chunk):
        positions = selection.positions[:, start : start + chunk].long()
        column = torch.arange(start, start + positions.shape[1], device=positions.device)
        valid = column < selection.counts[:, None]
        index = token_slots[positions.clamp_min(0)]
        k, v = gather_kv(kv, index)
        out, lse = attend(tile, k, v, valid)
        states.append(AttnState(from_tile(out, num_rows), from_tile(lse, num_rows)))
    return states[0] if len(states) == 1 else merge_state_reference(states)
