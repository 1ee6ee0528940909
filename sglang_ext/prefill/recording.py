"""What a process makes of the prompts it prefills: the common part of those that build and of one that captures."""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from prefix_index import printable_values
from prefix_kernels.types import PagedKV
from sglang_ext.config import SparseAttnConfig
from sglang_ext.prefill.recorder import MAX_CAPTURES, Chunk, QueryRecorder

logger = logging.getLogger(__name__)


class BuildView(Protocol):
    """What is read of the model runner."""

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def req_to_token(self) -> Tensor: ...
    def kv(self, layer: int) -> PagedKV: ...


@dataclass(frozen=True)
class Admission:
    """A request, as it was when it was looked up.

    Attributes:
        rid: its id.
        prompt: its token ids.
        namespace: everything in its RadixKey that is not tokens.
        refusal: (reason, detail) of one that stays dense in any case.
        indexed: tokens of the index that serves it; 0 without one.
        hashes: of its prompt's pages, chained; empty where they are not known: hashing takes milliseconds.
        at: monotonic seconds of the look-up.
        again: it had a slot before, and was retracted.
    """

    rid: str
    prompt: Sequence[int]
    namespace: Mapping[str, str | None]
    refusal: tuple[str, str] | None
    indexed: int = 0
    hashes: Sequence[bytes] = ()
    at: float = field(default_factory=time.monotonic)
    again: bool = False


class Recording(ABC):
    """Told of every request that has a slot, from then until it gives it back, and of every forward, by the runtime, on
    the scheduler's thread. A request that waits holds nothing here: it may be aborted, and nobody says so.

    By default everything but `admit` and `finish` records no more than queries.

    Args:
        config: checked configuration.
        view: the target model runner.
        late, max_captures: of the `QueryRecorder`.

    Attributes:
        recorder: of queries.
        records_decode: whether decode steps leave queries, too.
    """

    records_decode: ClassVar[bool] = False

    def __init__(
        self,
        config: SparseAttnConfig,
        view: BuildView,
        *,
        late: tuple[int, int] = (0, 0),
        max_captures: int = MAX_CAPTURES,
    ) -> None:
        self._config, self._view = config, view
        heads, gqa = view.num_qo_heads, view.num_qo_heads // view.num_kv_heads
        self.recorder = QueryRecorder(
            view.num_layers, heads, config.query_samples, gqa, config.seed, late, max_captures=max_captures
        )

    @abstractmethod
    def admit(self, request: Admission) -> None:
        """A request got its slot."""

    def settle(self) -> None:
        """Take note of what other threads found out."""
        return

    def begin_prefill(
        self, rids: Sequence[str], firsts: Sequence[int], counts: Sequence[int], device: torch.device
    ) -> list[Chunk]:
        """Before the layers of a prefill step run: what it leaves behind. As `QueryRecorder.begin_step`."""
        self.settle()
        return self.recorder.begin_step(rids, firsts, counts, device)

    def prefilled(self, chunks: Sequence[Chunk]) -> None:
        """Behind the layers of a prefill step."""
        return

    def decoding(self, rids: Sequence[str], rows: Tensor) -> None:
        """Before a decode step, on its stream.

        Args:
            rids: requests of the batch.
            rows: [batch_size] their rows of `req_to_token`, on the device.
        """
        return

    @abstractmethod
    def finish(self, rid: str, row: int) -> None:
        """A request gives its slot back: finished, aborted or retracted. Its row of `req_to_token` is still filled."""

    def discard(self, rid: str) -> None:
        """Forget a request."""
        self.recorder.discard(rid)

    def snapshot(self) -> dict[str, Any]:
        """State as plain values."""
        return {}

    def close(self) -> None:
        """Forget all requests, and end threads."""
        return

    def _report(self, rid: str, /, **fields: Any) -> None:
        """Append a JSON line about a request to the file `build_report`, if there is one; in any thread.

        A file that cannot be written is logged: the server must live on.
        """
        if not self._config.build_report:
            return
        try:
            with open(self._config.build_report, "a") as file:
                file.write(json.dumps(printable_values({"rid": rid, **fields})) + "\n")
        except OSError as error:
            logger.error("sparse attention: build_report cannot be written (%s): %s %s", error, rid, fields)


def prefill_chunks(recording: Recording, forward_batch: Any, device: torch.device) -> list[Chunk]:
    """Of a prefill step, from SGLang's forward batch."""
    if not forward_batch.rids:
        recording.settle()
        return []
    counts, firsts = (
        given if isinstance(given, list) else torch.as_tensor(given).tolist()
        for given in (forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu)
    )
    return recording.begin_prefill(forward_batch.rids, firsts, counts, device)


def decode_chunks(recording: Recording | None, forward_batch: Any, device: torch.device) -> Sequence[Chunk]:
    """Of a decode step, from SGLang's forward batch: what it leaves behind, in a process that captures."""
    rids = forward_batch.rids
    if recording is None or not rids or len(rids) != forward_batch.batch_size or len(set(rids)) != len(rids):
        return ()  # padded or beam batches: rows are not one request each
    recording.decoding(rids, forward_batch.req_pool_indices)
    if not recording.records_decode:
        return ()
    lens = forward_batch.seq_lens_cpu
    lens = (lens if lens is not None else forward_batch.seq_lens).tolist()
    return recording.recorder.begin_step(rids, [length - 1 for length in lens], [1] * len(lens), device)
