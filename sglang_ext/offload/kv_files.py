"""KV of prefixes on disk: one file a prefix, written whole, read whole, each by a thread beside the scheduler.

A file: 4 KiB of JSON, padded with spaces and a newline, then K and V of each layer, [prefix_len, num_kv_heads,
head_dim] each, in the device pool's stored dtype.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from sglang_ext.files import partial_file
from sglang_ext.offload.directory import Offload
from sglang_ext.offload.host import HostPool, rows_of, runs

logger = logging.getLogger(__name__)

FORMAT = 1
_HEADER = 4096
_PIECE = 64 << 20
"""Bytes that are read or written at once, at most."""


class KVFileError(Exception):
    """A file is not what its name says; the message says what was expected and what came."""


class KVFiles:
    """A folder of such files. Any number of servers of any models may use one.

    Args:
        folder: made where it is not there.
        pool: whose pages are written and read.
        num_layers: of the model.
        most_bytes: of all files; the ones that were read or written longest ago leave. None: no limit.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, pool: HostPool, num_layers: int, most_bytes: int | None) -> None:
        self._folder, self._pool, self._most_bytes = folder, pool, most_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._layers = range(num_layers)
        k, v = pool.layer(0)  # of all layers alike
        self._facts = {"format": FORMAT, "layers": num_layers, "k": [*k.shape[1:]], "v": [*v.shape[1:]]}
        self._facts["dtype"] = str(k.dtype).removeprefix("torch.")

    def path(self, digest: str) -> Path:
        """Of a prefix's file, by the digest of its index."""
        return self._folder / f"{digest}.kv"

    def write(self, offload: Offload) -> None:
        """Write a prefix that lies in the pool. Raises OSError; nothing is then left behind."""
        path, size = self.path(offload.digest), self._size(offload)
        self._make_room(size)
        total = xxhash.xxh3_128()
        with partial_file(path) as partial, partial.open("wb") as file:
            file.seek(_HEADER)
            for piece in self._pieces(offload):
                total.update(piece)
                file.write(piece)
            file.seek(0)
            file.write(self._header(offload, total.hexdigest()))
        logger.info("sparse attention: offload: %s written, %d bytes", path, size)

    def read(self, offload: Offload) -> None:
        """Fill the pages of a prefix.

        Raises:
            KVFileError: the file is damaged, of another prefix, or of another pool.
            OSError: it cannot be read.
        """
        path, total = self.path(offload.digest), xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            header = file.read(_HEADER)
            for piece in self._pieces(offload):
                left = piece
                while left:
                    count = file.readinto(left)
                    if not count:
                        raise KVFileError(f"expected {self._size(offload)} bytes in {path}, got an end of the file")
                    left = left[count:]
                total.update(piece)
        if header != self._header(offload, total.hexdigest()):
            raise KVFileError(
                f"expected in {path} the KV of index {offload.digest}, {offload.prefix_len} tokens, in this server's "
                f"layout and with its checksum; got {header.rstrip()[:300]!r} before other content"
            )
        with suppress(OSError):
            os.utime(path)

    def _header(self, offload: Offload, checksum: str) -> bytes:
        facts = {**self._facts, "digest": offload.digest, "prefix_len": offload.prefix_len, "xxh3": checksum}
        return json.dumps(facts).encode().ljust(_HEADER - 1) + b"\n"

    def _size(self, offload: Offload) -> int:
        return _HEADER + sum(piece.nbytes for piece in self._pieces(offload))

    def _pieces(self, offload: Offload) -> Iterator[memoryview]:
        """Memory of all layers' pages, in the file's order."""
        for layer in self._layers:
            for part in self._pool.layer(layer):
                for _, page, count in runs(offload.pages):
                    rows: Any = part[rows_of(page, count)].view(torch.uint8).numpy()
                    flat = memoryview(rows).cast("B")
                    for begin in range(0, len(flat), _PIECE):
                        yield flat[begin : begin + _PIECE]

    def _make_room(self, size: int) -> None:
        if self._most_bytes is None:
            return
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
        if size > self._most_bytes:
            raise OSError(f"expected folder_bytes of at least {size} for this prefix, got {self._most_bytes}; raise it")


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
    """

    def __init__(self, files: KVFiles) -> None:
        self._files = files
        self._asked: queue.SimpleQueue[Move] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Move] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="sparse-attn-kv-files", daemon=True).start()

    def begin(self, move: Move) -> None:
        self._asked.put(move)

    def ended(self) -> Iterator[Move]:
        """Moves that have ended since the last call."""
        with suppress(queue.Empty):
            while True:
                yield self._done.get_nowait()

    def _work(self) -> None:
        while True:
            move = self._asked.get()
            try:
                move.ready()
                (self._files.read if move.loads else self._files.write)(move.offload)
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
