"""Attention of rows whose prefix lies in host memory, a layer at a time, through pieces on the device.

A row at position p with a prefix of P tokens on the host attends [P, p] from its own slots, then [0, P) in pieces
(`prefill_attention` has the formulas). Rows without such a prefix attend [0, p] from their slots, and so do all rows in
layers that have the prefix on the device, too. On CUDA a piece is attended while the next ones are copied, those of the
next layer among them: the link does not rest while the model does something else than attend. All of it is exact, but
for rows that select (`offload.selecting`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import AttentionShape, check_dtypes
from prefix_kernels.prefill_attention import Reference, Span
from prefix_kernels.types import PagedKV
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.offload.directory import Offload
from sglang_ext.offload.host import HostPool, Run, runs
from sglang_ext.offload.ring import Queues, Ring, TwoStreams
from sglang_ext.offload.selecting import Behind, PlannedSelection, PrefillSelection

if TYPE_CHECKING:
    from prefix_kernels.prefill_attention.runner import PrefillAttention

logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Of a prefix, at most as many pages as a place has room for.

    Attributes:
        group: whose prefix it is of.
        num_pages: of it.
        runs: its pages on the host.
    """

    group: int
    num_pages: int
    runs: Sequence[Run]


@dataclass
class StagedStep:
    """One forward of a batch with such rows.

    Attributes:
        spans: of all its requests, in batch order.
        whole: the same with the slots of prefixes in front, for layers that have these on the device.
        groups: query rows behind each prefix, [num_queries] int64 on the host.
        pieces: by layer, of the prefixes that come to it from the host.
        selected: of the last groups; None: there are none that select.
        layers: that attended.
        expected: layer whose pieces are on their way.
        forms: what attends, by whether the layer has prefixes on the device; made by the first one.
        copies: all pieces, as they come, each with its layer.
        firsts: by layer, number of its first piece among them.
    """

    spans: Sequence[Span]
    whole: Sequence[Span]
    groups: Sequence[Tensor]
    pieces: Sequence[Sequence[Piece]]
    selected: PlannedSelection | None = None
    layers: set[int] = field(default_factory=set)
    expected: int | None = None
    forms: dict[bool, PrefillAttention | Reference] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.copies = [(layer, piece) for layer, of in enumerate(self.pieces) for piece in of]
        self.firsts = list(accumulate(map(len, self.pieces), initial=0))


PLACES = 4
"""Pieces that are on the device at once: one is attended, the others come, or have come."""


class StagedAttention:
    """Attends layers of such forwards.

    Args:
        pool: of host memory.
        staging_tokens: of a piece, at most; rounded up to whole pages.
        num_layers: of the pool.
        device: of the pool.
        implementation: "triton", or "torch" for the reference. None: Triton on CUDA, where its kernel takes the dtypes.
        queues: of the ring; None: those of the device.

    Attributes:
        selection: of what selects; None: nothing does.
        places: [PLACES, pages of a piece, num_kv_heads, PAGE_TOKENS, k_dim + v_dim] on the device.
    """

    def __init__(
        self,
        pool: HostPool,
        staging_tokens: int,
        num_layers: int,
        device: torch.device,
        *,
        implementation: str | None = None,
        queues: Queues | None = None,
    ) -> None:
        self._pool, self._num_layers = pool, num_layers
        self.selection: PrefillSelection | None = None
        self._implementation, self._device = implementation, device
        if queues is None:
            queues = TwoStreams(device, PLACES) if device.type == "cuda" else Queues()
        self._ring = Ring(queues, PLACES)
        pages, of_host = -(-staging_tokens // PAGE_TOKENS), pool.layer(0)
        self.places = torch.zeros((PLACES, pages, *of_host.shape[1:]), dtype=of_host.dtype, device=device)

    def warm(self, num_qo_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Compile what forwards launch: a request that came first would wait seconds for it.

        Args:
            num_qo_heads: of the model.
            head_dim: of a query and a key.
            dtype: of its queries.
        """
        # The layers' own scales are not known at the start.
        slot = self.places[0, 0, :, 0][None]
        kv = PagedKV(slot[..., :head_dim].contiguous(), slot[..., head_dim:].contiguous())
        if not self._takes(dtype, kv.k_cache.dtype):
            logger.warning(
                "sparse attention: offload: expected queries and KV of 16 or 32 bits, got %s and %s: a prefill behind "
                "host memory attends in torch, slowly. Leave out --kv-cache-dtype, or offload",
                dtype, kv.k_cache.dtype,
            )  # fmt: skip
        for queries in (1, 128):
            slots = torch.zeros(queries, dtype=torch.int64, device=self._device)
            step = StagedStep([Span(slice(0, queries), slots)], (), [torch.arange(queries)], ())
            q = torch.zeros(queries, num_qo_heads, head_dim, dtype=dtype, device=self._device)
            form = self._form(step, q, kv, on_device=False)
            form.fold(form.own(q, kv, 1.0), 0, q, kv, self.places[0, :1], 1.0)

    def plan(
        self,
        spans: Sequence[Span],
        whole: Sequence[Span],
        groups: Sequence[tuple[Offload, Tensor]],
        selecting: Sequence[Behind] = (),
    ) -> StagedStep:
        """How a forward is attended.

        Args:
            spans: of all its requests, in batch order.
            whole: the same with the slots of prefixes in front, for layers that have these on the device.
            groups: by prefix, [num_queries] int64 on the host: query rows behind it.
            selecting: what selects, that fits together; in none of `groups`.
        """
        every = [*groups, *((one.offload, one.rows) for one in selecting)]
        pieces = [
            Piece(number, len(part), list(runs(part)))
            for number, (offload, _) in enumerate(every)
            for part in torch.split(offload.pages, self.places.shape[1])
        ]
        by_layer = [[] if layer in self._pool.dense_layers else pieces for layer in range(self._num_layers)]
        selected = None
        if selecting:
            assert self.selection is not None
            exact = [piece for piece in pieces if piece.group < len(groups)]
            by_layer = [exact if self.selection.selects(layer) else of for layer, of in enumerate(by_layer)]
            selected = self.selection.plan(selecting)
        return StagedStep(spans, whole, [of for _, of in every], by_layer, selected)

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
        first = step.firsts[layer]
        if layer != step.expected:
            self._ring.begin(range(first, len(step.copies)), self._copying(step))
        on_device = layer in self._pool.dense_layers
        if on_device not in step.forms:
            step.forms[on_device] = self._form(step, q, kv, on_device=on_device)
        form = step.forms[on_device]
        state = form.own(q, kv, sm_scale)

        def attend(piece: Piece, place: int) -> None:
            form.fold(state, piece.group, q, kv, self.places[place, : piece.num_pages], sm_scale)

        for number, piece in enumerate(step.pieces[layer], first):
            self._ring.attend(number, partial(attend, piece))
        if step.selected is not None and self.selection is not None and self.selection.selects(layer):
            whole = len(step.groups) - len(step.selected.groups)
            for number, pages in self.selection.run(step.selected, layer, q, sm_scale):
                form.fold(state, whole + number, q, kv, pages, sm_scale)
        step.layers.add(layer)
        step.expected = layer + 1
        return state.out.to(q.dtype)

    def _copying(self, step: StagedStep) -> Callable[[int, int], None]:
        def copy(number: int, place: int) -> None:
            layer, piece = step.copies[number]
            host, target = self._pool.layer(layer), self.places[place]
            for first, page, count in piece.runs:
                target[first : first + count].copy_(host[page : page + count], non_blocking=True)

        return copy

    def _form(self, step: StagedStep, q: Tensor, kv: PagedKV, *, on_device: bool) -> PrefillAttention | Reference:
        spans, groups = (step.whole, ()) if on_device else (step.spans, step.groups)
        if self._implementation == "torch" or (
            self._implementation is None and not self._takes(q.dtype, kv.k_cache.dtype)
        ):
            return Reference(spans, groups, self._device)
        from prefix_kernels.prefill_attention.runner import PrefillAttention

        return PrefillAttention(spans, groups, AttentionShape.of(q, kv), self._device)

    def _takes(self, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
        """Whether tensor cores multiply these dtypes here. Of fp8 the kernel's output was wrong on an H100."""
        try:
            check_dtypes(dtype, kv_dtype, self._device)
        except ValueError:
            return False
        return self._device.type == "cuda" and kv_dtype.itemsize > 1
