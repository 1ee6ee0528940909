"""The remote tier over a real Mooncake: a master, holders, clients over TCP, and what goes wrong with them.

``test_remote_objects.py`` runs this file, in a network namespace where nothing but loopback is.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from prefix_index import ArrayKey, IndexNotFound, IndexPayload, StoreClosed, StoreFull, StoreUnavailable
from prefix_index.remote import Blobs, BlobsFailed, MooncakeBlobs, RemoteStore
from tests.examples import examples
from tests.prefix_index.mooncake_cluster import HOST, Cluster, shared, shared_blobs
from tests.prefix_index.remote_stores import check_values, killed_writers
from tests.prefix_index.samples import sample_identity, sample_payload
from tests.prefix_index.small_stores import balanced, python
from tests.prefix_index.test_store_machines import STEPS, RemoteMachine
from tests.prefix_index.tiers import eventually

DIGEST = sample_identity().digest
SOON = 20.0
"""Seconds; Mooncake asks a dead machine for half a minute and more."""
BLOBS = "MooncakeBlobs(sys.argv[1], listing_url=sys.argv[2], host=sys.argv[3])"
FOLDERS = (f"case-{i}" for i in itertools.count())


@pytest.fixture
def store() -> Iterator[RemoteStore]:
    """A folder of its own in the shared cluster."""
    with RemoteStore(shared_blobs(), folder=next(FOLDERS), chunk_nbytes=16 << 10, timeout_s=60) as store:
        yield store


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One to break."""
    with Cluster() as cluster:
        yield cluster


def client(cluster: Cluster, **options: Any) -> RemoteStore:
    """A patient one; whoever breaks something takes the patience from it first."""
    return RemoteStore(cluster.blobs(), **{"timeout_s": 60.0, "chunk_nbytes": 1 << 20, **options})


@contextlib.contextmanager
def broken(cluster: Cluster) -> Iterator[tuple[RemoteStore, IndexPayload]]:
    """One that has an index, and no patience for what is broken from now on."""
    with client(cluster) as store:
        payload = big_payload()
        store.put(payload)
        store._calls.timeout_s = 3.0
        yield store, payload


def big_payload(pages: int = 3, *, fill: int = 1, mib: int = 8) -> IndexPayload:
    identity = sample_identity(range(16 * pages))
    return IndexPayload(identity, {ArrayKey("kv", i): np.full(1 << 20, fill + i, np.uint8) for i in range(mib)})


def within(seconds: float, call: Callable[[], object], *errors: type[Exception]) -> Exception:
    """The error that the call ends with, in time."""
    begun = time.monotonic()
    with pytest.raises(errors) as caught:
        call()
    assert time.monotonic() - begun < seconds
    return caught.value


def put_and_get(store: RemoteStore, payload: IndexPayload) -> None:
    """Once that works again."""

    def works() -> bool:
        store.put(payload)
        with store.get(payload.identity) as index:
            index.verify()
        return True

    eventually(works, but=(StoreUnavailable,))


def test_values() -> None:
    blobs = shared_blobs()
    blobs.open(60)
    check_values(blobs, next(FOLDERS))


def test_a_holder_killed_takes_its_values_and_nothing_else(cluster: Cluster) -> None:
    with broken(cluster) as (store, payload):
        cluster.kill_holders()
        for _ in range(5):
            within(SOON, lambda: store.get(payload.identity), IndexNotFound, StoreUnavailable)
            assert not store.contains(payload.identity)
            time.sleep(0.2)
        cluster.start_holder()
        put_and_get(store, payload)
        store._calls.timeout_s = 60.0
        store.rescan()
        balanced(store)


def test_a_holder_that_hangs_holds_nobody_up(cluster: Cluster) -> None:
    payload = big_payload()
    store = client(cluster)
    store.open()
    store.put(payload)
    cluster.pause_holders()
    store._calls.timeout_s = 1.5
    error = within(SOON, lambda: store.get(payload.identity), StoreUnavailable)
    assert "expected an answer within 1.5 s, found none" in str(error)
    for call in (lambda: store.get(payload.identity), lambda: store.put(payload)):
        within(SOON, call, StoreUnavailable)
    assert len(store.list()) == 1
    begun = time.monotonic()
    store.close()  # the client is still inside a call, and must not be ended under it
    assert time.monotonic() - begun < SOON
    with pytest.raises(StoreClosed):
        store.get(payload.identity)
    within(SOON, store.open, StoreUnavailable)
    cluster.resume_holders()
    store._calls.timeout_s = 60.0
    eventually(lambda: store.open() is None, but=(StoreUnavailable,))
    put_and_get(store, payload)  # the master may have given the holder up meanwhile
    store.close()


