"""Decode steps of the running server that are attended in groups: which of them, on which path, and why not others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import check_dtypes
from prefix_kernels.types import PagedKV
from sglang_ext.attention.attentions import LayerShape
from sglang_ext.attention.private_index import PrivateIndex, PrivateRules
from sglang_ext.attention.shared_decode import SharedDecode
from sglang_ext.attention.slot_tracker import DecodeBatch, SlotTracker
from sglang_ext.config import DecodePath, SparseAttnConfig
from sglang_ext.indexing.base import IndexSpec
from sglang_ext.indexing.layer_plan import LayerPlan
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import ALONE, Attachment, RequestTable
from sglang_ext.prefix.residency import ResidentIndex
from sglang_ext.ranks import OneRank, Ranks

if TYPE_CHECKING:
    from sglang_ext.attention.sparse_decode import SparseDecode

logger = logging.getLogger(__name__)

MAX_BATCH = 128
"""Requests of a batch, at most: the buffers grow with it. Larger batches decode on SGLang's own backend."""

_ARENA_POOLS = 2
"""Slots of all lists over those of the KV pool: every slot twice, as lists of requests that are not grouped overlap."""

_MEMBERS = 32
"""Requests of the group that decides how little may be shared: fewer must share more to be worth it."""


class Path(str, Enum):
    """How a step is attended here; the names of the decode graphs."""

    EXACT = "grouped"
    SPARSE = "sparse"
    KEPT = "kept"
    """Sparsely, by what an earlier step selected (`search_period`)."""


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
    decode_graphs: bool
    device: torch.device

    @property
    def req_to_token(self) -> Tensor: ...
    def kv(self, layer: int) -> PagedKV: ...


