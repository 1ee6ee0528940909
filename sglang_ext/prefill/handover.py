"""Indexes of prompts that a tensor-parallel group prefills: rank 0 builds them of all KV heads, the others hand theirs
over.

For every request that ends, every rank says whether it has its part, whatever it knows of the request. Where all have,
each copies it to host memory and says so. Only then are the parts exchanged: in one order, of sizes that all know. What
can fail on one rank alone was done before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from sglang_ext.config import SparseAttnConfig
from sglang_ext.prefill.builder import covered_tokens
from sglang_ext.prefill.recorder import Capture, QueryRecorder
from sglang_ext.prefill.recording import Admission, BuildView, Recording
from sglang_ext.ranks import Ranks

logger = logging.getLogger(__name__)


class Inputs(Protocol):
    """Of which an index is built."""

    def queries(self) -> Tensor:
        """[num_layers, num_kv_heads, num_samples, head_dim]; once, before any keys."""

    def keys(self, layer: int) -> Tensor:
        """[prefix_len, num_kv_heads, head_dim] post-RoPE keys; each layer once, in order."""

    def close(self) -> None:
        """No more is wanted."""


class OwnInputs:
    """Of the KV heads of this rank, on the device.

    Attributes:
        num_layers: of the model.

    Args:
        view: the target model runner.
        capture: a complete one.
        row: of `req_to_token`, still filled.
        num_tokens: of the prefix.
    """

    def __init__(self, view: BuildView, capture: Capture, row: int, num_tokens: int) -> None:
        self.num_layers = view.num_layers
        self._view, self._capture, self._row, self._num_tokens = view, capture, row, num_tokens
        if capture.samples is not None and capture.samples.is_cuda:
            # A request may be retracted before the layers of its last prefill step have run.
            torch.cuda.synchronize(capture.samples.device)

    @cached_property
    def _slots(self) -> Tensor:
        return self._view.req_to_token[self._row, : self._num_tokens].to(torch.int64)

    def queries(self) -> Tensor:
        """See `Inputs`."""
        return self._capture.queries(self._view.num_kv_heads)

    def keys(self, layer: int) -> Tensor:
        """See `Inputs`."""
        return self._view.kv(layer).keys(self._slots, self._view.dtype)

    def close(self) -> None:
        """Nothing to do."""


def _copied(ranks: Ranks, own: OwnInputs | None) -> tuple[list[Tensor], list[list[Tensor]]] | None:
    """(queries and the keys of each layer in host memory, on rank 0 room for those of all ranks: for queries, and for
    the keys of one layer), where all ranks have their part of a request. Never raises an `Exception`: others wait.
    """
    if not _all(ranks, own is not None) or own is None:
        return None  # nobody has copied anything
    parts: list[Tensor] = []
    rooms: list[list[Tensor]] = []
    try:
        parts = [own.queries().cpu().contiguous()]
        parts += [own.keys(layer).cpu().contiguous() for layer in range(own.num_layers)]
        if ranks.rank == 0:
            rooms = [[torch.empty_like(part) for _ in range(ranks.size)] for part in parts[:2]]
    except Exception:
        logger.exception("sparse attention: keys and queries of a prompt cannot be handed over")
        parts = []
    return (parts, rooms) if _all(ranks, bool(parts)) else None


def gathered(ranks: Ranks, own: OwnInputs | None, device: torch.device) -> Inputs | None:
    """A request ended, on rank 0. A collective with several ranks, `hand_over` on the others.

    Args:
        ranks: rank 0's.
        own: its part; None where no index is to be built.
        device: where it is built.

    Returns:
        Of all KV heads; None where some rank has no part of it.
    """
    if ranks.size == 1:
        return own
    copied = _copied(ranks, own)
    return None if copied is None else GatheredInputs(ranks, *copied, device)


def _all(ranks: Ranks, fine: bool) -> bool:
    return ranks.least([int(fine)])[0] > 0


def hand_over(ranks: Ranks, own: OwnInputs | None) -> None:
    """A request ended, on another rank. The other side of `gathered`, and of all calls of `GatheredInputs`."""
    copied = _copied(ranks, own)
    for part in copied[0] if copied is not None else ():
        ranks.to_first(part)


class GatheredInputs:
    """Of all KV heads, on rank 0. Each call is a collective, and `close` takes what was not asked for.

    Args:
        ranks: rank 0's.
        parts: its own queries, and its keys by layer, on the host.
        rooms: for the queries of all ranks, and for the keys of one layer.
        device: where the index is built.
    """

    def __init__(
        self, ranks: Ranks, parts: Sequence[Tensor], rooms: Sequence[Sequence[Tensor]], device: torch.device
    ) -> None:
        self._ranks, self._device, self._left = ranks, device, list(parts)
        self._rooms = [rooms[0], *[rooms[1]] * (len(self._left) - 1)] if len(rooms) > 1 else list(rooms)

    def queries(self) -> Tensor:
        """See `Inputs`."""
        return self._next()

    def keys(self, layer: int) -> Tensor:
        """See `Inputs`."""
        return self._next()

    def _next(self) -> Tensor:
        parts = self._ranks.to_first(self._left.pop(0), self._rooms.pop(0))
        assert parts is not None
        return torch.cat(parts, dim=1).to(self._device)

    def close(self) -> None:
        """See `Inputs`; in the end nothing is left on any rank."""
        while self._left:
            self._ranks.to_first(self._left.pop(0), self._rooms.pop(0))


class PrefillHelp(Recording):
    """What a rank but the first does while indexes are built: record its heads' queries, and hand over.

    Args:
        config: checked configuration.
        view: the target model runner.
        ranks: of this process.
    """

    def __init__(self, config: SparseAttnConfig, view: BuildView, ranks: Ranks) -> None:
        gqa = view.num_qo_heads // view.num_kv_heads
        self.recorder = QueryRecorder(view.num_layers, view.num_qo_heads, config.query_samples, gqa, config.seed)
        self._config, self._view, self._ranks = config, view, ranks
        self._tokens: dict[str, int] = {}

    def admit(self, request: Admission) -> None:
        """Record every prompt that rank 0 may build an index of."""
        self.discard(request.rid)
        tokens = covered_tokens(len(request.prompt), self._config.build_align)
        if request.again or request.refusal or tokens < self._config.min_sparse_prompt_len:
            return
        self.recorder.discard_broken()  # of prompts that were cached: they would keep others from being recorded
        if self.recorder.start(request.rid, len(request.prompt)):
            self._tokens[request.rid] = tokens

    def discard(self, rid: str) -> None:
        """Forget a request; rank 0 hears of it when it ends."""
        self.recorder.discard(rid)
        self._tokens.pop(rid, None)

    def finish(self, rid: str, row: int) -> None:
        """As on rank 0: the same exchanges. Waits while rank 0 builds."""
        capture, tokens = self.recorder.take(rid), self._tokens.pop(rid, 0)
        recorded = capture is not None and tokens > 0 and capture.problem() is None
        hand_over(self._ranks, OwnInputs(self._view, capture, row, tokens) if recorded and capture else None)
