"""Attention of the rows of a prefill, in plain torch and fp32: what the Triton form is compared with.

A request's new tokens are the last ones of its slots. Query i of n of them sees the first num_slots - n + i + 1 slots:

    out, lse = softmax attention over these                       (`own`)

Keys that stand before all slots, in pieces of consecutive rows of the pool, are seen by all queries of a group:

    out_piece, lse_piece = softmax attention over the piece       (`fold`)
    lse' = logaddexp(lse, lse_piece)
    out' = exp(lse - lse') out + exp(lse_piece - lse') out_piece

All logarithms are natural, all sums fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.types import PagedKV

QUERY_BLOCK = 256
"""Query tokens whose scores are computed at once."""
KEY_BLOCK = 2048
"""Keys that they are computed with: memory does not grow with a request's length."""


class State(NamedTuple):
    """Attention of some queries over some keys.

    Attributes:
        out: [num_queries, num_qo_heads, v_head_dim] fp32.
        lse: [num_queries, num_qo_heads] fp32, natural; -inf where nothing was attended.
    """

    out: Tensor
    lse: Tensor


class Span(NamedTuple):
    """A request's tokens in a forward.

    Attributes:
        rows: query rows; those of the first request are the first, and none is left out between two requests.
        slots: [num_keys] int64, the last of them those of the new tokens; so many at least.
    """

    rows: slice
    slots: Tensor


class Reference:
    """One forward's attention, on any device.

    Args:
        spans: of all requests, in batch order.
        groups: query rows of each, [num_queries] int64 on the host.
        device: of the queries.
    """

    def __init__(self, spans: Sequence[Span], groups: Sequence[Tensor], device: torch.device) -> None:
        self._spans = spans
        self._groups = [rows.to(device) for rows in groups]

    def own(self, q: Tensor, kv: PagedKV, sm_scale: float) -> State:
        """Attention of all rows over the own slots of their request.

        Args:
            q: [num_rows or more, num_qo_heads, head_dim].
            kv: of the layer.
            sm_scale: attention scale.

        Returns:
            Of all rows of q, new memory; 0 in `out` where there is no request.
        """
        out = torch.zeros(*q.shape[:2], kv.v_cache.shape[2], dtype=torch.float32, device=q.device)
        state = State(out, torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device))
        for rows, slots in self._spans:
            part, seen = None, len(slots) - (rows.stop - rows.start) + 1
            for piece in torch.split(slots, KEY_BLOCK):
                found = attend(q[rows], *_floats(kv, piece), sm_scale, seen)
                part, seen = found if part is None else merged(part, found), seen - len(piece)
            assert part is not None
            state.out[rows], state.lse[rows] = part
        return state

    def fold(self, state: State, group: int, q: Tensor, kv: PagedKV, pages: Tensor, sm_scale: float) -> None:
        """Attention of a group's rows over pages of the host, too.

        Args:
            state: of `own`, changed.
            group: its number.
            q: as in `own`.
            kv: of the layer.
            pages: [num_pages, num_kv_heads, PAGE_TOKENS, head_dim + v_head_dim], as `residents.to_pages` has them.
            sm_scale: attention scale.
        """
        rows = self._groups[group]
        tokens = pages.transpose(1, 2).flatten(0, 1)
        width, everything = kv.head_dim, torch.arange(len(tokens), device=q.device)
        piece = replace(kv, k_cache=tokens[..., :width], v_cache=tokens[..., width:])
        part = attend(q[rows], *_floats(piece, everything), sm_scale)
        state.out[rows], state.lse[rows] = merged(State(state.out[rows], state.lse[rows]), part)


def attend(q: Tensor, k: Tensor, v: Tensor, sm_scale: float, seen: int | None = None) -> State:
    """Attention over given keys.

    Args:
        q: [num_queries, num_qo_heads, head_dim].
        k, v: [num_keys, num_kv_heads, head_dim], and v_head_dim, fp32; at least one.
        sm_scale: attention scale.
        seen: keys that the first query sees, each one behind it one more; may be below 0. None: all see all.
    """
    (count, heads, _), (keys, kv_heads, _) = q.shape, k.shape
    grouped = q.float().reshape(count, kv_heads, heads // kv_heads, -1)
    outs, lses = [], []
    for first in range(0, count, QUERY_BLOCK):
        block = grouped[first : first + QUERY_BLOCK]
        scores = torch.einsum("nhgd,mhd->nhgm", block, k) * sm_scale
        if seen is not None:
            end = torch.arange(first, first + len(block), device=q.device) + seen
            hidden = torch.arange(keys, device=q.device)[None] >= end[:, None]
            scores.masked_fill_(hidden[:, None, None], -torch.inf)
        lse = scores.logsumexp(dim=-1)
        whole = lse.masked_fill(lse == -torch.inf, 0.0)  # of a query that sees nothing all weights are 0
        outs.append(torch.einsum("nhgm,mhd->nhgd", (scores - whole[..., None]).exp_(), v))
        lses.append(lse)
    return State(torch.cat(outs).reshape(count, heads, -1), torch.cat(lses).reshape(count, heads))


def merged(one: State, other: State) -> State:
    """Attention over the keys of both; at least one of the two attended some."""
    lse = torch.logaddexp(one.lse, other.lse)
    shares = (torch.exp(part.lse - lse)[..., None] * part.out for part in (one, other))
    return State(sum(shares, torch.zeros_like(one.out)), lse)


def _floats(kv: PagedKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of some slots, fp32."""
    return kv.keys(slots, torch.float32), kv.values(slots, torch.float32)
