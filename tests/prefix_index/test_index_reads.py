"""The bulk read: the same arrays as one by one, by every path; damage, cuts and refusals have names."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prefix_index.reader as reader_module
from prefix_index import (
    ArrayKey,
    IndexCorrupt,
    IndexFile,
    IndexNotFound,
    IndexPayload,
    IndexUnreadable,
    IndexWriter,
    OutOfMemory,
    Retention,
    StoreClosed,
)
from prefix_index.folder import bulk_reads
from prefix_index.format import aligned
from prefix_index.reader import fresh_buffer, pieces_of, run
from tests.examples import examples
from tests.prefix_index.samples import sample_identity
from tests.prefix_index.small_stores import drop_from_page_cache, dump, flip, holding, in_memory, place_of, refused

PIECE = 16384
SIZES = (1, 0, 4096, 4095, 4097, 16384, 16385, 20480, 3, 100_001, 65536, 12288)
"""Bytes per array: within a page, whole pages, one piece, several pieces, and either side of each boundary."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "PIECE_NBYTES", PIECE)


def values(nbytes: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)


@pytest.fixture(scope="module")
def payload() -> IndexPayload:
    arrays: dict[ArrayKey, Any] = {ArrayKey("a.x", i % 3, i // 3): values(n, i) for i, n in enumerate(SIZES)}
    arrays[ArrayKey("scalar")] = np.array(1.5, np.float32)
    arrays[ArrayKey("ids", 1, 0)] = np.arange(5000, dtype=np.int64).reshape(50, 100)
    return IndexPayload(sample_identity(), arrays)


@pytest.fixture
def path(payload: IndexPayload, tmp_path: Path) -> Path:
    path = tmp_path / "x.pfxindex"
    with path.open("wb", buffering=0) as out:
        IndexWriter(payload).write(out)
        os.fsync(out.fileno())
    return path


@pytest.fixture
def index(path: Path) -> Iterator[IndexFile]:
    with IndexFile.open(path) as index:
        yield index


def assert_same(found: dict[ArrayKey, Any], payload: IndexPayload, keys: Any = None) -> None:
    wanted = sorted(payload.arrays, key=lambda k: (k.layer, k.name, k.kv_head)) if keys is None else keys
    assert list(found) == list(wanted)
    for key, array in found.items():
        expected = payload.arrays[key]
        assert isinstance(expected, np.ndarray)
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(array, expected), key
        assert array.flags.writeable


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "cold"])
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_every_path_gives_what_was_written(path: Path, payload: IndexPayload, threads: int, cached: bool) -> None:
    with IndexFile.open(path) as index:
        if not cached:
            drop_from_page_cache(path)
        found = index.read_many(threads=threads)
    assert_same(found, payload)  # after close(): the arrays are the caller's


def test_addresses_come_back_in_the_order_asked_for(index: IndexFile, payload: IndexPayload) -> None:
    keys = random.Random(1).sample(index.keys, 7)
    assert_same(index.read_many(keys), payload, keys)
    assert_same(index.read_many([*keys, keys[0]]), payload, keys)
    assert index.read_many([]) == {}
    assert index.read_nbytes([]) == 0
    with pytest.raises(IndexNotFound, match=r"x.pfxindex: array: expected \('nothing', -1, -1\)"):
        index.read_many([ArrayKey("nothing")])


def test_one_layer_is_one_stretch(index: IndexFile) -> None:
    """Neighbours are fetched together; nothing is fetched that was not asked for."""
    keys = [key for key in index.keys if key.layer == 2]
    pieces = pieces_of([index.record(k) for k in keys], 0)
    assert index.read_nbytes(keys) == sum(piece.nbytes for piece in pieces)
    ends = [(piece.offset, piece.offset + piece.nbytes) for piece in pieces]
    assert [end for _, end in ends[:-1]] == [start for start, _ in ends[1:]]
    assert all(piece.nbytes <= PIECE or len(piece.records) == 1 for piece in pieces)
    assert 1 < len(pieces) < len(keys)
    assert len(pieces_of([index.record(k) for k in index.keys if (k.name, k.kv_head) == ("a.x", 0)], 0)) == 3


