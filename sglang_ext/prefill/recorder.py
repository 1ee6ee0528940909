"""Queries of a prefill, sampled as they pass: a reservoir per request, layer and KV head.

Bounded memory, uniform over the tokens of the prompt: Algorithm R of Vitter (1985). One decision per token holds for
all layers and heads. A capture for calibration also keeps every late token: the prompt's end and the decode steps.

What a process makes of them: `Recording`, the common part of those that build indexes and of one that captures.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefix_index import printable_values
from sglang_ext.metrics import Figures
from sglang_ext.model_view import ModelView, on_host
from sglang_ext.options import SparseAttnConfig

logger = logging.getLogger(__name__)

#: Requests recorded at a time; an 8B model's capture takes 134 MB at 2,048 rows.
MAX_CAPTURES = 8


@dataclass(eq=False)
class Capture:
    """What was recorded of one request.

    Attributes:
        prompt_len: position behind the last token that a complete capture has seen.
        capacity: tokens kept per layer.
        late_from: position from which on tokens are kept in any case, beside the sample.
        num_late: how many of them at most; 0 for none.
        begin: first token recorded: those before it came from the prefix cache. 0 but in a server that builds what
            requests share.
        samples: [num_layers, capacity + num_late, num_qo_heads, head_dim] on the model's device, made at the first
            layer: the reservoir (of min(capacity, prompt_len) rows), then the late tokens.
        positions: [rows of samples] int64, position of the token in each row; -1 while the row is empty.
        importance: [num_layers, rows of samples] fp32 on the model's device; made and filled by `PrefillCaptures`.
        sm_scale: attention scale of the layers; None until one is known.
        seen: position behind the last token that passed, per layer, without a gap from `begin` on.
        broken: why the capture cannot become complete any more; None while it can.
    """

    rid: str
    prompt_len: int
    capacity: int
    num_layers: int
    rng: np.random.Generator
    late_from: int = 0
    num_late: int = 0
    begin: int = 0
    samples: Tensor | None = None
    importance: Tensor | None = None
    sm_scale: float | None = None
    positions: NDArray[np.int64] = field(init=False)
    seen: list[int] = field(init=False)
    broken: str | None = None

    def __post_init__(self) -> None:
        self.seen = [self.begin] * self.num_layers
        self.positions = np.full(self.reservoir_rows + self.num_late, -1, dtype=np.int64)

    @property
    def reservoir_rows(self) -> int:
        """Rows of the sample, before those of the late tokens."""
        return min(self.capacity, self.prompt_len - self.begin)

    @property
    def end(self) -> int:
        """Position behind the last token that may be kept."""
        return max(self.prompt_len, self.late_from + self.num_late)

    def decide(self, count: int, already: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which of the next `count` tokens are kept, and where: (offsets, rows of samples), rows unique."""
        offsets, rows = self._sample(min(count, self.prompt_len - already), already)
        if self.num_late:
            position = already + np.arange(count)
            late = np.flatnonzero((position >= self.late_from) & (position < self.late_from + self.num_late))
            offsets = np.concatenate([offsets, late])
            rows = np.concatenate([rows, self.reservoir_rows + position[late] - self.late_from])
        self.positions[rows] = already + offsets
        return offsets, rows

    def _sample(self, count: int, already: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if count <= 0:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        index = already - self.begin + np.arange(count)
        target = np.where(index < self.capacity, index, np.floor(self.rng.random(count) * (index + 1)).astype(np.int64))
        offsets = np.flatnonzero(target < self.capacity)
        rows = target[offsets]
        # A row that is hit twice in this chunk keeps its last token, as one token at a time would.
        _, last = np.unique(rows[::-1], return_index=True)
        keep = np.sort(len(rows) - 1 - last)
        return offsets[keep], rows[keep]

    def queries(self, num_kv_heads: int) -> Tensor:
        """The sample of a complete capture: [num_layers, num_kv_heads, num_samples, head_dim], as `queries_by_head`."""
        assert self.samples is not None
        return queries_by_head(self.samples[:, : self.reservoir_rows], num_kv_heads)

    def scale(self, head_dim: int) -> float:
        """Attention scale of the layers: the one they recorded, or the usual one where none did."""
        return head_dim**-0.5 if self.sm_scale is None else self.sm_scale

    def problem(self) -> str | None:
        """None when every layer saw every token of the prompt once."""
        short = [(layer, seen) for layer, seen in enumerate(self.seen) if seen < self.prompt_len]
        if self.broken or not short:
            return self.broken
        layer, seen = short[0]
        return (
            f"expected {self.prompt_len} recorded tokens in every layer, got {seen} in layer {layer}: the capture is "
            "rejected"
        )

    def reject(self, why: str) -> None:
        """It cannot become complete any more; nor does it hold samples."""
        self.broken, self.samples = why, None

    def make_samples(self, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Device memory for `samples`, zeros."""
        shape = (self.num_layers, len(self.positions), num_heads, head_dim)
        self.samples = torch.zeros(shape, dtype=dtype, device=device)
        return self.samples


def queries_by_head(samples: Tensor, num_kv_heads: int) -> Tensor:
    """[num_layers, tokens, num_qo_heads, head_dim] as [num_layers, num_kv_heads, tokens * group, head_dim]: the query
    heads of a KV head's group stand together, as the builders expect.
    """
    layers, tokens, heads, dim = samples.shape
    grouped = samples.reshape(layers, tokens, num_kv_heads, heads // num_kv_heads, dim)
    return grouped.permute(0, 2, 1, 3, 4).reshape(layers, num_kv_heads, -1, dim)


@dataclass(frozen=True)
class Chunk:
    """One request's tokens in the running prefill step: where they are in q, and which of them are kept."""

    capture: Capture
    first_row: int
    num_tokens: int
    offsets: Tensor
    rows: Tensor


def _on_device(indices: NDArray[np.int64], device: torch.device) -> Tensor:
    """[2, n] without waiting for the device: it may be busy with the chunk before."""
    host = torch.from_numpy(indices)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def sampled_tokens(query_samples: int, gqa: int) -> int:
    """Tokens that are kept for so many rows per KV head, of `gqa` query heads each. Of more than 64 heads (MLA) as many
    as of 64: fewer tokens would not show which channels count.
    """
    return max(1, query_samples // min(gqa, 64))


class QueryRecorder:
    """Captures of all requests being recorded.

    Args:
        query_samples: rows per layer and KV head.
        gqa: query heads per KV head.
        seed: reservoir seed; with the request's prompt it decides everything.
        late: kept in any case: so many of the prompt's last tokens, and so many tokens behind it.

    Attributes:
        capacity: tokens sampled of a prompt, at most.
    """

    def __init__(
        self,
        num_layers: int,
        num_qo_heads: int,
        query_samples: int,
        gqa: int,
        seed: int,
        late: tuple[int, int] = (0, 0),
    ) -> None:
        self._num_layers, self._num_qo_heads = num_layers, num_qo_heads
        self.capacity = sampled_tokens(query_samples, gqa)
        self._seed, self._late = seed, late
        self._captures: dict[str, Capture] = {}

    def start(self, rid: str, prompt_len: int, begin: int = 0) -> bool:
        """Record this request from the first token that its prefill computes (`begin`) on. Starting again forgets what
        was recorded. False, and nothing is recorded, while `MAX_CAPTURES` others are, whose samples lie in device
        memory.
        """
        whole = sum(not capture.broken for capture in self._captures.values())
        if rid not in self._captures and whole >= MAX_CAPTURES:
            return False
        rng = np.random.default_rng(self._seed)
        before, behind = min(self._late[0], prompt_len), self._late[1]
        late = (prompt_len - before, before + behind)
        self._captures[rid] = Capture(rid, prompt_len, self.capacity, self._num_layers, rng, *late, begin)
        return True

    def allocate(self, rid: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make a capture's device memory now, not in the middle of a forward."""
        self._captures[rid].make_samples(self._num_qo_heads, head_dim, dtype, device)

    def discard_broken(self) -> None:
        """Forget captures that cannot become complete any more."""
        self._captures = {rid: capture for rid, capture in self._captures.items() if not capture.broken}

    def is_broken(self, rid: str) -> bool:
        """Whether a request is recorded, and its capture cannot become complete any more."""
        capture = self._captures.get(rid)
        return capture is not None and capture.broken is not None

    @property
    def num_captures(self) -> int:
        """Requests being recorded."""
        return len(self._captures)

    def take(self, rid: str) -> Capture | None:
        """The capture of a request, which the recorder then forgets; None if it was not recorded."""
        return self._captures.pop(rid, None)

    def begin_step(
        self, rids: Sequence[str], first_positions: Sequence[int], num_tokens: Sequence[int], device: torch.device
    ) -> list[Chunk]:
        """Decide, before the layers run, what this prefill step leaves behind.

        Args:
            rids: requests of the step, in batch order.
            first_positions: position of each request's first token in this step.
            num_tokens: tokens of each request in this step. Tokens past the prompt (decode rows of a mixed
                batch) are never part of the sample.
        """
        chunks = []
        row = 0
        for rid, first, count in zip(rids, first_positions, num_tokens, strict=True):
            capture = self._captures.get(rid)
            if capture is not None and not capture.broken and min(capture.seen) < capture.end:
                wanted = min(count, capture.end - first)
                if first != capture.seen[0]:
                    capture.reject(
                        f"expected the prefill to go on at token {capture.seen[0]}, got token {first}: tokens "
                        "came from the prefix cache, their queries were never computed; the capture is rejected"
                    )
                elif wanted > 0:
                    offsets, rows = capture.decide(wanted, first)
                    chunks.append(Chunk(capture, row, wanted, *_on_device(np.stack([offsets + row, rows]), device)))
            row += count
        return chunks

    def record(
        self,
        chunks: Sequence[Chunk],
        layer: int,
        q: Tensor,
        sm_scale: float | None = None,
        absorb: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Keep one layer's queries of the running step.

        Args:
            q: [num_tokens, num_qo_heads * head_dim] or [num_tokens, num_qo_heads, head_dim], post-RoPE.
            sm_scale: the layer's attention scale, where it is known; one that layers do not share breaks a capture.
            absorb: what makes kept rows of the queries that are sampled; None: they are. See `ModelView.absorption`.
        """
        q = q.reshape(q.shape[0], self._num_qo_heads, -1)
        for chunk in chunks:
            capture = chunk.capture
            if capture.broken:
                continue
            if q.shape[0] < chunk.first_row + chunk.num_tokens:
                capture.reject(f"expected at least {chunk.first_row + chunk.num_tokens} query rows, got {q.shape[0]}")
                continue
            if sm_scale is not None and capture.sm_scale not in (None, sm_scale):
                capture.reject(
                    f"expected one attention scale in all layers, got {capture.sm_scale} and {sm_scale} (layer "
                    f"{layer}); such models are not supported yet"
                )
                continue
            capture.sm_scale = sm_scale
            try:
                samples, kept = capture.samples, q[chunk.offsets]
                kept = kept if absorb is None else absorb(kept)
                if samples is None:
                    samples = capture.make_samples(self._num_qo_heads, kept.shape[-1], q.dtype, q.device)
                samples[layer].index_copy_(0, chunk.rows, kept)
            except torch.OutOfMemoryError as error:  # the forward goes on
                capture.reject(f"no device memory for queries: {error}")
                continue
            capture.seen[layer] += chunk.num_tokens


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
        repeats: whether it is one of several answers to one prompt of one user, which another request prefilled.
        at: monotonic seconds of the look-up.
        again: it had a slot before, and was retracted.
    """

    rid: str
    prompt: Sequence[int]
    namespace: Mapping[str, str | None]
    refusal: tuple[str, str] | None
    indexed: int = 0
    hashes: Sequence[bytes] = ()
    repeats: bool = False
    at: float = field(default_factory=time.monotonic)
    again: bool = False


class Recording(ABC):
    """Told of every request that has a slot, from then until it gives it back, and of every forward, by the runtime, on
    the scheduler's thread. A request that waits holds nothing here: it may be aborted, and nobody says so.

    By default everything but `admit` and `finish` records no more than queries.

    Attributes:
        recorder: of queries.
        records_decode: whether decode steps leave queries, too.
    """

    records_decode: ClassVar[bool] = False

    def __init__(self, config: SparseAttnConfig, view: ModelView, *, late: tuple[int, int] = (0, 0)) -> None:
        self._config, self._view = config, view
        heads, gqa = view.num_qo_heads, view.num_qo_heads // view.num_kv_heads
        self.recorder = QueryRecorder(view.num_layers, heads, config.query_samples, gqa, config.seed, late)
        self._outcomes: Counter[str] = Counter()
        self._build_bytes, self._build_seconds = 0, 0.0

    @abstractmethod
    def admit(self, request: Admission) -> None:
        """A request got its slot."""

    def prefill(self, forward_batch: Any) -> list[Chunk]:
        """Before the layers of a prefill step run, of SGLang's batch: what it leaves behind."""
        if not forward_batch.rids:
            return []
        firsts, counts = on_host(forward_batch, "extend_prefix_lens"), on_host(forward_batch, "extend_seq_lens")
        return self.begin_prefill(forward_batch.rids, firsts, counts)

    def begin_prefill(self, rids: Sequence[str], firsts: Sequence[int], counts: Sequence[int]) -> list[Chunk]:
        """As `QueryRecorder.begin_step`."""
        return self.recorder.begin_step(rids, firsts, counts, self._view.device)

    def record(self, chunks: Sequence[Chunk], layer: Any, q: Tensor) -> None:
        """As `QueryRecorder.record`, of the RadixAttention that runs."""
        absorb = self._view.absorption(layer)
        self.recorder.record(chunks, layer.layer_id, q, float(layer.scaling), absorb)

    def prefilled(self, chunks: Sequence[Chunk]) -> None:
        """Behind the layers of a prefill step."""
        return

    def decode(self, forward_batch: Any) -> Sequence[Chunk]:
        """Before a decode step, on its stream, of SGLang's batch: what it leaves behind, in a process that captures."""
        rids = forward_batch.rids
        if not rids or len(rids) != forward_batch.batch_size or len(set(rids)) != len(rids):
            return ()  # padded or beam batches: rows are not one request each
        self.decoding(rids, forward_batch.req_pool_indices)
        if not self.records_decode:
            return ()
        firsts = [length - 1 for length in on_host(forward_batch, "seq_lens")]
        return self.begin_prefill(rids, firsts, [1] * len(firsts))

    def decoding(self, rids: Sequence[str], rows: Tensor) -> None:
        """Of a decode step whose rows are requests; rows: [batch_size] of `req_to_token`, on the device."""
        return

    @abstractmethod
    def finish(self, rid: str, row: int) -> None:
        """A request gives its slot back: finished, aborted or retracted. Its row of `req_to_token` is still filled."""

    def discard(self, rid: str) -> None:
        """Forget a request."""
        self.recorder.take(rid)

    def snapshot(self) -> dict[str, Any]:
        """State as plain values."""
        return {}

    def figures(self) -> Figures:
        """What is exported of builds, by status; of the tensor-parallel rank that reports them."""
        totals = {"build_bytes": self._build_bytes, "build_seconds": self._build_seconds}
        return {"build": dict(self._outcomes), **totals}

    def close(self) -> None:
        """Forget all requests, and end threads."""
        return

    def _report(self, rid: str, /, **fields: Any) -> None:
        """Count what came of a request, and append a JSON line about it to the file `build_report`, if there is one; on
        any one thread. A file that cannot be written is logged: the server must live on.
        """
        self._outcomes[fields["status"]] += 1
        self._build_bytes += fields.get("index_bytes", 0)
        self._build_seconds += fields.get("build_seconds", 0.0)
        if not self._config.build_report:
            return
        try:
            with open(self._config.build_report, "a") as file:
                file.write(json.dumps(printable_values({"rid": rid, **fields})) + "\n")
        except OSError as error:
            logger.error("sparse attention: build_report cannot be written (%s): %s %s", error, rid, fields)
