"""A remote store that is away, hangs or fails: what it costs the machine, and what is sent when it is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefix_index import IndexNotFound, StoreUnavailable, link
from prefix_index.remote import ObjectBlobs, RemoteStore
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.remote_stores import DIGEST
from tests.prefix_index.shared_stores import (
    LONG,
    SOON,
    Make,
    Shaky,
    eventually,
    fill_of,
    find,
    flushed,
    machines,
    reached,
    shaky,
)


@pytest.fixture
def blobs() -> Iterator[Shaky]:
    with shaky() as blobs:
        yield blobs


@pytest.fixture
def make(tmp_path: Path, blobs: Shaky, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with machines(tmp_path, blobs, monkeypatch) as make:
        yield make


def test_the_store_opens_without_its_remote_store_and_finds_it_later(make: Make, blobs: Shaky) -> None:
    with RemoteStore(blobs) as other:
        other.put(sample_payload(sample_identity(LONG)))
    blobs.fails = True
    store = make("a")
    assert ["the network is gone" in str(p.error) for p in store.problems()] == [True]
    store.put(sample_payload(fill=5))
    assert not store.flush(0.2)
    with pytest.raises(IndexNotFound):
        store.get(sample_identity(LONG))
    assert fill_of(store) == 5
    eventually(lambda: store.counters.publish_failures > 0)
    blobs.fails = False
    store.rescan(full=True)
    assert find(store) == 64
    assert flushed(store)
    assert list(store.problems()) == []
    assert store.counters.published == 1


def test_a_deletion_reaches_a_remote_store_that_was_away(make: Make, blobs: Shaky) -> None:
    store = make("a")
    store.put(sample_payload())
    assert flushed(store)
    blobs.fails = True
    assert store.delete(DIGEST)
    assert (find(store), store.contains(DIGEST), list(store.list())) == (0, False, [])
    assert blobs._store is not None
    assert ObjectBlobs.names(blobs, "prefix_index") != {}  # past the network, which fails until this was looked at
    blobs.fails = False
    store.rescan()
    assert find(store) == 0
    assert flushed(store)
    assert blobs.names("prefix_index") == {}
    assert not store.delete(DIGEST)


def test_a_hanging_remote_store_costs_its_time_limit_once_and_local_answers_nothing(
    make: Make, blobs: Shaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network hangs until the end of the test: who waits for it longer than its limit is seen to."""
    one, two = make("a"), make("b", remote={"timeout_s": 2 * SOON}, timeout_s=2 * SOON)
    impatient = make("c", remote={"timeout_s": 0.4})
    one.put(sample_payload(sample_identity(LONG)))
    assert flushed(one)
    assert reached(impatient)
    assert find(impatient) == 64
    monkeypatch.setattr(link, "FIRST_AWAY_S", 60.0)
    blobs.answers.clear()
    before, begun = blobs.calls, time.monotonic()
    with pytest.raises(StoreUnavailable):
        impatient.get(sample_identity(LONG))
    assert time.monotonic() - begun < SOON / 2
    eventually(lambda: blobs.calls > before)
    asked = blobs.calls
    with pytest.raises(StoreUnavailable):
        impatient.get(sample_identity(LONG))
    assert blobs.calls == asked, "it was asked again"
    begun = time.monotonic()
    two.put(sample_payload(fill=5))
    assert fill_of(two) == 5
    assert time.monotonic() - begun < SOON / 2
    impatient.put(sample_payload(fill=5))
    begun = time.monotonic()
    impatient.close()
    assert time.monotonic() - begun < SOON / 2
    for store in (two, impatient):
        assert list((store.local.folder).glob("*/*.pfxindex"))


def test_closing_while_something_is_published_takes_a_bounded_time(make: Make, blobs: Shaky) -> None:
    store = make("a", timeout_s=0.2, remote={"timeout_s": 1.0})
    assert reached(store)
    blobs.gate.clear()
    store.put(sample_payload(fill=5))
    assert blobs.writing.wait(SOON)
    begun = time.monotonic()
    store.close()
    assert time.monotonic() - begun < SOON / 2  # the gate opens after SOON
    blobs.gate.set()
    eventually(lambda: not any(t.name == "prefix_index-promoter" for t in threading.enumerate()))
    store.open()
    assert fill_of(store) == 5
    assert flushed(store), "what was not published then is now"
    eventually(lambda: store.remotes[0].contains(DIGEST))
