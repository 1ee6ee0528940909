"""A trace of sparse steps, for debugging: which positions were selected, for which requests. Off by default.

With `trace_folder` set, the scheduler process appends to a file there what its forwards did to requests whose id begins
with `trace-`: which positions were prefilled, and of each sparse step the selections of the groups that they are in.
Positions that a trace says nothing of were decoded densely. `benchmarks/replay.py` computes the same again.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from prefix_index import printable
from prefix_kernels.types import SelectedLists, SelectionGroup
from sglang_ext.decode.types import StepPath
from sglang_ext.methods.layer_plan import LayerPlan

logger = logging.getLogger(__name__)

TRACED = "trace-"
"""What the id of a request begins with that is to be traced."""
MAX_BYTES = 4 << 30
"""Of a trace; what comes later is not written."""
_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first record of a file.

    Attributes:
        layer_plan: as `LayerPlan.to_dict` gives it.
        num_kv_heads: per layer.
        dtype: of the model, as torch names it: "bfloat16".
    """

    layer_plan: dict[str, Any]
    num_kv_heads: int
    dtype: str


class Prefill(msgspec.Struct, frozen=True, tag="prefill"):
    """Positions [start, end) of one request were prefilled, densely. Those before `start` came from the prefix cache,
    if this is the request's first prefill, or its first one after it lost its slots.
    """

    rid: str
    start: int
    end: int


class Selected(msgspec.Struct, frozen=True):
    """What one group selected in one step.

    Attributes:
        rids: of all its rows, in the order of the batch; only some of them need be traced.
        seq_lens: of these, the token being decoded included: its position is one less.
        digest: of the index.
        prefix_len: tokens.
        counts: by anchor layer, selected positions per KV head.
        bits: by anchor layer, per KV head the selected positions as bits, the first position highest
            (`numpy.packbits`).
        queries: by anchor layer that searched, [num_rows, num_qo_heads, head_dim] float32: what it searched by. Empty
            where decode graphs selected.
    """

    rids: list[str]
    seq_lens: list[int]
    digest: str
    prefix_len: int
    counts: dict[int, list[int]]
    bits: dict[int, list[bytes]]
    queries: dict[int, bytes] = {}

    def query(self, layer: int, head_dim: int) -> Tensor:
        """[num_rows, num_qo_heads, head_dim] float32: what an anchor layer searched by.

        Raises:
            KeyError: it did not search in this step, or nobody wrote down by what.
        """
        flat = np.frombuffer(self.queries[layer], dtype=np.float32).copy()
        return torch.from_numpy(flat).view(len(self.rids), -1, head_dim)

    def mask(self, layer: int) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """[num_kv_heads, prefix_len] bool: the positions that an anchor layer selected; None: all of them.

        Raises:
            ValueError: a head has not as many positions as it counted, or some twice.
        """
        if layer not in self.bits:
            return None
        packed = np.stack([np.frombuffer(head, dtype=np.uint8) for head in self.bits[layer]])
        found = np.unpackbits(packed, axis=1, count=self.prefix_len).astype(bool)
        if found.sum(1).tolist() != self.counts[layer]:
            raise ValueError(
                f"expected {self.counts[layer]} different positions of layer {layer} in [0, {self.prefix_len}), got "
                f"{found.sum(1).tolist()}; the selection is damaged"
            )
        return found


class SparseStep(msgspec.Struct, frozen=True, tag="sparse"):
    """One sparse step: its groups that have a traced request."""

    groups: list[Selected]


Record = Start | Prefill | SparseStep


class SelectionCopies:
    """Where each anchor layer's selection is copied to: a later layer writes over the lists themselves.

    Attributes:
        positions: [num_anchors, entries] int32, as in the lists.
        counts: [num_anchors, max_groups, num_kv_heads] int32.
        groups: (batch rows, tokens, digest of the index) of each prefix of the step.
        places: of each group of the step, what it selects.

    Args:
        layer_plan: role of each layer.
        lists: that an anchor layer writes, by its number. Not owned.
        queries: keep queries, too; not in captured graphs.
    """

    def __init__(self, layer_plan: LayerPlan, lists: Callable[[int], SelectedLists], *, queries: bool = False) -> None:
        self._lists = lists
        self._queries: dict[int, Tensor] | None = {} if queries else None
        self.layers = list(layer_plan.anchor_layers)
        one = lists(self.layers[0] if self.layers else 0)
        self.positions = one.positions.new_zeros((len(self.layers), *one.positions.shape))
        self.counts = one.counts.new_zeros((len(self.layers), *one.counts.shape))
        self.groups: list[tuple[tuple[int, ...], int, str]] = []
        self.places: list[SelectionGroup] = []

    def copy(self, layer: int, q: Tensor) -> None:
        """Keep what this anchor layer has just selected, and by which queries; may be captured."""
        if self._queries is not None:
            self._queries[layer] = q.float()
        number, lists = self.layers.index(layer), self._lists(layer)
        # By a kernel: kernels that begin before the one before them ends know kernels only, no copies.
        torch.add(lists.positions, 0, out=self.positions[number])
        torch.add(lists.counts, 0, out=self.counts[number])

    def take(self, wanted: Sequence[int]) -> list[dict[int, tuple[Tensor, Tensor]]]:
        """(positions, counts) on the host of groups of the step that was replayed, by anchor layer. Waits for it."""
        counts, taken = self.counts[:, wanted].cpu(), []
        for group, number in enumerate(wanted):
            place, heads = self.places[number], counts.shape[2]
            positions = [place.lists_in(of_layer, heads).to("cpu", copy=True) for of_layer in self.positions]
            taken.append({layer: (positions[i], counts[i, group]) for i, layer in enumerate(self.layers)})
        return taken

    def take_queries(self, rows: Sequence[int]) -> dict[int, bytes]:
        """By anchor layer that searched since the last `clear`: fp32 queries of these rows, where they are kept."""
        return {layer: q[list(rows)].cpu().numpy().tobytes() for layer, q in (self._queries or {}).items()}

    def clear(self) -> None:
        """A step is over: its queries are."""
        if self._queries:
            self._queries.clear()


