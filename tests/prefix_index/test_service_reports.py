"""The store service and what goes wrong while reading: whose trouble it is, and who is told of it."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefix_index import FileStore, IndexCorrupt, IndexNotFound, IndexUnreadable, Retention, StoreUnavailable
from prefix_index.service import Depot, Limits, ServedFolder, StoreClient, depot, messages, pages
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.faults.service_process import Service
from tests.prefix_index.faults.tools import SOON, fork, reap
from tests.prefix_index.served_stores import PROMPT, copied, eventually, patient, remove, served, two_tiers
from tests.prefix_index.tiered_stores import flip

DIGEST = sample_identity().digest


@pytest.fixture
def own(tmp_path: Path) -> Depot:
    return two_tiers(tmp_path)


@pytest.fixture
def client(tmp_path: Path, own: Depot) -> Iterator[StoreClient]:
    with served(tmp_path, own) as endpoint, patient(endpoint) as client:
        yield client


def in_dram(client: StoreClient) -> bool:
    with client.get(DIGEST) as index:
        return "dram" in Path(index.path or "").parts


@pytest.mark.parametrize("free", [0, 1, 2])
def test_a_client_without_descriptors_says_nothing_against_an_index(tmp_path: Path, free: int) -> None:
    with Service(tmp_path) as process, patient(process.endpoint) as other:
        other.put(sample_payload(fill=4))

        def child() -> None:
            client = patient(process.endpoint)
            client.open()
            client.get(DIGEST).close()
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
            taken = []
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(free):
                os.close(taken.pop())
            for get in (client.get, client.get_durable):
                if free < 2:
                    with pytest.raises(IndexUnreadable, match="expected readable bytes, found Too many open files"):
                        get(DIGEST)
                else:
                    get(DIGEST).close()
            for fd in taken:
                os.close(fd)
            client.rescan()
            assert len(client.list()) == 1
            client.get(DIGEST).close()
            client.check_integrity()
            client.close()

        assert reap(fork(child), SOON) == 0
        other.rescan()
        assert len(other.list()) == 1
        assert list(other.problems()) == []


def test_a_report_about_a_file_is_believed_only_after_a_look_at_it(client: StoreClient, own: Depot) -> None:
    entry = client.put(sample_payload(fill=4))
    path = Path(entry.path or "")
    copied(own)
    about_it = IndexCorrupt("checksum", expected="a", found="b", remedy="c", path=path)
    for error in (about_it, IndexUnreadable("file", expected="a", found="b", remedy="c")):
        client.report(DIGEST, error)
        assert len(client.list()) == 1
        assert list(client.problems()) == []
    flip(path, path.stat().st_size - 2 * 4096)  # the last array; the header does not show it
    client.report(DIGEST, about_it)
    assert list(client.list()) == []
    assert [(p.path, type(p.error)) for p in client.problems()] == [(str(path), IndexCorrupt)]
    client.check_integrity()


def test_one_report_at_a_time_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depot, "_CHECK_WAIT_S", 0.05)
    own = Depot(ServedFolder(tmp_path / "store", create=True))
    with served(tmp_path, own) as endpoint, patient(endpoint) as client:
        entry = client.put(sample_payload())
        error = IndexCorrupt("checksum", expected="a", found="b", remedy="c", path=entry.path)
        request = messages.Report(digest=DIGEST, error=messages.error_text(error))
        with own._checking:
            with pytest.raises(StoreUnavailable, match="expected a worker that checks an index, found another report"):
                client._ask(request, messages.Done)
            client.report(DIGEST, error)
        client.rescan()
        assert len(client.list()) == 1


def test_what_a_client_hid_is_back_unless_the_service_dropped_it(client: StoreClient, tmp_path: Path) -> None:
    client.put(sample_payload())
    client.put(sample_payload(sample_identity(PROMPT)))
    for digest in (DIGEST, sample_identity(PROMPT).digest):
        client._mirror.forget(digest)
    assert list(client.list()) == []
    with FileStore(tmp_path / "store") as other:
        other.delete(DIGEST)
    with pytest.raises(IndexNotFound):
        client.get(DIGEST)
    client.rescan()
    assert [entry.identity for entry in client.list()] == [sample_identity(PROMPT)]
    client.check_integrity()


def test_an_expired_index_that_was_asked_for_leaves_the_books_in_order(client: StoreClient) -> None:
    client.put(sample_payload(), retention=Retention(expires=time.time() + 0.3))
    time.sleep(0.4)
    for get in (client.get, client.get_durable):
        with pytest.raises(IndexNotFound):
            get(DIGEST)
    client.check_integrity()


def test_a_report_of_a_copy_in_a_tier_that_is_gone(client: StoreClient, own: Depot, tmp_path: Path) -> None:
    client.put(sample_payload())
    eventually(lambda: in_dram(client))
    copied(own)
    with client.get(DIGEST) as index:
        path = index.path
    remove(tmp_path / "dram")
    (tmp_path / "dram").touch()
    client.report(DIGEST, IndexCorrupt("checksum", expected="a", found="b", remedy="c", path=path))
    client.report(DIGEST, IndexCorrupt("checksum", expected="a", found="b", remedy="c"))
    assert len(client.problems()) >= 1
    assert list(client.list()) == []


def test_the_durable_file_is_read_without_being_used(client: StoreClient, own: Depot) -> None:
    entry = client.put(sample_payload(fill=5))
    path = Path(entry.path or "")
    eventually(lambda: in_dram(client))
    copied(own)
    long_ago = 1_000_000_000 * 10**9
    os.utime(path, ns=(long_ago, path.stat().st_mtime_ns))
    hits = [tier.hits for tier in client.status().tiers]
    with client.get_durable(sample_identity()) as index:
        assert index.path == entry.path
        assert index.array("channels")[0] == 5
    assert path.stat().st_atime_ns == long_ago
    assert [tier.hits for tier in client.status().tiers] == hits
    flip(path, 70)
    with pytest.raises(IndexCorrupt, match="header entry checksum") as caught:
        client.get_durable(DIGEST)
    assert len(client.list()) == 1  # whoever asked decides whether to report it
    client.report(DIGEST, caught.value)
    assert [p.path for p in client.problems()] == [str(path)]
    with pytest.raises(IndexNotFound):
        client.get_durable(sample_identity(PROMPT))


def test_all_that_was_collected_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_NBYTES", 4096)

    def fill(store: FileStore) -> None:
        for n in range(40):
            expired = Retention(expires=time.time() - 1.0)
            store.put(sample_payload(sample_identity(range(n, n + 16))), retention=expired)

    alone = Limits(collect_s=3600.0)  # nothing is collected but what is asked for
    with FileStore(tmp_path / "store", create=True) as store, served(tmp_path, limits=alone) as endpoint:
        fill(store)
        with patient(endpoint) as client:
            assert len({entry.digest for entry in client.collect()}) == 40
            assert not client.collect()
            fill(store)
            page = client._ask(messages.Collect(token="0" * 16), messages.Removed)
            assert page.next == len(page.entries) < 40
            assert client._ask(messages.Collect(token="0" * 16), messages.Removed) == page  # asked again: a lost answer
            with pytest.raises(
                StoreUnavailable, match="expected the one that collected, found a service that was rest"
            ):
                client._ask(messages.Collect(token="1" * 16, start=1), messages.Removed)
