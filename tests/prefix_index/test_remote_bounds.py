"""What a remote store says of sizes is not believed, and what this machine lacks is not the remote store's fault."""

from __future__ import annotations

import errno
import json
import mmap
import threading
from typing import Any

import pytest

from prefix_index import IndexCorrupt, OutOfMemory, link
from prefix_index.remote import RemoteStore, values
from prefix_index.remote.calls import Calls
from prefix_index.remote.values import HEADER, value_header
from prefix_index.remote.values import MANIFEST as MANIFEST_KIND
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.remote_stores import DIGEST, MANIFEST
from tests.prefix_index.shared_stores import LONG, Make, Shaky, fill_of


def say(blobs: Shaky, **changes: int) -> None:
    """The manifest with other numbers and right checksums."""
    body: dict[str, Any] = json.loads(blobs.fetch(MANIFEST, 1 << 20)[HEADER.size :])
    raw = json.dumps(body | changes).encode()
    blobs.write(MANIFEST, memoryview(value_header(MANIFEST_KIND, DIGEST, body["generation"], 0, raw) + raw))


@pytest.mark.parametrize("nbytes", [1 << 46, 1 << 62, 1 << 64, 1 << 40], ids=hex)
def test_an_index_of_absurd_length_is_damaged_and_the_others_are_served(
    make: Make, blobs: Shaky, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RemoteStore(blobs) as other:
        other.put(sample_payload())
        other.put(sample_payload(sample_identity(LONG), fill=7))
        say(blobs, nbytes=nbytes, chunk_nbytes=nbytes)
    store = make("a")
    monkeypatch.setattr(link, "FIRST_AWAY_S", 60.0)
    listed = DIGEST in {entry.digest for entry in store.list()}
    assert listed == (nbytes <= 1 << 46), "more than any container has is refused before anybody asks for it"
    with pytest.raises(IndexCorrupt):
        store.get(DIGEST)
    assert fill_of(store, sample_identity(LONG)) == 7, "the remote store is asked as before"
    assert [problem.path for problem in store.problems()] == [DIGEST]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOMEM, "Cannot allocate memory"), OverflowError("too large")], ids=repr
)
def test_no_memory_here_is_not_an_absent_store(
    make: Make, blobs: Shaky, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RemoteStore(blobs) as other:
        other.put(sample_payload(fill=3))
    store = make("a")
    monkeypatch.setattr(link, "FIRST_AWAY_S", 60.0)

    def none_left(*_: object) -> mmap.mmap:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(values.mmap, "mmap", none_left)
        with pytest.raises(OutOfMemory, match="free memory") as raised:
            store.get(DIGEST)
    assert raised.value.reason == "index_memory"
    assert fill_of(store) == 3
    assert list(store.problems()) == []


def test_no_thread_for_a_request_is_no_absent_store_either(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("a store", timeout_s=5, backoff_s=60)

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        for _ in range(40):  # more than can be under way
            with pytest.raises(OutOfMemory, match="can't start new thread"):
                calls.run(lambda: 1)
    assert calls.run(lambda: 2) == 2
    calls.close(lambda: None)


@pytest.mark.parametrize(
    ("error", "local"),
    [(MemoryError(), True), (OSError(errno.EMFILE, "Too many open files"), True), (KeyError("a defect"), False)],
    ids=repr,
)
def test_a_call_that_this_process_could_not_make_closes_no_tier(error: Exception, local: bool) -> None:
    one = link.Link(RemoteStore.__new__(RemoteStore))
    one.is_open = True

    def fails() -> None:
        raise error

    with pytest.raises(Exception) as raised:  # noqa: PT011
        one.ask(fails)
    assert isinstance(raised.value, OutOfMemory) == local
    assert one.is_away() is not local