class StepTrace:
    """Writes the trace of one process.

    Args:
        folder: is made where it is missing, for this user alone. So is the file, `steps-PID.trace`; one of this name
            that an earlier process left is replaced.
        layer_plan: role of each layer.
        dtype: of the model.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: str, layer_plan: LayerPlan, dtype: torch.dtype) -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = Path(folder) / f"steps-{os.getpid()}.trace"
        path.unlink(missing_ok=True)
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(opened, "wb", buffering=0)  # the process ends without a word
        self._left, self._full = MAX_BYTES, False
        name = str(dtype).removeprefix("torch.")
        self._write(Start(layer_plan.to_dict(), layer_plan.num_kv_heads, name))
        logger.warning("sparse attention: steps of requests '%s...' are traced to %s: slower", TRACED, path)

    def note(self, forward_batch: Any, path: StepPath | None, copies: SelectionCopies | None) -> None:
        """What the forward that has just run did. Waits for the device where a traced request was in a sparse step.

        Args:
            forward_batch: SGLang's.
            path: of a decode step that was attended here.
            copies: of sparse steps' selections, if there are any.
        """
        rids = forward_batch.rids or []
        if not self._full and any(rid.startswith(TRACED) for rid in rids):
            try:
                if not forward_batch.forward_mode.is_decode():
                    self._prefilled(forward_batch)
                elif path in (StepPath.SPARSE, StepPath.KEPT) and copies is not None:
                    self._decoded(forward_batch, copies)
            except Exception:  # must not end the server
                self._end("this could not be written down:", exc_info=True)
        if copies is not None:
            copies.clear()

    def _prefilled(self, forward_batch: Any) -> None:
        if not forward_batch.forward_mode.is_extend():
            return
        starts, lens = (
            torch.as_tensor(of).tolist()
            for of in (forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu)
        )
        for rid, start, length in zip(forward_batch.rids, starts, lens, strict=True):
            if rid.startswith(TRACED):
                self._write(Prefill(printable(rid), start, start + length))

    def _decoded(self, forward_batch: Any, copies: SelectionCopies) -> None:
        traced = [rid.startswith(TRACED) for rid in forward_batch.rids]
        wanted = [number for number, (rows, _, _) in enumerate(copies.groups) if any(traced[row] for row in rows)]
        if not wanted:
            return
        groups = [
            _selected(forward_batch, *copies.groups[number], taken, copies.take_queries(copies.groups[number][0]))
            for number, taken in zip(wanted, copies.take(wanted), strict=True)
        ]
        self._write(SparseStep(groups))

    def _write(self, record: Record) -> None:
        if self._full:
            return
        data = msgspec.msgpack.encode(record)
        data = _LENGTH.pack(len(data)) + data
        self._left -= len(data)
        if self._left < 0:
            self._end("expected less to write down; trace fewer requests, or restart the server")
        elif self._file.write(data) < len(data):
            self._end("is the disk full?")

    def _end(self, why: str, *, exc_info: bool = False) -> None:
        self._full = True
        logger.error("sparse attention: the trace ends before its time; %s", why, exc_info=exc_info)


def _selected(
    forward_batch: Any,
    rows: Sequence[int],
    prefix_len: int,
    digest: str,
    taken: dict[int, tuple[Tensor, Tensor]],
    queries: dict[int, bytes],
) -> Selected:
    lens = forward_batch.seq_lens_cpu
    lens = (lens if lens is not None else forward_batch.seq_lens).tolist()
    bits = {}
    for layer, (positions, counts) in taken.items():
        mask = np.zeros((len(counts), prefix_len), dtype=bool)
        for head, (listed, count) in enumerate(zip(positions.numpy(), counts.tolist(), strict=True)):
            mask[head, listed[:count]] = True
        bits[layer] = [row.tobytes() for row in np.packbits(mask, axis=1)]
    return Selected(
        [printable(forward_batch.rids[row]) for row in rows],
        [lens[row] for row in rows],
        digest,
        prefix_len,
        {layer: counts.tolist() for layer, (_, counts) in taken.items()},
        bits,
        queries,
    )


def read_trace(path: Path) -> Iterator[Record]:
    """The records of a file, in order; a last one that was cut off is left out.

    Raises:
        OSError: the file cannot be read.
        msgspec.DecodeError: it is no trace.
    """
    decoder = msgspec.msgpack.Decoder(Record)
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            data = file.read(length)
            if len(data) < length:
                return
            yield decoder.decode(data)
