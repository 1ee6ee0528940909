"""KV of prefixes on disk: one file a prefix, written whole, read whole, each by a thread beside the scheduler.

A file: 4 KiB of JSON, padded with spaces and a newline, then the prefix's pages of each layer as `HostPool.layer` has
them. It is cut into pieces, each of pages of one layer, which several threads read straight into the pool: a piece that
lies in the page cache, or whose pages are no whole blocks, from there, any other one past it. Pieces are large, as the
scheduler's thread, which never rests, gives the interpreter to others for one call only, after 5 ms. The header's
checksum is that of the pieces' checksums.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from mmap import PAGESIZE, PROT_READ, mmap
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from prefix_kernels.residents import to_pages
from prefix_kernels.types import PagedKV
from prefix_kernels.types import rows_of as taken
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.files import partial_file
from sglang_ext.model_view import ModelView
from sglang_ext.offload.directory import Offload
from sglang_ext.offload.host import HostPool, rows_of, runs
from sglang_ext.options import Offload as Options
from sglang_ext.ranks import Ranks

logger = logging.getLogger(__name__)

FORMAT = 3
_BLOCK = 4096
"""Bytes of the header; of a read past the page cache, its place in the file and in memory are multiples."""
_ABANDONED_S = 3600.0
"""Since anything was written to it, until a partial file is nobody's."""
_PIECE = 64 << 20
"""Bytes of a piece, at most; of the format."""
_READERS = 16
"""Threads that read a file."""
_RUNS = 1024
"""Places in memory that one call of the system fills, at most."""


def kv_file_name(digest: str, ranks: Ranks | None = None) -> str:
    """Of a prefix's file, by the digest of its index; of several tensor-parallel ranks each has its own."""
    part = "" if ranks is None or ranks.size == 1 else f"-{ranks.rank}-of-{ranks.size}"
    return f"{digest}{part}.{FORMAT}.kv"


class KVFileError(Exception):
    """A file is not what its name says; the message says what was expected and what came."""


class Piece(NamedTuple):
    """A part of a file.

    Attributes:
        layer: its number.
        pages: which ones of the prefix, in its order.
        begin: first byte in the file.
        size: bytes.
    """

    layer: int
    pages: slice
    begin: int
    size: int


Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Memory = Callable[[Piece], Sequence[Bytes]]
"""Where a piece of a prefix lies: runs of its pages, in their order, each [bytes] uint8."""