def test_a_master_killed_and_started_again(cluster: Cluster) -> None:
    with broken(cluster) as (store, payload):
        cluster.kill_master()
        for call in (lambda: store.get(payload.identity), lambda: store.put(payload), store.rescan, store.sweep):
            within(SOON, call, StoreUnavailable)
        assert not store.contains(payload.identity)
        assert len(store.list()) == 1
        cluster.start_master()
        # A master forgets everything; what it does not know is a miss.
        eventually(lambda: within(SOON, lambda: store.get(payload.identity), IndexNotFound), but=(StoreUnavailable,))
        put_and_get(store, payload)
        store._calls.timeout_s = 60.0
        store.rescan()
        assert len(store.list()) == 1


def test_a_full_segment_evicts_and_nothing_is_ever_wrong() -> None:
    # What was asked for lately is not evicted, here for a moment only.
    small = Cluster(segment_nbytes=64 << 20, master_flags=["--default_kv_lease_ttl=200"])
    with small as cluster, client(cluster, timeout_s=20) as store:
        for pages in range(1, 25):
            store.put(big_payload(pages, fill=pages))
        hits = 0
        for pages in range(1, 25):
            with contextlib.suppress(IndexNotFound), store.get(sample_identity(range(16 * pages))) as index:
                index.verify()
                assert index.array("kv", 0)[0] == pages
                hits += 1
        assert 0 < hits < 24
        store.rescan()
        store.sweep()
        assert list(store.problems()) == []
        assert all(store.contains(entry.digest) for entry in store.list())
        error = within(120, lambda: store.put(big_payload(mib=100)), StoreFull)
        assert "expected room for the index" in str(error)


def test_what_may_have_been_evicted_while_it_was_read_is_a_miss() -> None:
    brief = Cluster(master_flags=["--default_kv_lease_ttl=1"])
    with brief as cluster, client(cluster, chunk_nbytes=8 << 20) as store:
        store.put(big_payload())
        within(SOON, lambda: store.get(big_payload().identity), IndexNotFound)


def test_a_writer_killed_at_any_moment(store: RemoteStore) -> None:
    store.put(sample_payload())
    for found in killed_writers(4, store, BLOBS, shared().address, shared().listing_url, HOST):
        assert found or not store.contains(DIGEST)  # a manifest whose writer died in the middle of it is a miss


def test_no_call_reaches_a_closed_client(cluster: Cluster) -> None:
    blobs = cluster.blobs()
    store = RemoteStore(blobs, chunk_nbytes=16 << 10, timeout_s=60)
    store.open()
    store.put(sample_payload())
    whole = store.get(DIGEST)
    store.close()
    for call in (lambda: blobs.size("x"), lambda: blobs.fetch("x", 1), lambda: blobs.delete("x")):
        with pytest.raises(BlobsFailed, match="the client is closed"):
            call()
    whole.verify()
    store.open()
    store.get(DIGEST).verify()
    store.close()


def test_a_process_ends_while_a_call_hangs(cluster: Cluster) -> None:
    code = (
        "import sys; from prefix_index import StoreUnavailable; from prefix_index.remote import *\n"
        "from tests.prefix_index.samples import *\n"
        f"blobs = {BLOBS}\n"
        "store = RemoteStore(blobs, timeout_s=60); store.open(); store.put(sample_payload())\n"
        "store._calls.timeout_s = 3; print('up', flush=True)\n"
        "sys.stdin.readline()\n"
        "try: store.get(sample_identity())\n"
        "except StoreUnavailable: print('unavailable', flush=True)\n"
    )
    arguments, quiet = (cluster.address, cluster.listing_url, HOST), subprocess.DEVNULL
    with python(code, *arguments, stdin=subprocess.PIPE, stderr=quiet) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "up\n"
        cluster.pause_holders()
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "unavailable\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.7)  # its end waits for the call's: Mooncake crashes otherwise
        cluster.resume_holders()
        assert process.wait(60) == 0


def test_no_master_at_all() -> None:
    store = RemoteStore(MooncakeBlobs(f"{HOST}:1", host=HOST), timeout_s=1)
    error = within(SOON, store.open, StoreUnavailable)
    assert str(error).startswith(f"mooncake://{HOST}:1: expected ")


class MooncakeMachine(RemoteMachine):
    def blobs(self) -> Blobs:
        return shared_blobs()


TestMooncakeMachine = MooncakeMachine.TestCase
TestMooncakeMachine.settings = settings(STEPS, max_examples=examples(5, day=4))