class SharedSteps:
    """Decode steps that are attended in groups: exactly, without an index, or sparsely by the kernels of the graphs.

    Args:
        config: whether, from how many tokens on, and on which path.
        view: of the model runner.
        requests: the live ones.
        counters: receives the rows.
        spec: of the configured method.
        layer_plan: role of each layer.
        dense_heads: per layer, KV heads that attend everything, of the whole model: all ranks must answer alike.
        ranks: of this process.
    """

    def __init__(
        self,
        config: SparseAttnConfig,
        view: SharedView,
        requests: RequestTable,
        counters: Counters,
        spec: IndexSpec,
        layer_plan: LayerPlan,
        dense_heads: Sequence[Sequence[int]] = (),
        ranks: Ranks | None = None,
    ) -> None:
        ranks = ranks or OneRank()
        self._path = config.decode_path
        self._kept_steps = 0
        self._private_rules = PrivateRules.of(config)
        self._anchors = layer_plan.anchor_layers
        self._view = view
        self._requests = requests
        self._counters = counters
        self._decode: SharedDecode | None = None
        self.sparse: SparseDecode | None = None
        on_gpu = view.device.type == "cuda"
        wanted = on_gpu if config.share_prefixes is None else config.share_prefixes
        self.refusal: str | None = None if wanted else "share_prefixes is off"
        if config.decode_path is DecodePath.STOCK:
            self.refusal = "decode_path is stock"
        if self.refusal is None and on_gpu:
            try:
                check_dtypes(view.dtype, view.kv_dtype, view.device)
            except ValueError as error:
                self.refuse(str(error))
        if self.refusal is not None:
            logger.info("sparse attention: decode steps are not attended in groups: %s", self.refusal)
            return
        shape = LayerShape(
            view.num_qo_heads, view.num_kv_heads, view.head_dim, view.v_head_dim, view.dtype, view.kv_dtype
        )
        min_saved, max_batch = config.min_shared_tokens, min(view.max_requests, MAX_BATCH)
        implementation = "triton" if on_gpu else "reference"
        self._tracker = SlotTracker(
            max_batch, min_saved // _MEMBERS, view.device, implementation, lockstep=ranks.size > 1
        )
        arena_size = _ARENA_POOLS * view.num_slots
        graphs = view.decode_graphs
        self._decode = SharedDecode(shape, self._tracker, arena_size, view.device, min_saved, captured=graphs)
        if graphs and config.decode_path is not DecodePath.EXACT:
            from sglang_ext.attention.graph_refusal import graph_refusal
            from sglang_ext.attention.list_sets import ListsTooLargeError
            from sglang_ext.attention.sparse_decode import SparseDecode

            message = graph_refusal(config, spec, layer_plan, dense_heads)
            if message:
                logger.warning("sparse attention: indexes are not used inside decode graphs: %s", message)
                return
            try:
                self.sparse = SparseDecode(
                    shape,
                    config,
                    spec,
                    layer_plan,
                    self._tracker,
                    arena_size=arena_size,
                    max_prefix_len=view.req_to_token.shape[1],
                    device=view.device,
                    captured=True,
                    beside=self._decode.attentions,
                    ranks=ranks,
                )
            except ListsTooLargeError as error:
                logger.warning("sparse attention: indexes are not used inside decode graphs: %s", error)

    def refuse(self, why: str) -> None:
        """Serve no step from now on; the log says why, once."""
        if self.refusal is None:
            self.refusal = why
            logger.warning("sparse attention: decode steps are left to SGLang's own backend: %s", why)

    @property
    def uses_indexes(self) -> bool:
        """Whether an index could serve a step here. After a refusal none does, though the step that runs may end."""
        return self.sparse is not None and self.refusal is None

    def ended(self, serial: int) -> None:
        """A request gave its slots back."""
        if self._decode is not None:
            self._tracker.ended(serial)

    def step_elsewhere(self, gone: Sequence[int] = ()) -> None:
        """A decode step is not attended here; serials of requests that share nothing from now on."""
        for serial in gone:
            self.ended(serial)
        if self.sparse is not None:
            self.sparse.forget_search()

    def prepare(self, forward_batch: Any, usable: Callable[[Attachment | None], ResidentIndex | None]) -> Path | None:
        """How this decode step is attended here; everything that its layers need is then in place. None: not here.

        Args:
            forward_batch: SGLang's, of a decode step.
            usable: the ready index of a request, if it has one; asked only where decode steps replay graphs.
        """
        found = self._batch(forward_batch)
        if found is None:
            self.step_elsewhere()
            return None
        assert self._decode is not None
        batch, attachments = found
        rids, seq_lens = forward_batch.rids, batch.seq_lens
        self._tracker.learn(batch)
        ready = [usable(one) for one in attachments] if self._view.decode_graphs else []
        if self.sparse is not None:
            ready = [one if one and n > one.prefix_len else None for one, n in zip(ready, seq_lens, strict=True)]
            private = self._private(attachments, ready, batch)
            if self.sparse.prepare(batch, ready, private, forced=self._path is DecodePath.SPARSE):
                self._count_sparse(len(rids))
                return Path.SPARSE if self.sparse.searches else Path.KEPT
            why = "cost_model" if self.sparse.too_dear else "unsupported_mode"
            for one, index in zip(attachments, ready, strict=True):
                if one is not None and index is not None and why not in one.reported:
                    one.reported.add(why)
                    self._counters.count_fallback(why)
        used = self._decode.prepare(batch)
        self._counters.count_shared(len(rids) if used else 0)
        if self._view.decode_graphs:
            self._counters.count_step(0, len(rids), 0)
        return Path.EXACT if used else None

    def _batch(self, forward_batch: Any) -> tuple[DecodeBatch, list[Attachment | None]] | None:
        """A decode step as it is described here, and what is known of its requests; None: it is not attended here."""
        rids, lens = forward_batch.rids, forward_batch.seq_lens_cpu
        if self._decode is None or self.refusal or lens is None or not rids or len(rids) != forward_batch.batch_size:
            return None
        attachments = [self._requests.get(rid) for rid in rids]
        serials = [None if one is None or one.reason in ALONE else one.serial for one in attachments]
        repeated = len({serial for serial in serials if serial is not None}) < len(serials) - serials.count(None)
        if repeated or len(rids) > self._tracker.max_batch:
            return None  # beam batches: rows are not one request each
        rows = forward_batch.req_pool_indices
        batch = DecodeBatch(serials, lens.tolist(), self._view.req_to_token, rows, forward_batch.seq_lens)
        return batch, attachments

    def _count_sparse(self, rows: int) -> None:
        assert self.sparse is not None
        self._kept_steps += not self.sparse.searches
        sparse = sum(one.rows for one in self.sparse.reads)
        self._counters.count_step(sparse, rows - sparse, max(one.rows for one in self.sparse.reads))
        prefix = sum(one.rows * one.prefix_len for one in self.sparse.reads)
        self._counters.count_attended(self.sparse.attended(), prefix)
        self._counters.count_attended_private(*self.sparse.attended_private())

    def _private(
        self, attachments: Sequence[Attachment | None], ready: Sequence[ResidentIndex | None], batch: DecodeBatch
    ) -> list[PrivateIndex | None]:
        """Per row, the index of its own tokens, with the arrays of all layers."""
        assert self.sparse is not None
        if self._private_rules is None or not self._anchors:
            return []
        free = self.sparse.free_groups(batch.serials, ready)
        found = self._private_rules.renew(attachments, ready, batch.seq_lens, free)
        for row, own in enumerate(found):
            if own is not None and not own.is_complete:
                begin = own.prefix.prefix_len
                slots = batch.req_to_token[batch.req_pool_indices[row : row + 1]][0, begin : begin + own.prefix_len]
                own.complete(self._anchors, self._view.kv, slots.to(torch.int64), self._view.dtype)
        return found

    def attend(self, path: Path, q: Tensor, kv: PagedKV, layer: int, sm_scale: float) -> Tensor:
        """One layer of the prepared step, as `SharedDecode.attend` and `SparseDecode.attend`."""
        if path is not Path.EXACT:
            assert self.sparse is not None
            return self.sparse.attend(q, kv, layer, sm_scale)
        assert self._decode is not None
        return self._decode.attend(q, kv, sm_scale)

    def paths_of(self, size: int) -> tuple[Path, ...]:
        """Paths whose graphs of batches of that size are worth capturing."""
        if self._decode is None or self.refusal is not None or size > self._tracker.max_batch:
            return ()
        if self.sparse is None:
            return (Path.EXACT,)
        return (Path.EXACT, Path.SPARSE, Path.KEPT) if self.sparse.keeps_searches else (Path.EXACT, Path.SPARSE)

    def tune(self, sizes: Iterable[int]) -> None:
        """Before the first capture: measure, once, what kernels of these sizes need and is not known of this GPU."""
        ours = [size for size in sizes if self.paths_of(size)]
        if self._decode is not None and ours:
            self._decode.attentions.tune(ours)

    @contextmanager
    def capturing(self, size: int, path: Path) -> Iterator[None]:
        """Within the block SGLang captures a decode graph of that size; see `paths_of`. Costs are measured before."""
        if path is not Path.EXACT:
            assert self.sparse is not None
            with self.sparse.capturing(size, searches=path is Path.SPARSE):
                if self.sparse.measured(size) is None:
                    costs = self.sparse.measure(size, self._view.kv(0))
                    logger.info("sparse attention: costs of %d requests, us a layer: %s", size, costs)
                yield
            return
        assert self._decode is not None
        with self._decode.capturing(size):
            self._warm()
            yield

    def _warm(self) -> None:
        """Compile what prepares a step, with tensors as SGLang's are; later calls find it compiled."""
        assert self._decode is not None
        one = torch.ones(1, dtype=torch.int64, device=self._view.device)
        self._decode.warm(DecodeBatch([None], [1], self._view.req_to_token, one - 1, one))

    def snapshot(self) -> dict[str, Any]:
        """State as plain values."""
        if self._decode is None:
            return {"refusal": self.refusal}
        known = {"requests": len(self._tracker), "compared": len(self._tracker.prefixes)}
        known["kept_steps"] = self._kept_steps
        plans = self._decode.plans + (self.sparse.plans if self.sparse is not None else 0)
        return {**known, "plans": plans, "sparse": self.uses_indexes, "refusal": self.refusal}
