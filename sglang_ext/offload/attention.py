"""Exact attention of rows whose prefix lies in host memory, a layer at a time, through rows behind SGLang's KV pool.

Plain torch on any device. For query i of a row at position p, with a prefix of P tokens on the host:

    out_prefix, lse_prefix = attention over [0, P), in pieces that are copied to the staging rows one after another
    out_slots,  lse_slots  = attention over [P, p], from the row's own slots
    lse = logaddexp(lse_prefix, lse_slots)
    out = exp(lse_prefix - lse) out_prefix + exp(lse_slots - lse) out_slots

Rows without such a prefix attend [0, p] from their slots. All logarithms are natural, all sums fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.types import PagedKV
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.offload.directory import Offload
from sglang_ext.offload.host import HostPool

QUERY_BLOCK = 256
"""Query tokens whose scores are computed at once."""


class Part(NamedTuple):
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
        rows: query rows.
        slots: [num_keys] int64, of its real tokens, the new ones included.
    """

    rows: slice
    slots: Tensor


@dataclass
class StagedStep:
    """One forward of a batch with such rows.

    Attributes:
        spans: of all its requests, in batch order.
        groups: by prefix, [num_queries] int64 on the device: query rows behind it.
        layers: that attended.
    """

    spans: Sequence[Span]
    groups: Sequence[tuple[Offload, Tensor]]
    layers: set[int] = field(default_factory=set)


def attend(q: Tensor, k: Tensor, v: Tensor, sm_scale: float, *, causal: bool) -> Part:
    """Attention over given keys.

    Args:
        q: [num_queries, num_qo_heads, head_dim].
        k, v: [num_keys, num_kv_heads, head_dim], and v_head_dim, fp32; at least one.
        sm_scale: attention scale.
        causal: the queries are those of the last `num_queries` keys, and see none behind their own.
    """
    (count, heads, _), (keys, kv_heads, _) = q.shape, k.shape
    grouped = q.float().reshape(count, kv_heads, heads // kv_heads, -1)
    outs, lses = [], []
    for first in range(0, count, QUERY_BLOCK):
        block = grouped[first : first + QUERY_BLOCK]
        scores = torch.einsum("nhgd,mhd->nhgm", block, k) * sm_scale
        if causal:
            last = torch.arange(first, first + len(block), device=q.device) + keys - count
            hidden = torch.arange(keys, device=q.device)[None] > last[:, None]
            scores.masked_fill_(hidden[:, None, None], -torch.inf)
        lse = scores.logsumexp(dim=-1)
        outs.append(torch.einsum("nhgm,mhd->nhgd", (scores - lse[..., None]).exp_(), v))
        lses.append(lse)
    return Part(torch.cat(outs).reshape(count, heads, -1), torch.cat(lses).reshape(count, heads))


def merged(one: Part, other: Part) -> Part:
    """Attention over the keys of both; at least one of the two attended some."""
    lse = torch.logaddexp(one.lse, other.lse)
    shares = (torch.exp(part.lse - lse)[..., None] * part.out for part in (one, other))
    return Part(sum(shares, torch.zeros_like(one.out)), lse)


class StagedAttention:
    """Attends layers of such forwards.

    Args:
        pool: of host memory.
        staging: rows of the device pool's tensors that are nobody else's; whole pages.
    """

    def __init__(self, pool: HostPool, staging: range) -> None:
        self._pool, self._staging = pool, staging
        self._pages = len(staging) // PAGE_TOKENS

    def run(self, step: StagedStep, q: Tensor, kv: PagedKV, layer: int, sm_scale: float) -> Tensor:
        """One layer.

        Args:
            step: the running forward.
            q: [num_tokens or more, num_qo_heads, head_dim]; rows beyond the batch come out as 0.
            kv: the layer's pool buffers; the new tokens' K and V are written.
            layer: its number.
            sm_scale: attention scale.

        Returns:
            [rows of q, num_qo_heads, v_head_dim] in q's dtype, new memory.
        """
        out = torch.zeros(q.shape[0], q.shape[1], kv.v_cache.shape[2], dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        for span in step.spans:
            part = attend(q[span.rows], *_floats(kv, span.slots), sm_scale, causal=True)
            out[span.rows], lse[span.rows] = part
        for offload, rows in step.groups:
            part = Part(out[rows], lse[rows])
            for pages in torch.split(offload.pages, self._pages):
                part = merged(part, self._prefix(q[rows], kv, layer, pages, sm_scale))
            out[rows] = part.out
        step.layers.add(layer)
        return out.to(q.dtype)

    def _prefix(self, q: Tensor, kv: PagedKV, layer: int, pages: Tensor, sm_scale: float) -> Part:
        """Attention over one piece of a prefix, which then lies in the staging rows."""
        self._pool.stage(layer, pages, self._staging.start)
        count = len(pages) * PAGE_TOKENS
        slots = torch.arange(self._staging.start, self._staging.start + count, device=q.device)
        return attend(q, *_floats(kv, slots), sm_scale, causal=False)


def _floats(kv: PagedKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of some slots, fp32."""
    return kv.keys(slots, torch.float32), kv.values(slots, torch.float32)
