"""Several machines on one object store: what they see of each other, ranges of an index, leases, killed writers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefix_index import IndexNotFound
from prefix_index.remote import ObjectBlobs, claims
from prefix_index.remote.values import LEASE, LEASES, unpack_record
from tests.prefix_index.balance import balanced
from tests.prefix_index.remote_stores import DIGEST, OBJECT_STORE_NAMES, OBJECT_STORES, chunks_of, file_blobs, machine
from tests.prefix_index.samples import read_fill, sample_payload
from tests.prefix_index.small_stores import Clock, in_threads, python
from tests.prefix_index.tiers import eventually


@pytest.fixture(params=OBJECT_STORE_NAMES)
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectBlobs]:
    made = OBJECT_STORES[request.param](tmp_path)
    made.open(60)
    yield made
    made.close()


# Several machines


@pytest.mark.parametrize("full", [False, True])
def test_a_listing_that_took_long_does_not_undo_what_happened_meanwhile(full: bool) -> None:
    class Slow(ObjectBlobs):
        """While the names come in, this process goes on."""

        meanwhile: Callable[[], object] | None = None

        def names(self, folder: str) -> Any:
            names = super().names(folder)
            call, self.meanwhile = self.meanwhile, None
            if call is not None:
                call()
            return names

    blobs = Slow("memory:///")
    with machine(blobs) as store:
        blobs.meanwhile = lambda: store.put(sample_payload())
        store.rescan(full=full)
        assert [e.digest for e in store.list()] == [DIGEST]
        blobs.meanwhile = lambda: store.delete(DIGEST)
        store.rescan(full=full)
        assert list(store.list()) == list(store.problems()) == []
        balanced(store)


def test_two_writers_of_one_key_on_two_machines(tmp_path: Path) -> None:
    """The first index stays, whole, and nothing of the other one."""
    blobs = file_blobs(tmp_path)
    with machine(blobs) as one, machine(blobs) as two:
        for turn in range(10):
            put: dict[int, bool] = {}

            def write(i: int, put: dict[int, bool] = put) -> None:
                put[i] = (one, two)[i].put(sample_payload(fill=i + 1))

            in_threads(partial(write, 0), partial(write, 1))
            assert sorted(put.values()) == [False, True]
            assert len(chunks_of(blobs)) == 3
            for store in (one, two):
                with store.get(DIGEST) as index:
                    index.verify()
                    assert put[int(index.array("channels")[0]) - 1]
            assert (one, two)[turn % 2].delete(DIGEST)


def test_readers_under_a_writer_on_another_machine(tmp_path: Path) -> None:
    blobs = file_blobs(tmp_path)
    with machine(blobs) as writer, machine(blobs) as reader:
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                with contextlib.suppress(IndexNotFound), reader.get(DIGEST) as index:
                    assert index.stats == {"fill": int(index.array("channels")[0])}
                    index.verify()
                reader.rescan()

        def write() -> None:
            try:
                for fill in range(1, 40):
                    assert writer.put(sample_payload(fill=fill))
                    assert writer.delete(DIGEST)
            finally:
                done.set()

        in_threads(write, read, read, read)


def test_sweep_leaves_a_put_under_way_alone(tmp_path: Path) -> None:
    """By the writer's clock; one that ran backwards only keeps garbage longer."""
    blobs = file_blobs(tmp_path)
    blobs.open(5)
    clock = Clock()
    with machine(blobs, grace_s=100, clock=clock) as store:
        store.put(sample_payload())
        for age, kept in ((0, True), (99, True), (101, False), (-1e6, True)):
            generation = f"{int(clock.now - age):08x}00000000"
            name = f"prefix_index/{DIGEST}.{generation}.000000"
            blobs.write(name, memoryview(b"x"))
            store.sweep()
            assert (name in blobs.names("prefix_index")) == kept
        with store.get(DIGEST) as index:
            index.verify()


def test_a_writer_killed_at_any_moment_leaves_an_index_or_none(tmp_path: Path) -> None:
    """Processes put and delete in a loop and are killed; what is there afterwards is always whole."""
    blobs = file_blobs(tmp_path)
    code = (
        "import sys, itertools; from prefix_index.remote import *; from tests.prefix_index.samples import *\n"
        "store = RemoteStore(ObjectBlobs(sys.argv[1]), chunk_nbytes=4096); store.open(); print('up', flush=True)\n"
        "for fill in itertools.count(): store.put(sample_payload(fill=fill % 250)); store.delete(sample_identity())\n"
    )
    rng = np.random.default_rng(0)
    with machine(blobs) as store:
        for _ in range(8):
            with python(code, (tmp_path / "objects").as_uri()) as writer:
                assert writer.stdout is not None
                assert writer.stdout.readline() == "up\n"
                time.sleep(float(rng.uniform(0, 0.1)))
                writer.kill()
            with contextlib.suppress(IndexNotFound), store.get(DIGEST) as index:
                index.verify()
                assert index.stats == {"fill": int(index.array("channels")[0])}
            store.rescan()
            assert list(store.problems()) == []
        store.put(sample_payload())
    with machine(blobs, grace_s=-10) as store:
        store.sweep()
        (entry,) = store.list()
        assert len(chunks_of(blobs)) in (3, -(-entry.nbytes // 4096))
        read_fill(store)


def test_a_lease_outlives_its_time_only_while_its_holder_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of this machine that the test sets: how soon the holder gets its turn does not matter."""
    blobs, clock = file_blobs(tmp_path), Clock()
    monkeypatch.setattr(claims, "time", SimpleNamespace(time=clock))
    code = (
        "import sys, time; from prefix_index.remote import *\n"
        "store = RemoteStore(ObjectBlobs(sys.argv[1]), lease_ttl_s=0.6); store.open()\n"
        "lease = store.lease(sys.argv[2]); print(lease is not None, flush=True); time.sleep(600)\n"
    )

    def expires() -> float:
        return unpack_record(LEASE, DIGEST, blobs.fetch(f"prefix_index/{DIGEST}.lease", 1 << 20), LEASES).expires

    with machine(blobs, lease_ttl_s=0.6, grace_s=0) as store:
        with python(code, (tmp_path / "objects").as_uri(), DIGEST) as holder:
            try:
                assert holder.stdout is not None
                assert holder.stdout.readline() == "True\n"
                first, deadline = expires(), time.monotonic() + 60
                while expires() == first:
                    assert time.monotonic() < deadline, "the holder does not renew it"
                    time.sleep(0.05)
                os.kill(holder.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
                last = expires()
                clock.now = last - 0.001
                assert clock.now > first
                assert store.lease(DIGEST) is None
            finally:
                holder.kill()
        clock.now = last
        lease = store.lease(DIGEST)
        assert lease is not None
        lease.release()


def test_a_broken_or_absurd_lease_stops_nobody(tmp_path: Path) -> None:
    blobs = file_blobs(tmp_path)
    with machine(blobs, grace_s=0) as store:
        blobs.write(f"prefix_index/{DIGEST}.lease", memoryview(b"garbage"))
        with store.lease(DIGEST) or pytest.fail("held"):
            pass
        blobs.write(f"prefix_index/{DIGEST}.lease", memoryview(b"garbage"))
        store.sweep()
        assert blobs.names("prefix_index") == {}


def test_a_forgotten_lease_ends(tmp_path: Path) -> None:
    with machine(file_blobs(tmp_path), lease_ttl_s=3600) as store:
        store.lease(DIGEST)
        eventually(lambda: store.lease(DIGEST))
