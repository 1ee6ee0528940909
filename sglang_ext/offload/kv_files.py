"""KV of prefixes on disk: one file a prefix, written whole, read whole, each by a thread beside the scheduler.

A file: 4 KiB of JSON, padded with spaces and a newline, then K and V of each layer, [prefix_len, num_kv_heads,
head_dim] each, in the device pool's stored dtype.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from prefix_kernels.types import PagedKV
from prefix_kernels.types import rows_of as taken
from sglang_ext.files import partial_file
from sglang_ext.model_view import ModelView
from sglang_ext.offload.directory import Offload
from sglang_ext.offload.host import HostPool, rows_of, runs
from sglang_ext.options import Offload as Options

logger = logging.getLogger(__name__)

FORMAT = 1
_HEADER = 4096
_ABANDONED_S = 3600.0
"""Since anything was written to it, until a partial file is nobody's."""
_PIECE = 64 << 20
"""Bytes that are read or written at once, at most."""


class KVFileError(Exception):
    """A file is not what its name says; the message says what was expected and what came."""


class KVFiles:
    """A folder of such files. Any number of servers of any models may use one.

    Args:
        options: name the folder, which is made where it is not there.
        view: of the model runner.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, options: Options, view: ModelView) -> None:
        assert options.folder is not None
        self._folder, self._most_bytes = Path(options.folder), options.folder_bytes
        self._folder.mkdir(parents=True, exist_ok=True)
        for partial in self._folder.glob(".*.kv.partial-*"):
            with suppress(OSError):  # of a process that was ended while it wrote
                if partial.stat().st_mtime < time.time() - _ABANDONED_S:
                    partial.unlink()
        layers, heads, dims = view.num_layers, view.num_kv_heads, (view.head_dim, view.v_head_dim)
        dtype = str(view.kv_dtype).removeprefix("torch.")
        self._facts = {"format": FORMAT, "layers": layers, "kv_heads": heads, "dims": dims, "dtype": dtype}
        self._token_bytes = layers * heads * sum(dims) * view.kv_dtype.itemsize

    def path(self, digest: str) -> Path:
        """Of a prefix's file, by the digest of its index."""
        return self._folder / f"{digest}.kv"

    def write(self, digest: str, prefix_len: int, pieces: Iterator[memoryview]) -> None:
        """Write a prefix, if its file is not there; `pieces` are its bytes. Raises OSError; then nothing is left."""
        path, size = self.path(digest), _HEADER + prefix_len * self._token_bytes
        if path.exists():
            return
        self._make_room(size)
        total = xxhash.xxh3_128()
        with partial_file(path) as partial, partial.open("wb") as file:
            file.seek(_HEADER)
            for piece in pieces:
                total.update(piece)
                file.write(piece)
            file.seek(0)
            file.write(self._header(digest, prefix_len, total.hexdigest()))
        logger.info("sparse attention: offload: %s written, %d bytes", path, size)

    def read(self, digest: str, prefix_len: int, pieces: Iterator[memoryview]) -> None:
        """Fill `pieces` with a prefix's bytes.

        Raises:
            KVFileError: the file is damaged, of another prefix, or of another pool.
            OSError: it cannot be read.
        """
        path, total = self.path(digest), xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            header = file.read(_HEADER)
            for piece in pieces:
                left = piece
                while left:
                    count = file.readinto(left)
                    if not count:
                        size = _HEADER + prefix_len * self._token_bytes
                        raise KVFileError(f"expected {size} bytes in {path}, got {path.stat().st_size}")
                    left = left[count:]
                total.update(piece)
        if header != self._header(digest, prefix_len, total.hexdigest()):
            raise KVFileError(
                f"expected in {path} the KV of index {digest}, {prefix_len} tokens, in this server's "
                f"layout and with its checksum; got {header.rstrip()[:300]!r} before other content"
            )
        with suppress(OSError):
            os.utime(path)

    def _header(self, digest: str, prefix_len: int, checksum: str) -> bytes:
        facts = {**self._facts, "digest": digest, "prefix_len": prefix_len, "xxh3": checksum}
        return json.dumps(facts).encode().ljust(_HEADER - 1) + b"\n"

    def _make_room(self, size: int) -> None:
        if self._most_bytes is None:
            return
        if size > self._most_bytes:
            raise OSError(f"expected folder_bytes of at least {size} for this prefix, got {self._most_bytes}; raise it")
        files = []
        for path in self._folder.glob("*.kv"):
            with suppress(OSError):  # another server may have removed it
                stat = path.stat()
                files.append((stat.st_mtime, stat.st_size, path))
        held = sum(one[1] for one in files)
        for _, freed, path in sorted(files):
            if held + size <= self._most_bytes:
                return
            path.unlink(missing_ok=True)
            held -= freed


def of_pages(pool: HostPool, num_layers: int, pages: Tensor) -> Iterator[memoryview]:
    """Memory of a prefix in the pool, in the file's order; it may be written to."""
    for layer in range(num_layers):
        for part in pool.layer(layer):
            for _, page, count in runs(pages):
                yield from _bytes_of(part[rows_of(page, count)])


def of_slots(kv: Callable[[int], PagedKV], num_layers: int, slots: Tensor) -> Iterator[memoryview]:
    """Copies of a prefix's slots on the device, in the file's order."""
    for layer in range(num_layers):
        for part in (kv(layer).k_cache, kv(layer).v_cache):
            yield from _bytes_of(taken(part, slots).cpu())


def _bytes_of(rows: Tensor) -> Iterator[memoryview]:
    memory: Any = rows.view(torch.uint8).numpy()
    flat = memoryview(memory).cast("B")
    for begin in range(0, len(flat), _PIECE):
        yield flat[begin : begin + _PIECE]


@dataclass
class Move:
    """A prefix on its way to or from its file.

    Attributes:
        offload: its pages are not given away before the move has `ended`.
        loads: from the file; else to it.
        ready: waits until its pages may be read or written.
        error: why it failed.
    """

    offload: Offload
    loads: bool
    ready: Callable[[], Any]
    error: Exception | None = None


class Mover:
    """A thread for moves. All methods are of the scheduler's thread.

    Args:
        files: read and written.
        pool: whose pages are.
        num_layers: of the model.
    """

    def __init__(self, files: KVFiles, pool: HostPool, num_layers: int) -> None:
        self._files, self._pool, self._num_layers = files, pool, num_layers
        self._asked: queue.PriorityQueue[tuple[bool, int, Move]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._done: queue.SimpleQueue[Move] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="sparse-attn-kv-files", daemon=True).start()

    def begin(self, move: Move) -> None:
        """Loads come first: requests may wait for them."""
        self._asked.put((not move.loads, next(self._count), move))

    def ended(self) -> Iterator[Move]:
        """Moves that have ended since the last call."""
        with suppress(queue.Empty):
            while True:
                yield self._done.get_nowait()

    def _work(self) -> None:
        while True:
            _, _, move = self._asked.get()
            try:
                move.ready()
                offload = move.offload
                pieces = of_pages(self._pool, self._num_layers, offload.pages)
                (self._files.read if move.loads else self._files.write)(offload.digest, offload.prefix_len, pieces)
            except Exception as error:
                move.error = error
            self._done.put(move)


def waits_for(device: torch.device) -> Callable[[], Any]:
    """Waits, in another thread, for what is queued on the current stream by now."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize
