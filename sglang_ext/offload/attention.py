"""Exact attention of rows whose prefix lies in host memory, a layer at a time, through rows behind SGLang's KV pool.

A row at position p with a prefix of P tokens on the host attends [P, p] from its own slots, then [0, P) in pieces that
come to staging rows (`prefill_attention` has the formulas). Rows without such a prefix attend [0, p] from their slots.

Each layer's tensors have staging rows, and any layer's can hold a piece of another: they are the places of a ring. So
the link does not rest while the model does something else than attend. On CUDA a piece is attended while the next ones
are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import AttentionShape, check_dtypes
from prefix_kernels.prefill_attention import Reference, Span
from prefix_kernels.types import PagedKV
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.offload.directory import Offload
from sglang_ext.offload.host import HostPool, Run, runs, stage
from sglang_ext.offload.ring import InOrder, Queues, Ring, TwoStreams

if TYPE_CHECKING:
    from prefix_kernels.prefill_attention import PrefillAttention


class Piece(NamedTuple):
    """Of a prefix, at most as many pages as a layer has staging rows for.

    Attributes:
        group: whose prefix it is of.
        num_tokens: of it.
        runs: its pages on the host.
    """

    group: int
    num_tokens: int
    runs: Sequence[Run]


@dataclass
class StagedStep:
    """One forward of a batch with such rows.

    Attributes:
        spans: of all its requests, in batch order.
        groups: query rows behind each prefix, [num_queries] int64 on the host.
        pieces: of all prefixes, as each layer attends them.
        layers: that attended.
        expected: layer whose pieces are on their way.
        form: what attends; made by the first layer.
    """

    spans: Sequence[Span]
    groups: Sequence[Tensor]
    pieces: Sequence[Piece]
    layers: set[int] = field(default_factory=set)
    expected: int | None = None
    form: PrefillAttention | Reference | None = None


class StagedAttention:
    """Attends layers of such forwards.

    Args:
        pool: of host memory.
        staging: rows of the device pool's tensors that are nobody else's; whole pages.
        kv: buffers of a layer.
        num_layers: of the pool.
        device: of the pool.
        implementation: "triton", or "torch" for the reference. None: Triton on CUDA, where its kernel takes the dtypes.
        queues: of the ring; None: those of the device.
    """

    def __init__(
        self,
        pool: HostPool,
        staging: range,
        kv: Callable[[int], PagedKV],
        num_layers: int,
        device: torch.device,
        *,
        implementation: str | None = None,
        queues: Queues | None = None,
    ) -> None:
        self._pool, self._staging, self._kv, self._num_layers = pool, staging, kv, num_layers
        self._implementation, self._device = implementation, device
        if queues is None:
            queues = TwoStreams(device, num_layers) if device.type == "cuda" else InOrder()
        self._ring = Ring(queues, num_layers)
        self._places: Sequence[PagedKV] = ()

    def warm(self, num_qo_heads: int, dtype: torch.dtype) -> None:
        """Compile what forwards launch: a request that came first would wait seconds for it. Staging rows are read.

        Args:
            num_qo_heads: of the model.
            dtype: of its queries.
        """
        kv, rows = self._kv(0), self._staging
        for queries in (1, min(128, len(rows))):
            slots = torch.arange(rows.start, rows.start + queries, device=self._device)
            step = StagedStep([Span(slice(0, queries), slots)], [torch.arange(queries)], ())
            q = torch.zeros(queries, num_qo_heads, kv.head_dim, dtype=dtype, device=self._device)
            form = self._form(step, q, kv)
            form.fold(form.own(q, kv, 1.0), 0, q, kv, range(rows.start, rows.start + PAGE_TOKENS), 1.0)

    def plan(self, spans: Sequence[Span], groups: Sequence[tuple[Offload, Tensor]]) -> StagedStep:
        """How a forward is attended.

        Args:
            spans: of all its requests, in batch order.
            groups: by prefix, [num_queries] int64 on the host: query rows behind it.
        """
        pages = len(self._staging) // PAGE_TOKENS
        pieces = [
            Piece(number, len(part) * PAGE_TOKENS, list(runs(part)))
            for number, (offload, _) in enumerate(groups)
            for part in torch.split(offload.pages, pages)
        ]
        return StagedStep(spans, [rows for _, rows in groups], pieces)

    def run(self, step: StagedStep, q: Tensor, kv: PagedKV, layer: int, sm_scale: float) -> Tensor:
        """One layer. Nothing waits for the device. Layers come in order, or their pieces are copied too late.

        Args:
            step: the running forward.
            q: [num_tokens or more, num_qo_heads, head_dim]; rows beyond the batch come out as 0.
            kv: the layer's pool buffers; the new tokens' K and V are written.
            layer: its number.
            sm_scale: attention scale.

        Returns:
            [rows of q, num_qo_heads, v_head_dim] in q's dtype, new memory.
        """
        first = layer * len(step.pieces)
        if layer != step.expected:
            self._places = [self._kv(number) for number in range(self._num_layers)]
            self._ring.begin(range(first, self._num_layers * len(step.pieces)), self._copying(step))
        form = step.form = step.form or self._form(step, q, kv)
        state = form.own(q, kv, sm_scale)

        def attend(piece: Piece, place: int) -> None:
            held = self._places[place]
            keys = range(self._staging.start, self._staging.start + piece.num_tokens)
            form.fold(
                state, piece.group, q, PagedKV(held.k_cache, held.v_cache, kv.k_scale, kv.v_scale), keys, sm_scale
            )

        for number, piece in enumerate(step.pieces, first):
            self._ring.attend(number, partial(attend, piece))
        step.layers.add(layer)
        step.expected = layer + 1
        return state.out.to(q.dtype)

    def _copying(self, step: StagedStep) -> Callable[[int, int], None]:
        def copy(number: int, place: int) -> None:
            layer, at = divmod(number, len(step.pieces))
            held = self._places[place]
            stage(self._pool.layer(layer), step.pieces[at].runs, (held.k_cache, held.v_cache), self._staging.start)

        return copy

    def _form(self, step: StagedStep, q: Tensor, kv: PagedKV) -> PrefillAttention | Reference:
        if self._implementation == "torch" or (self._implementation is None and not self._takes(q, kv)):
            return Reference(step.spans, step.groups, self._device)
        from prefix_kernels.prefill_attention import PrefillAttention

        return PrefillAttention(step.spans, step.groups, AttentionShape.of(q, kv), self._device)

    def _takes(self, q: Tensor, kv: PagedKV) -> bool:
        """Whether tensor cores multiply these dtypes here."""
        try:
            check_dtypes(q.dtype, kv.k_cache.dtype, self._device)
        except ValueError:
            return False
        return self._device.type == "cuda"
