"""Tokens of host memory that lists name, gathered in pages of the device."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.launching import block_of, launch, runs_triton
from prefix_kernels.residents.state import PAGE_TOKENS
from prefix_kernels.types import SelectionGroup, check_table

_WORD = torch.int32
_TOKENS, _WARPS = 16, 4


def gather_listed(
    host: Tensor,
    host_pages: Tensor,
    positions: Tensor,
    group: SelectionGroup,
    first: int,
    out: Tensor,
    *,
    head_map: Tensor | None = None,
    implementation: str | None = None,
) -> None:
    """Copy keys and values of listed tokens, of each KV head its own, in one launch.

    Args:
        host: KV of a layer in host memory [num_host_pages, num_kv_heads, PAGE_TOKENS, k_dim + v_dim], pinned where the
            lists lie on a GPU; read only.
        host_pages: [pages of the prefix] int32 on the device of the lists: page of `host` of each of its pages, in
            order; below `num_host_pages`, which is not checked.
        positions: [entries] int32, the arena in which the group's lists lie; all of `group.count` entries.
        group: whose lists they are.
        first: entry of each list from which on they are copied.
        out: [num_pages, num_kv_heads, PAGE_TOKENS, k_dim + v_dim] in the dtype of `host`, on the device of the lists:
            entry first + i of KV head h goes to place i % PAGE_TOKENS of page i // PAGE_TOKENS of h.
        head_map: [num_kv_heads] int32: the KV head whose list each one takes; None: its own.
        implementation: "reference" or "triton"; None: Triton on a GPU, else the reference.

    Raises:
        ValueError: lists that end before `out` is full, or tensors of another shape, dtype or place.
    """
    heads, tokens = host.shape[1], out.shape[0] * PAGE_TOKENS
    check_table("host_pages", host_pages, (-(-group.prefix_len // PAGE_TOKENS),))
    check_table("positions", positions, (max(positions.shape[0], group.lists_end(heads)),))
    if head_map is not None:
        check_table("head_map", head_map, (heads,))
    if not 0 <= first <= group.count - tokens:
        raise ValueError(
            f"expected lists of {first + tokens} entries, of which {tokens} from {first} on are copied, got "
            f"{group.count}; gather fewer"
        )
    alike = out.shape[1:] == host.shape[1:] and out.dtype == host.dtype
    if not alike or not out.is_contiguous() or not host.is_contiguous() or out.device != positions.device:
        raise ValueError(
            f"expected out [pages, {tuple(host.shape[1:])}] {host.dtype} as host, contiguous, on {positions.device}, "
            f"got {tuple(out.shape)} {out.dtype} on {out.device}; is it of the same layer?"
        )
    if host.shape[3] * host.dtype.itemsize % _WORD.itemsize:
        raise ValueError(
            f"expected tokens of whole words of 4 bytes, got {host.shape[3]} of {host.dtype}; use a dtype of 16 bits"
        )
    if not runs_triton("gather_listed", implementation, positions.device):
        listed = group.lists_in(positions, heads)[:, first : first + tokens].long()
        listed = listed if head_map is None else listed[head_map.long()]
        own = torch.arange(heads, device=listed.device)[:, None]
        found = host[host_pages.long()[listed // PAGE_TOKENS], own, listed % PAGE_TOKENS]
        out.copy_(found.view(heads, -1, PAGE_TOKENS, host.shape[3]).transpose(0, 1))
        return
    from prefix_kernels.residents.kernels import gather_kernel

    words = host.view(_WORD)
    arguments = {
        "host_ptr": words,
        "host_pages_ptr": host_pages,
        "positions_ptr": positions,
        "head_map_ptr": positions if head_map is None else head_map,
        "out_ptr": out.view(_WORD),
        "list_begin": group.list_begin + first,
        "head_stride": group.head_stride,
        "num_tokens": tokens,
        "num_heads": heads,
        "WORDS": words.shape[3],
        "BLOCK": block_of(words.shape[3]),
        "HAS_MAP": head_map is not None,
        "TOKENS": _TOKENS,
    }
    launch(gather_kernel, (heads, -(-tokens // _TOKENS)), arguments, num_warps=_WARPS)
