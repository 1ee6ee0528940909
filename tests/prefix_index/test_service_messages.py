"""The store service's messages: what is reserved and committed, listings in pages, errors as their classes."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from prefix_index import (
    FileStore,
    IndexCorrupt,
    IndexMismatch,
    IndexNotFound,
    IndexStoreError,
    Retention,
    StoreFolderError,
    StoreUnavailable,
    errors,
)
from prefix_index.folder import PARTIAL
from prefix_index.service import StoreClient, messages
from prefix_index.service.changes import ChangeLog
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.served_stores import PROMPT, patient
from tests.prefix_index.tiers import serving


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path) as endpoint:
        yield endpoint


@pytest.fixture
def client(endpoint: str) -> Iterator[StoreClient]:
    with patient(endpoint) as client:
        yield client


def test_what_is_not_what_was_reserved_is_refused(client: StoreClient, tmp_path: Path) -> None:
    digest = sample_identity().digest
    big = sample_payload(sample_identity(PROMPT))

    def commit(partial: str, nbytes: int, inode: int) -> messages.Stored:
        request = messages.Commit(digest=digest, partial=partial, nbytes=nbytes, inode=inode)
        return client._ask(request, messages.Stored)

    reserved = client._ask(messages.Reserve(digest=digest, nbytes=45056), messages.Reserved)
    file = tmp_path / "store" / digest[:2] / reserved.partial
    assert (file.stat().st_size, stat.S_IMODE(file.stat().st_mode)) == (45056, 0o600)
    inode = file.stat().st_ino
    with pytest.raises(errors.IndexForeign, match="file type"):
        commit(reserved.partial, 45056, inode)
    with pytest.raises(IndexCorrupt, match="partial file's length: expected 4096 bytes, found 45056"):
        commit(reserved.partial, 4096, inode)
    with pytest.raises(IndexMismatch, match="partial file: expected the writer's own"):
        commit(reserved.partial, 45056, inode + 1)
    with pytest.raises(IndexNotFound, match="partial file"):
        commit(f"{PARTIAL}1-{'0' * 16}", 45056, inode)
    with FileStore(tmp_path / "other", create=True) as other:
        raw = Path(other.put(big).path or "").read_bytes()
    file.write_bytes(raw)
    with pytest.raises(IndexMismatch, match="identity digest"):
        commit(reserved.partial, len(raw), inode)
    for bad in ("../../etc/passwd", ".partial-1-/", digest + ".pfxindex", reserved.partial + "\n", ""):
        with pytest.raises(IndexStoreError, match="service message: expected one frame"):
            commit(bad, 45056, inode)
    assert list(client.list()) == []
    assert list(client.problems()) == []


def test_a_link_in_the_place_of_a_partial_file_is_not_followed(client: StoreClient, tmp_path: Path) -> None:
    digest = sample_identity().digest
    reserved = client._ask(messages.Reserve(digest=digest, nbytes=45056), messages.Reserved)
    file = tmp_path / "store" / digest[:2] / reserved.partial
    with FileStore(tmp_path / "other", create=True) as other:
        target = Path(other.put(sample_payload()).path or "")
    file.unlink()
    file.symlink_to(target)
    request = messages.Commit(digest=digest, partial=reserved.partial, nbytes=45056, inode=target.stat().st_ino)
    with pytest.raises(StoreFolderError):
        client._ask(request, messages.Stored)
    assert list(client.list()) == []


def test_a_commit_said_twice_is_one_commit(client: StoreClient, tmp_path: Path) -> None:
    client.put(sample_payload())
    digest = sample_identity().digest
    inode = (tmp_path / "store" / digest[:2] / f"{digest}.pfxindex").stat().st_ino
    request = messages.Commit(digest=digest, partial=f"{PARTIAL}1-{'0' * 16}", nbytes=45056, inode=inode)
    assert client._ask(request, messages.Stored).entry.identity == sample_identity()


def test_reservations_are_bounded(client: StoreClient) -> None:
    request = messages.Reserve(digest=sample_identity().digest, nbytes=4096)
    for _ in range(256):
        client._ask(request, messages.Reserved)
    with pytest.raises(StoreUnavailable, match="expected at most 256 indexes being written, found 256 already"):
        client._ask(request, messages.Reserved)


def test_a_long_listing_comes_in_pages_and_changes_come_alone(tmp_path: Path) -> None:
    payload = sample_payload()
    entry_of = {}
    with FileStore(tmp_path / "one", create=True) as store:
        entry = store.put(payload)
    log = ChangeLog()
    for n in range(2000):
        identity = sample_identity(range(n, n + 16))
        entry_of[identity.digest] = msgspec.structs.replace(entry, identity=identity)
        log.put(identity.digest, entry_of[identity.digest])
    seen, seq, pages, epoch = {}, 0, 0, "another"
    while True:
        delta = log.since(epoch, seq)
        assert delta.reset == (pages == 0)
        assert len(messages.encode(delta)) < messages.MAX_ANSWER_NBYTES // 2
        seen |= {e.identity.digest: e for e in delta.entries}
        epoch, seq, pages = delta.epoch, delta.seq, pages + 1
        if not delta.more:
            break
    assert seen.keys() == entry_of.keys()
    assert pages > 3
    gone = next(iter(entry_of))
    log.remove(gone)
    assert log.since(epoch, seq) == messages.Delta(epoch=epoch, seq=seq + 1, entries=[], removed=[gone])
    assert log.since(epoch, seq + 1).entries == []
    assert log.since(epoch, seq + 2).reset
    assert log.become({}, seq) is None
    assert len(log.become({}) or ()) == 1999


def test_removed_digests_are_forgotten_in_time_and_who_is_behind_starts_over(tmp_path: Path) -> None:
    with FileStore(tmp_path / "one", create=True) as store:
        entry = store.put(sample_payload())
    log = ChangeLog()
    for n in range(20_000):
        log.put(f"{n:064x}", entry)
        log.remove(f"{n:064x}")
    assert len(log._changed) <= 16_385
    assert len(log._log) <= 2 * 16_385 + 1025
    assert log.since(log.epoch, 3).reset
    assert not log.since(log.epoch, 39_990).reset


def test_two_clients_agree_after_a_rescan(endpoint: str) -> None:
    with patient(endpoint) as a, patient(endpoint) as b:
        for n in range(1, 5):
            a.put(sample_payload(sample_identity(PROMPT[: 16 * n])))
        assert list(b.list()) == []
        b.rescan()
        assert a.list() == b.list()
        a.delete(sample_identity(PROMPT))
        a.retain(sample_identity(PROMPT[:16]), Retention(pinned=True))
        b.rescan()
        assert a.list() == b.list()
        b.check_integrity()


KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, IndexStoreError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_comes_back_as_its_class(kind: type[IndexStoreError]) -> None:
    for path in (None, "/a/b"):
        error = kind("w", expected="e", found="f", remedy="r", path=path)
        raw = messages.encode(messages.Failed(error=messages.error_text(error)))
        back = messages.error_of(messages.decode_answer(raw).error)  # type: ignore[union-attr]
        assert (type(back), str(back), back.path) == (kind, str(error), path)


def test_an_unknown_error_comes_back_as_the_base_class() -> None:
    for kind in ("FromTheFuture", "os", "IndexStoreError", "Path", ""):
        text = messages.ErrorText(kind=kind, what="w", expected="e", found="f", remedy="r")
        assert type(messages.error_of(text)) is IndexStoreError
    text = messages.error_text(ZeroDivisionError("division by zero"))
    assert str(messages.error_of(text)) == (
        "store service: expected an answer, found ZeroDivisionError: division by zero; "
        "this is a defect of the service: see its log"
    )


def test_an_error_with_an_undecodable_path_crosses() -> None:
    error = IndexCorrupt("w" * 10_000, expected="e", found="f", remedy="r", path="/a/\udcff")
    back = messages.error_of(messages.error_text(error))
    assert back.path == "/a/\\xff"
    assert len(back.what) == messages.MAX_TEXT


def test_a_client_of_another_protocol_version_is_told(endpoint: str) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    try:
        socket.send(b"12345678" + messages.encode(messages.Hello(version=99, pid=1)))
        assert socket.poll(60_000)
        answer = socket.recv()
        assert answer[:8] == b"12345678"
        failed = messages.decode_answer(answer[8:])
        assert isinstance(failed, messages.Failed)
        error = messages.error_of(failed.error)
        assert isinstance(error, StoreUnavailable)
        assert "expected protocol version 1, found version 99" in str(error)
        socket.send(b"12345679" + messages.encode(messages.Ping()))
        assert socket.poll(60_000)
        assert isinstance(messages.decode_answer(socket.recv()[8:]), messages.HelloFirst)
    finally:
        socket.close(linger=0)
