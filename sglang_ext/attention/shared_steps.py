"""Exact decode of shared prefixes in the running server: which steps it serves, and why it does not serve others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from prefix_kernels.types import PagedKV
from sglang_ext.attention.shared_decode import DecodeBatch, SharedDecode
from sglang_ext.config import SparseAttnConfig
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import RequestTable

logger = logging.getLogger(__name__)

MAX_BATCH = 512
"""Requests of a batch, at most: the buffers grow with it. Larger batches decode on SGLang's own backend."""

_ARENA_POOLS = 2
"""Slots of all lists over those of the KV pool: every slot twice, as lists of requests that are not grouped overlap."""

_ALONE = ("by_request", "unsupported_mode")
"""Reasons for which a request shares nothing."""


class SharedView(Protocol):
    """What is asked of the model runner's view."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_slots: int
    max_requests: int
    device: torch.device

    @property
    def req_to_token(self) -> Tensor: ...


class SharedSteps:
    """Decode steps whose groups are attended exactly, without an index.

    Args:
        config: whether, and from how many tokens on.
        view: of the model runner.
        requests: the live ones.
        counters: receives the rows.
    """

    def __init__(
        self, config: SparseAttnConfig, view: SharedView, requests: RequestTable, counters: Counters
    ) -> None:
        self._view = view
        self._requests = requests
        self._counters = counters
        self._decode: SharedDecode | None = None
        wanted = view.device.type == "cuda" if config.share_prefixes is None else config.share_prefixes
        self.refusal: str | None = None if wanted else "share_prefixes is off"
        if wanted and view.dtype != view.kv_dtype:
            self.refuse(f"queries are in {view.dtype}, keys in {view.kv_dtype}")
        if self.refusal is None:
            self._decode = SharedDecode(
                num_qo_heads=view.num_qo_heads,
                num_kv_heads=view.num_kv_heads,
                head_dim=view.head_dim,
                v_head_dim=view.v_head_dim,
                dtype=view.dtype,
                kv_dtype=view.kv_dtype,
                max_batch=min(view.max_requests, MAX_BATCH),
                arena_size=_ARENA_POOLS * view.num_slots,
                device=view.device,
                min_saved=config.min_shared_tokens,
            )

    def refuse(self, why: str) -> None:
        """Serve no step from now on; the log says why, once."""
        if self.refusal is None:
            self.refusal = why
            logger.warning("sparse attention: shared prefixes are not grouped: %s", why)

    def ended(self, serial: int) -> None:
        """A request gave its slots back."""
        if self._decode is not None:
            self._decode.ended(serial)

    def prepare(self, forward_batch: Any) -> bool:
        """Whether this decode step is attended here; everything that its layers need is then in place.

        Args:
            forward_batch: SGLang's, of a decode step.
        """
        rids, lens = forward_batch.rids, forward_batch.seq_lens_cpu
        if self._decode is None or self.refusal or lens is None or not rids or len(rids) != forward_batch.batch_size:
            return False
        attachments = [self._requests.get(rid) for rid in rids]
        serials = [None if one is None or one.reason in _ALONE else one.serial for one in attachments]
        if len({serial for serial in serials if serial is not None}) < len(serials) - serials.count(None):
            return False  # beam batches: rows are not one request each
        batch = DecodeBatch(
            serials, lens.tolist(), self._view.req_to_token, forward_batch.req_pool_indices, forward_batch.seq_lens
        )
        used = self._decode.prepare(batch)
        self._counters.count_shared(len(rids) if used else 0)
        return used

    def attend(self, q: Tensor, kv: PagedKV, sm_scale: float) -> Tensor:
        """One layer of the prepared step, as `SharedDecode.attend`."""
        assert self._decode is not None
        return self._decode.attend(q, kv, sm_scale)

    def may_capture(self, size: int) -> bool:
        """Whether a graph of batches of that size is worth capturing."""
        return self._decode is not None and self.refusal is None and size <= self._decode.max_batch

    @contextmanager
    def capturing(self, size: int) -> Iterator[None]:
        """Within the block SGLang captures a decode graph of that size; see `may_capture`."""
        assert self._decode is not None
        with self._decode.capturing(size):
            yield

    def snapshot(self) -> dict[str, Any]:
        """State as plain values."""
        state = self._decode.snapshot() if self._decode is not None else {}
        return {**state, "refusal": self.refusal}