@given(st.lists(st.integers(0, 60_000), max_size=12), st.integers(1, 4), st.randoms())
def test_any_arrays_any_selection(sizes: list[int], threads: int, chance: random.Random) -> None:
    arrays = {ArrayKey("a", i // 4, i % 4): values(n, i) for i, n in enumerate(sizes)}
    payload = IndexPayload(sample_identity(), arrays)
    keys = [key for key in arrays if chance.random() < 0.7]
    assert_same(in_memory(dump(payload)).read_many(keys, threads=threads), payload, keys)


@pytest.mark.parametrize("where", ["first", "middle", "last", "padding"])
def test_damage_is_found_in_every_array_and_named(path: Path, where: str) -> None:
    with IndexFile.open(path) as index:
        for key in index.keys:
            record, start = index.record(key), place_of(index, key)
            last = record.nbytes - 1
            at = {"first": 0, "middle": last // 2, "last": last, "padding": record.nbytes}[where]
            if not record.nbytes or (where == "padding" and record.nbytes % 4096 == 0):
                continue
            flip(path, start + at)
            what = "padding after" if where == "padding" else "checksum of"
            message = rf"x.pfxindex: {what} \('{record.name}', {record.layer}, {record.kv_head}\)"
            with pytest.raises(IndexCorrupt, match=message):
                index.read_many()
            others = [k for k in index.keys if k != key]
            assert len(index.read_many(others)) == len(others)
            flip(path, start + at)
        index.read_many()


def test_a_file_that_is_cut_after_it_was_opened_gives_the_right_bytes_or_an_error(path: Path, payload: Any) -> None:
    whole = path.read_bytes()
    cuts = [at for edge in range(0, len(whole), 4096) for at in (edge - 1, edge, edge + 1) if at >= 0]
    for cut in random.Random(7).sample(cuts, examples(len(cuts), 60)):
        with IndexFile.open(path) as index:
            os.truncate(path, cut)
            carried = index.payload().arrays
            for key in index.keys:
                record = index.record(key)
                if not record.nbytes or place_of(index, key) + aligned(record.nbytes) <= cut:
                    assert np.array_equal(index.read_many([key])[key], payload.arrays[key])
                else:
                    with pytest.raises(IndexCorrupt):
                        index.read_many([key])
                    with pytest.raises(IndexCorrupt):
                        carried[key].load()  # type: ignore[union-attr]
        path.write_bytes(whole)


def test_who_carries_an_index_may_stop_before_each_array(index: IndexFile) -> None:
    def stop() -> None:
        raise InterruptedError("enough")

    for array in index.payload(stop).arrays.values():
        with pytest.raises(InterruptedError, match="enough"):
            array.load()  # type: ignore[union-attr]


def test_an_error_of_the_system_is_unreadable(path: Path, tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with IndexFile.open(path) as index:
            os.dup2(folder, index.fileno())
            with pytest.raises(IndexUnreadable, match=r"x.pfxindex: .*expected readable bytes, found Is a dir"):
                index.read_many()
    finally:
        os.close(folder)


def test_a_closed_index_and_one_closed_meanwhile(path: Path) -> None:
    index = IndexFile.open(path)
    whole = path.read_bytes()
    with bulk_reads(index.fileno()) as fetch:
        index.close()
        out = bytearray(8192)
        assert fetch(memoryview(out), 4096) == 8192
        assert out == whole[4096:12288]
    with pytest.raises(StoreClosed, match=r"x.pfxindex: index file: expected open, found closed"):
        index.read_many()


def test_all_lie_in_one_buffer(index: IndexFile) -> None:
    nbytes = index.read_nbytes()
    assert nbytes % 4096 == 0
    found = [array for array in index.read_many().values() if array.nbytes]
    begins = sorted(array.ctypes.data for array in found)
    assert all(begin % 4096 == 0 for begin in begins)
    assert begins[-1] - begins[0] < nbytes


def test_memory_that_o_direct_cannot_take(index: IndexFile, path: Path) -> None:
    """It is tried, refused for this memory, and done without."""
    whole, out = path.read_bytes(), fresh_buffer(12289).data[1:]
    drop_from_page_cache(path)
    with bulk_reads(index.fileno()) as fetch:
        assert fetch(out, 4096) == 12288
    assert out == whole[4096:16384]


def test_a_file_system_without_o_direct(path: Path, payload: IndexPayload) -> None:
    drop_from_page_cache(path)
    with IndexFile.open(path) as index, refused("open", lambda _, flags, *__: bool(flags & os.O_DIRECT), errno.EINVAL):
        assert_same(index.read_many(), payload)


def test_an_error_leaves_no_thread_behind(index: IndexFile) -> None:
    pieces = pieces_of([index.record(k) for k in index.keys], 0)
    seen = []

    def fetch(out: memoryview, offset: int) -> int:
        seen.append(offset)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(pieces, fetch, memoryview(bytearray(index.read_nbytes())), threads=2)
    assert 1 <= len(seen) <= 2 < len(pieces)
    assert not [t for t in threading.enumerate() if t.name.startswith("index-read")]


def test_a_system_without_threads_is_short_of_memory(index: IndexFile) -> None:
    before = threading.stack_size(1 << 46)  # no thread has that much
    try:
        with pytest.raises(OutOfMemory, match="threads to read with, found can't start new thread"):
            index.read_many()
    finally:
        threading.stack_size(before)
    assert len(index.read_many()) == len(index.keys)


READ_ALL_RECORDS = """
import sys
import prefix_index.remote
from prefix_index import FileStore
from prefix_index.remote.values import LEASE, LEASES, LeaseRecord, pack_record, unpack_record

worked_out = set()

def called(frame, event, arg):
    if event == "call" and "msgspec" in frame.f_code.co_filename:
        worked_out.add(frame.f_code.co_name)

sys.setprofile(called)
with FileStore(sys.argv[1]) as store:
    (entry,) = store.list()
    assert entry.retention.pinned
    store.get(entry.digest).close()
lease = pack_record(LEASE, entry.digest, "0" * 16, LeaseRecord(holder="me", expires=1.0))
unpack_record(LEASE, entry.digest, lease, LEASES)
sys.setprofile(None)
print(*sorted(worked_out))
"""


def test_types_of_records_are_worked_out_before_any_thread_reads_one(tmp_path: Path) -> None:
    """msgspec does so in Python at a type's first use; processes whose threads did it together died (SIGSEGV)."""
    holding(tmp_path / "store", sample_identity(), retention=Retention(pinned=True)).close()
    ran = subprocess.run([sys.executable, "-c", READ_ALL_RECORDS, tmp_path / "store"], capture_output=True, timeout=300)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"\n", b"")