class KVFiles:
    """A folder of such files. Any number of servers of any models may use one.

    Args:
        options: name the folder, which is made where it is not there, for this user alone.
        view: of the model runner.
        ranks: of the tensor-parallel group.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, options: Options, view: ModelView, ranks: Ranks | None = None) -> None:
        assert options.folder is not None
        self._folder, self._most_bytes = Path(options.folder), options.folder_bytes
        try:
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"--sparse-attn: expected offload.folder to be a folder, or room to make it; got {error}. Name another"
            ) from error
        for partial in self._folder.glob(".*.kv.partial-*"):
            with suppress(OSError):  # of a process that was ended while it wrote
                if partial.stat().st_mtime < time.time() - _ABANDONED_S:
                    partial.unlink()
        self._view, self._ranks, self._layers = view, ranks or Ranks(), view.num_layers
        width = view.head_dim + view.v_head_dim
        self._page_bytes = PAGE_TOKENS * view.num_kv_heads * width * view.kv_dtype.itemsize

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """What a file says of the pool that it is of. Scales are known when the model is whole."""
        view = self._view
        facts = {
            "format": FORMAT,
            "layers": view.num_layers,
            "kv_heads": view.num_kv_heads,
            "dims": (view.head_dim, view.v_head_dim),
            "dtype": str(view.kv_dtype).removeprefix("torch."),
        }
        if self._ranks.size > 1:
            facts["rank"] = self._ranks.rank, self._ranks.size
        scales = [(one.k_scale, one.v_scale) for one in map(view.kv, range(view.num_layers))]
        if any(one != (1.0, 1.0) for one in scales):
            facts["scales"] = xxhash.xxh3_128_hexdigest(json.dumps(scales).encode())
        return facts

    def path(self, digest: str) -> Path:
        """Of a prefix's file, by the digest of its index."""
        return self._folder / kv_file_name(digest, self._ranks)

    def size(self, prefix_len: int) -> int:
        """Bytes of a prefix's file."""
        return _BLOCK + prefix_len // PAGE_TOKENS * self._layers * self._page_bytes

    def used(self, digests: Sequence[str]) -> None:
        """Prefixes were used behind whatever their files say, in this order: they leave last."""
        if self._most_bytes is not None:
            begun = time.time_ns()
            for now, digest in enumerate(digests, begun):
                with suppress(OSError):  # of another user, or there is none
                    os.utime(self.path(digest), ns=(now, now))

    def write(self, digest: str, prefix_len: int, memory: Memory) -> None:
        """Write a prefix, if its file is not there. Raises OSError; then nothing is left."""
        path, size = self.path(digest), self.size(prefix_len)
        if path.exists():
            return
        self._make_room(path, size)
        sums = []
        with partial_file(path) as partial, partial.open("wb", buffering=0) as file:
            for piece in self._pieces(prefix_len):
                pages = memory(piece)
                sums.append(_checksum(pages))
                _whole(os.pwritev, file.fileno(), pages, piece.begin)
            header = np.frombuffer(self._header(digest, prefix_len, sums), np.uint8)
            _whole(os.pwritev, file.fileno(), [header], 0)
        logger.info("sparse attention: offload: %s written, %d bytes", path, size)

    def read(self, digest: str, prefix_len: int, memory: Memory) -> None:
        """Read a prefix's bytes; all threads have ended when it returns or raises. A file that is not what its name
        says is removed, unless another one has taken its place meanwhile.

        Args:
            digest: of its index.
            prefix_len: tokens.
            memory: to be filled, before the checksum is known; called by several threads at once.

        Raises:
            KVFileError: the file is damaged, of another prefix, or of another pool.
            OSError: it cannot be read.
        """
        path, begun = self.path(digest), time.perf_counter()
        with closing(_File(path)) as file:
            try:
                self._read(file, digest, prefix_len, memory)
            except KVFileError:
                file.remove()
                raise
        with suppress(OSError):
            os.utime(path)
        logger.info("sparse attention: offload: %s read in %.2f s", path, time.perf_counter() - begun)

    def _read(self, file: _File, digest: str, prefix_len: int, memory: Memory) -> None:
        pieces, sums = list(self._pieces(prefix_len)), list[bytes]()
        if file.size != self.size(prefix_len):
            raise KVFileError(f"expected {self.size(prefix_len)} bytes in {file.path}, got {file.size}")
        file.read([found := np.empty(_BLOCK, np.uint8)], 0)
        header = found.tobytes()

        def filled(piece: Piece) -> bytes:
            pages = memory(piece)
            file.read(pages, piece.begin)
            return _checksum(pages)

        if header.startswith(self._header(digest, prefix_len, []).partition(b'"xxh3"')[0]):
            with ThreadPool(min(_READERS, len(pieces))) as threads:  # of daemons: an end does not wait for them
                sums = threads.map(filled, pieces, chunksize=1)
        if header != self._header(digest, prefix_len, sums):
            raise KVFileError(
                f"expected in {file.path} the KV of index {digest}, {prefix_len} tokens, in this server's "
                f"layout and with its checksum; got {header.rstrip()[:300]!r} before other content"
            )

    def _pieces(self, prefix_len: int) -> Iterator[Piece]:
        begin, num_pages = _BLOCK, prefix_len // PAGE_TOKENS
        count = max(1, _PIECE // self._page_bytes)
        for layer, first in product(range(self._layers), range(0, num_pages, count)):
            pages = slice(first, min(first + count, num_pages))
            size = (pages.stop - first) * self._page_bytes
            yield Piece(layer, pages, begin, size)
            begin += size

    def _header(self, digest: str, prefix_len: int, sums: Sequence[bytes]) -> bytes:
        checksum = xxhash.xxh3_128_hexdigest(b"".join(sums))
        facts = {**self._facts, "digest": digest, "prefix_len": prefix_len, "xxh3": checksum}
        return json.dumps(facts).encode().ljust(_BLOCK - 1) + b"\n"

    def _make_room(self, path: Path, size: int) -> None:
        """For a prefix with the parts of all ranks, whichever of them are written yet; prefixes leave as a whole."""
        if self._most_bytes is None:
            return
        size *= self._ranks.size
        if size > self._most_bytes:
            raise OSError(f"expected folder_bytes of at least {size} for this prefix, got {self._most_bytes}; raise it")
        prefixes = dict[str, list[tuple[int, int, Path]]]()
        for one in self._folder.glob("*.kv"):
            with suppress(OSError):  # another server may have removed it
                stat = one.stat()
                prefixes.setdefault(_prefix_of(one), []).append((stat.st_mtime_ns, stat.st_size, one))
        prefixes.pop(_prefix_of(path), None)
        held = sum(part[1] for parts in prefixes.values() for part in parts)
        for parts in sorted(prefixes.values(), key=max):
            if held + size <= self._most_bytes:
                return
            for _, freed, part in parts:
                with suppress(OSError):  # of another user
                    part.unlink(missing_ok=True)
                    held -= freed
        if held + size > self._most_bytes:
            raise OSError(
                f"expected room for {size} bytes in folder_bytes, {self._most_bytes}; got {held} bytes of files in "
                f"{self._folder} that cannot be removed. Remove them"
            )


def _prefix_of(path: Path) -> str:
    """What names of all ranks' parts of a prefix have in common."""
    return re.sub(r"-\d+-of-", "-of-", path.name)


class _File:
    """An open file, read by several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cached = self._past = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._cached).st_size
        self._in_cache = _in_page_cache(self._cached, self.size)
        with suppress(OSError):  # not every file system has that
            # The path may be another file's by now.
            past = os.open(f"/proc/self/fd/{self._cached}", os.O_RDONLY | os.O_DIRECT)
            try:
                with closing(mmap(-1, _BLOCK)) as block:
                    os.preadv(past, [block], 0)
                self._past = past
            except OSError:
                os.close(past)

    def remove(self) -> None:
        """From its folder, if it is there still: another server may have replaced it."""
        with suppress(OSError):  # of another user, or of a folder that is read only
            if os.path.samestat(self.path.stat(), os.fstat(self._cached)):
                self.path.unlink()

    def close(self) -> None:
        for one in {self._cached, self._past}:
            os.close(one)

    def read(self, memory: Sequence[Bytes], begin: int) -> None:
        """Fill it with what begins there. Raises KVFileError: the file has become shorter."""
        end = begin + sum(len(part) for part in memory)
        blocks = not any(n % _BLOCK for part in memory for n in (part.ctypes.data, len(part))) and not begin % _BLOCK
        cached = self._in_cache[begin // _BLOCK : -(-end // _BLOCK)].all()
        try:
            if blocks and not cached:
                with suppress(OSError):  # a part that ends within a block, say
                    return _whole(os.preadv, self._past, memory, begin)
            _whole(os.preadv, self._cached, memory, begin)
        except EOFError as error:
            raise KVFileError(f"expected {self.size} bytes in a file of KV, got fewer while it was read") from error


def _whole(move: Callable[..., int], file: int, memory: Sequence[Bytes], begin: int) -> None:
    """All of it by `os.preadv` or `os.pwritev`, which may move less. Raises EOFError: nothing more."""
    left = list(memory)
    while left:
        count = move(file, left[:_RUNS], begin)
        if not count:
            raise EOFError
        begin += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _in_page_cache(file: int, size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Of each block, whether the page cache has it; all True where the system does not say."""
    found = np.ones(-(-size // _BLOCK), np.uint8)
    with suppress(OSError, ValueError):  # no plain file, an empty one
        mapped = np.frombuffer(mmap(file, size, prot=PROT_READ), np.uint8)
        if PAGESIZE == _BLOCK:
            ctypes.CDLL(None).mincore(mapped.ctypes, ctypes.c_size_t(size), found.ctypes)
    return (found & 1).astype(bool)


def of_pages(pool: HostPool, pages: Tensor) -> Memory:
    """A prefix's pages in the pool."""

    def memory(piece: Piece) -> list[Bytes]:
        rows = _rows(pool.layer(piece.layer))
        return [rows[page : page + count].reshape(-1) for _, page, count in runs(pages[piece.pages])]

    return memory


def of_slots(kv: Callable[[int], PagedKV], slots: Tensor) -> Memory:
    """What a prefix's slots on the device hold, copied."""

    def memory(piece: Piece) -> list[Bytes]:
        found = kv(piece.layer)
        part = slots[rows_of(piece.pages.start, piece.pages.stop - piece.pages.start)]
        return [_rows(to_pages(taken(found.k_cache, part), taken(found.v_cache, part)).cpu()).reshape(-1)]

    return memory


def _rows(pages: Tensor) -> Bytes:
    """The same memory, a page a row."""
    memory: Bytes = pages.view(torch.uint8).flatten(1).numpy()
    return memory


def _checksum(memory: Sequence[Bytes]) -> bytes:
    total = xxhash.xxh3_128()
    for part in memory:
        total.update(part.data)
    return total.digest()


@dataclass
class Move:
    """A prefix on its way to or from its file.

    Attributes:
        offload: its pages are not given away before the move has `ended`.
        loads: from the file; else to it.
        ready: waits until its pages may be read or written.
        used: of a move to a file, digests of what host memory has, those used last behind others.
        error: why it failed.
        progress: when its last piece was begun, seconds of `time.monotonic`.
    """

    offload: Offload
    loads: bool
    ready: Callable[[], Any]
    used: Sequence[str] = ()
    error: Exception | None = None
    progress: float = 0.0


class Mover:
    """A thread for loads, and one for saves: no load waits for a save. All methods are of the scheduler's thread.

    Args:
        files: read and written.
        pool: whose pages are.
    """

    def __init__(self, files: KVFiles, pool: HostPool) -> None:
        self._files, self._pool = files, pool
        self._asked = {loads: queue.SimpleQueue[Move]() for loads in (True, False)}
        self._done: queue.SimpleQueue[Move] = queue.SimpleQueue()
        for asked in self._asked.values():
            threading.Thread(target=self._work, args=(asked,), name="sparse-attn-kv-files", daemon=True).start()

    def begin(self, move: Move) -> None:
        """Behind those of its kind."""
        self._asked[move.loads].put(move)

    def ended(self) -> Iterator[Move]:
        """Moves that have ended since the last call."""
        with suppress(queue.Empty):
            while True:
                yield self._done.get_nowait()

    def _work(self, asked: queue.SimpleQueue[Move]) -> None:
        while True:
            move = asked.get()
            try:
                self._do(move)
            except Exception as error:
                move.error = error
            self._done.put(move)

    def _do(self, move: Move) -> None:
        offload = move.offload
        memory = of_pages(self._pool, offload.pages)

        def told(piece: Piece) -> Sequence[Bytes]:
            move.progress = time.monotonic()
            return memory(piece)

        move.ready()
        self._files.used(move.used)
        way = self._files.read if move.loads else self._files.write
        way(offload.digest, offload.prefix_len, told)


def waits_for(device: torch.device) -> Callable[[], Any]:
    """Waits, in another thread, for what is queued on the current stream by now."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize
