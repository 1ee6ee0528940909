"""Offload in one scheduler process: which prefixes are copied out, which requests have one in front, how they attend.

A request whose prefix lies in host memory has *virtual* slots in its first P entries of `req_to_token`: entry i is
i % page_size, a slot of SGLang's padding page, which nothing may read. SGLang's prefix cache and allocator see what
stands behind them only (`compat.offload_tree`). A forward with such a row is attended here, or raises.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_ext.config import PAGE_TOKENS
from sglang_ext.model_view import ModelView
from sglang_ext.offload.attention import Span, StagedAttention, StagedStep
from sglang_ext.offload.directory import Offload, OffloadDirectory, OffloadState
from sglang_ext.offload.host import HostPool
from sglang_ext.options import Offload as Options
from sglang_ext.prefix.requests import ALONE, Attachment

logger = logging.getLogger(__name__)

COPY_BYTES = 256 << 20
"""Most bytes that one decode step copies out: some 5 ms of a PCIe 5 link."""


class Offloading:
    """Used by the scheduler's thread only; copies are queued on the stream that runs the forwards.

    Attributes:
        directory: of the prefixes in host memory.
        page_size: SGLang's.
        refused: requests whose prefix was not copied out, by reason; once for each.
        translated: requests that got their slots behind a prefix in host memory.

    Args:
        options: checked.
        view: of the model runner.
        pool: of host memory.
        staging: rows of the KV pool's tensors behind the allocator's.
        page_size: SGLang's; a prefix is a multiple of it.
    """

    def __init__(self, options: Options, view: ModelView, pool: HostPool, staging: range, page_size: int) -> None:
        self._options, self._view, self._pool = options, view, pool
        self._staging = staging
        self._attention = StagedAttention(pool, staging)
        self.directory = OffloadDirectory(pool)
        self.page_size = page_size
        self._matched: weakref.WeakKeyDictionary[Hashable, Offload] = weakref.WeakKeyDictionary()
        self._rows: dict[int, Offload] = {}
        per_token = 2 * view.num_layers * view.num_kv_heads * view.head_dim * view.kv_dtype.itemsize
        self._piece = max(1, COPY_BYTES // (per_token * PAGE_TOKENS)) * PAGE_TOKENS
        self.refused: Counter[str] = Counter()
        self.translated = 0
        self._off = False

    # -- from match to slot ----------------------------------------------------------------------------------

    def wanted(self, request: Hashable, attachment: Attachment | None, limit: int) -> Offload | None:
        """What a waiting request has in front, if its prefix lies in host memory now. Asked at each match; the last
        one before it gets its slot counts. Nothing leaves the host in between: room is made in decode steps only.

        Args:
            request: SGLang's request object.
            attachment: what is known of it.
            limit: tokens that its match may cover.
        """
        self._matched.pop(request, None)
        if self._off or attachment is None or attachment.entry is None or attachment.reason in ALONE:
            return None
        found = self.directory.get(attachment.entry.digest)
        if found is None or found.state is not OffloadState.HOST or found.prefix_len > limit:
            return None
        self._matched[request] = found
        return found

    def virtual_slots(self, offload: Offload, device: torch.device) -> Tensor:
        """[prefix_len] int64: entry i is i % page_size, so that the page behind them begins anew for SGLang."""
        return torch.arange(offload.prefix_len, dtype=torch.int64, device=device) % self.page_size

    def matched(self, request: Hashable) -> Offload | None:
        """What the last match of a request without a slot had in front."""
        return self._matched.get(request)

    def slot_taken(self, request: Hashable, row: int) -> bool:
        """A request has a slot: what its last match had in front stays in host memory until the slot is given back.
        Called at each chunk of a prefill; the first counts.

        Returns:
            Whether it has virtual slots.
        """
        found = self._matched.pop(request, None)
        if found is None:
            return row in self._rows
        if found.state is not OffloadState.HOST or found.dropped or row in self._rows:
            raise RuntimeError(
                f"offload: expected the prefix that a request was matched with to be in host memory; it is "
                f"{'dropped' if found.dropped else found.state.value}. Please report this with the server's log"
            )
        self.directory.pin(found)
        self._rows[row] = found
        self.translated += 1
        return True

    def slot_freed(self, row: int) -> None:
        """A row is given back: finish, abort and retraction alike."""
        found = self._rows.pop(row, None)
        if found is not None:
            self.directory.unpin(found)

    def of_row(self, row: int) -> Offload | None:
        """What a row of `req_to_token` has in front; None where all its slots are real."""
        return self._rows.get(row)

    def drop(self, *, forever: bool = False) -> None:
        """The cache was flushed; or, `forever`, weights were changed: what is in host memory is of the old ones."""
        self._off = self._off or forever
        self._matched.clear()
        self.directory.drop()

    # -- a forward -------------------------------------------------------------------------------------------

    def begin(self, forward_batch: Any) -> StagedStep | None:
        """How a forward is attended; None: no row of it has virtual slots.

        Raises:
            RuntimeError: one has, and there is no way here to attend this kind of forward.
        """
        if not self._rows:
            return None
        rows = _on_host(forward_batch, "req_pool_indices_cpu", "req_pool_indices")[: forward_batch.batch_size]
        fronts = [self._rows.get(row) for row in rows]
        if not any(fronts):
            return None
        mode = forward_batch.forward_mode.name
        if mode not in ("DECODE", "EXTEND"):
            raise RuntimeError(
                f"offload: expected a decode or extend step for rows whose prefix lies in host memory; got {mode}. "
                "SGLang's own kernels must not read their slots: remove offload from --sparse-attn-config"
            )
        lens = _on_host(forward_batch, "seq_lens_cpu", "seq_lens")
        counts = [1] * len(rows)
        if mode == "EXTEND":
            counts = _on_host(forward_batch, "extend_seq_lens_cpu", "extend_seq_lens")
            self._check_rows(rows, fronts)
        return self._staged(rows, lens, counts, fronts)

    def _check_rows(self, rows: Sequence[int], fronts: Sequence[Offload | None]) -> None:
        """A row has virtual slots exactly where it is known to have them; waits for the device."""
        first = self._view.req_to_token[torch.as_tensor(list(rows), device=self._view.device), 0].tolist()
        for row, slot, front in zip(rows, first, fronts, strict=True):
            if (slot < self.page_size) != (front is not None):
                raise RuntimeError(
                    f"offload: expected row {row} to begin with a {'real' if front is None else 'virtual'} slot; got "
                    f"slot {slot}, page size {self.page_size}. Please report this with the server's log"
                )

    def _staged(
        self, rows: Sequence[int], lens: Sequence[int], counts: Sequence[int], fronts: Sequence[Offload | None]
    ) -> StagedStep:
        spans, queries, begin = [], dict[Offload, list[Tensor]](), 0
        for row, length, count, front in zip(rows, lens, counts, fronts, strict=True):
            first = 0 if front is None else front.prefix_len
            spans.append(Span(slice(begin, begin + count), self._view.req_to_token[row, first:length].to(torch.int64)))
            if front is not None:
                own = torch.arange(begin, begin + count, device=self._view.device)
                queries.setdefault(front, []).append(own)
            begin += count
        return StagedStep(spans, [(front, torch.cat(parts)) for front, parts in queries.items()])

    def attend(self, step: StagedStep, q: Tensor, layer: int, sm_scale: float) -> Tensor:
        """One layer of it; see `StagedAttention.run`."""
        return self._attention.run(step, q, self._view.kv(layer), layer, sm_scale)

    def ended(self, step: StagedStep) -> None:
        """Behind the layers. Raises RuntimeError where one of them was attended elsewhere, from virtual slots."""
        missing = sorted(set(range(self._view.num_layers)) - step.layers)
        if missing:
            raise RuntimeError(
                f"offload: expected all layers of a step with virtual slots to be attended here; layers {missing} were "
                "not. Their output is wrong: remove offload from --sparse-attn-config, and report the model and flags"
            )

    # -- copying out -----------------------------------------------------------------------------------------

    def decoding(self, forward_batch: Any, attachments: Sequence[Attachment | None]) -> None:
        """Before a decode step: copy a piece of one prefix that a row of it has on the device. The row's request runs,
        so its lock keeps these slots; what is queued later and overwrites them comes behind the copy.
        """
        if self._off:
            return
        rows = _on_host(forward_batch, "req_pool_indices_cpu", "req_pool_indices") if self._rows else ()
        virtual = {place for place, row in enumerate(rows) if row in self._rows}
        for place, one in enumerate(attachments):
            if place in virtual or one is None or one.entry is None or one.reason in ALONE:
                continue
            if one.offload_refusal is not None:
                continue
            digest, tokens = one.entry.digest, one.entry.identity.num_tokens
            found = self.directory.get(digest)
            if found is not None and found.state is not OffloadState.COPYING:
                continue
            begun = self._unfit(tokens) or found or self.directory.begin(digest, tokens)
            if isinstance(begun, str):
                one.offload_refusal = begun
                self.refused[begun] += 1
                continue
            self._copy(begun, forward_batch.req_pool_indices[place : place + 1])
            return

    def _unfit(self, tokens: int) -> str | None:
        """Why a prefix of so many tokens is never copied out, in a word."""
        if tokens < self._options.min_tokens:
            return "short"
        return "page_size" if tokens % self.page_size else None

    def _copy(self, offload: Offload, row: Tensor) -> None:
        tokens = min(self._piece, offload.prefix_len - offload.copied)
        part = slice(offload.copied, offload.copied + tokens)
        pages = offload.pages[part.start // PAGE_TOKENS : part.stop // PAGE_TOKENS]
        try:
            self._pool.backup(self._view.req_to_token.index_select(0, row)[0, part].to(torch.int64), pages)
        except Exception as error:  # the server lives on
            logger.error("sparse attention: a prefix cannot be copied to host memory", exc_info=error)
            self.directory.failed(offload)
            return
        self.directory.copied(offload, tokens)

    # -- what others see -------------------------------------------------------------------------------------

    def summary(self) -> str:
        """One line for people, at the start."""
        tokens = self._pool.num_pages * PAGE_TOKENS
        rows, least = self._staging, self._options.min_tokens
        return (
            f"{self._pool.nbytes:,} bytes of host memory for {tokens:,} tokens of prefixes of {least:,} or more; "
            f"{len(rows):,} rows of the KV tensors behind SGLang's, from {rows.start:,} on, for staging"
        )

    def figures(self) -> dict[str, Any]:
        """What is exported, by metric."""
        return {"offload": {"translated": self.translated, **self.directory.events, **self.refused}}

    def snapshot(self) -> dict[str, Any]:
        """State as plain values."""
        self.directory.check_integrity()
        counts = {"translated": self.translated, "refused": dict(self.refused), "rows": len(self._rows)}
        return {**self.directory.snapshot(), "events": dict(self.directory.events), **counts}


def _on_host(forward_batch: Any, mirror: str, name: str) -> list[int]:
    """A batch's numbers: from the copy on the host, where this release has one."""
    found = getattr(forward_batch, mirror, None)
    found = getattr(forward_batch, name) if found is None else found
    return [int(one) for one in (found if isinstance(found, list) else found.tolist())]
