"""What only the file store has: a folder that others write to, that processes die in, that is not what it should be;
its build leases; who may look into it; and stores that are read but not written to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from prefix_index import (
    FileStore,
    IndexCorrupt,
    IndexForeign,
    IndexMismatch,
    IndexNotFound,
    IndexTooNew,
    InvalidPayload,
    Retention,
    StoreFolderError,
)
from prefix_index import folder as folder_module
from prefix_index.connect import open_store
from prefix_index.service import StoreClient, StoreServer
from prefix_index.service.endpoint import SocketPlace
from tests.prefix_index.samples import IDS, PINNED, identity_of, read_fill, sample_identity, sample_payload
from tests.prefix_index.small_stores import (
    ONE,
    SOON,
    balanced,
    fork,
    holding,
    index_file,
    keep_file,
    of_version,
    opened,
    reap,
)
from tests.prefix_index.tiers import copies_in, endpoint_in


def put_file(folder: Path, **options: Any) -> Path:
    with opened(folder) as store:
        return Path(store.put(sample_payload(**options)).path or "")


def test_layout_on_disk_which_a_new_store_finds_and_no_salt_in_it(folder: Path) -> None:
    salt = "s3cret-tenant-salt"
    identity = sample_identity(extra_key=salt)
    path = put_file(folder, identity=identity, fill=5)
    assert path == folder / identity.digest[:2] / f"{identity.digest}.pfxindex"
    assert sorted(p.name for p in folder.rglob("*")) == sorted([identity.digest[:2], path.name])
    assert salt.encode() not in path.read_bytes()
    with opened(folder, create=False) as store:
        assert [entry.identity for entry in store.list()] == [identity]
        assert read_fill(store, identity) == 5


def test_what_is_no_folder_to_write_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreFolderError, match=r"store: expected an existing folder, found nothing; create"):
        opened(folder, create=False)
    with pytest.raises(StoreFolderError, match="expected a usable folder, found File name too long"):
        FileStore(folder.parent / ("a" * 256)).open()
    with pytest.raises(StoreFolderError, match="found nothing"):
        FileStore(f"{folder}/a\0b").open()
    folder.write_text("x")
    for create in (True, False):
        with pytest.raises(StoreFolderError, match="found something that is not a folder; give another path"):
            opened(folder, create=create)
    folder.unlink()
    folder.mkdir()
    for write, kind in ((True, "writable"), (False, "readable")):
        monkeypatch.setattr(os, "access", lambda path, mode, write=write: not (write or mode & os.R_OK))
        with pytest.raises(StoreFolderError, match=f"expected a {kind} folder, found no permission; change"):
            opened(folder, create=False, write=write)


def test_changes_within_one_tick_of_the_clock_are_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put_file(folder)
    status = path.parent.stat()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: status.st_mtime_ns)  # the store looks within that tick, however late
        store = opened(folder)
    with store:
        path.unlink()
        os.utime(path.parent, ns=(status.st_atime_ns, status.st_mtime_ns))
        store.rescan()
        assert list(store.list()) == []


def test_bad_files_are_problems_with_names(folder: Path, fixture_file: Path) -> None:
    good = put_file(folder)
    raw = fixture_file.read_bytes()
    notes, readme = good.parent / "notes", folder / "README.txt"
    link, pipe = (good.with_name(f"{good.parent.name}{digit * 62}.pfxindex") for digit in "01")
    link.symlink_to(good)
    os.mkfifo(pipe)
    (folder / ".hidden").write_text("ignored")
    planted: dict[Path, tuple[bytes, type[Exception]]] = {
        index_file(folder, IDS[1]): (raw[:5000], IndexCorrupt),
        index_file(folder, IDS[2]): (b"not an index at all", IndexForeign),
        index_file(folder, IDS[3]): (raw, IndexMismatch),
        index_file(folder, IDS[4]): (of_version(9, raw), IndexTooNew),
        index_file(folder, IDS[5]): (b"", IndexCorrupt),
        readme: (b"hello", IndexForeign),
        notes: (b"hello", IndexForeign),
    }
    for path, (data, _) in planted.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    expected = {path: error for path, (_, error) in planted.items()} | {link: IndexForeign, pipe: IndexForeign}
    with opened(folder) as store:
        assert [e.digest for e in store.list()] == [sample_identity().digest]
        assert {Path(p.path): type(p.error) for p in store.problems()} == expected
        for problem in store.problems():
            assert problem.path in str(problem.error)
        for path in expected:
            digest = path.name.removesuffix(".pfxindex")
            if len(digest) == 64:
                assert not store.contains(digest)
                with pytest.raises(expected[path]):
                    store.get(digest)
                assert store.delete(digest)
        balanced(store)
        assert {Path(p.path) for p in store.problems()} == {readme, notes}
        assert good.exists()


def test_linked_shard_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    path = put_file(folder)
    elsewhere = tmp_path / "elsewhere"
    path.parent.rename(elsewhere)
    path.parent.symlink_to(elsewhere)
    with opened(folder) as store:
        assert list(store.list()) == []
        assert [type(p.error) for p in store.problems()] == [IndexForeign]
        with pytest.raises(IndexNotFound):
            store.get(sample_identity())
        with pytest.raises(StoreFolderError):
            store.put(sample_payload())


def test_partials_are_ignored_and_the_dead_ones_removed(folder: Path) -> None:
    shard = put_file(folder).parent
    names = [".partial-1-old", ".partial-2-new", ".partial-3-alive"]
    for name in names:
        (shard / name).write_bytes(b"x" * 100)
    for name in (names[0], names[2]):
        os.utime(shard / name, (1, 1))

    def left(**options: Any) -> list[str]:
        with opened(folder, **options) as store:
            assert len(store.list()) == 1
            assert list(store.problems()) == []
        return sorted(p.name for p in shard.glob(".partial-*"))

    with (shard / names[2]).open("rb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        assert left() == names[1:]
    assert left() == names[1:2]
    assert left(partial_grace_s=0.0) == []


DIGEST = sample_identity().digest


@pytest.fixture
def store(folder: Path) -> Iterator[FileStore]:
    with FileStore(folder, create=True, partial_grace_s=0.0) as store:
        yield store


def lease_file(folder: Path) -> Path:
    return folder / DIGEST[:2] / f".lease-{DIGEST}"


def test_what_a_dead_holder_left_is_cleared_away(folder: Path, store: FileStore) -> None:
    lease_file(folder).parent.mkdir(parents=True)
    lease_file(folder).write_text("")
    other = lease_file(folder).with_name(f".lease-{DIGEST[:2]}{'0' * 62}")
    with store.lease(other.name.removeprefix(".lease-")) or pytest.fail("held"):
        store.rescan()
        store.collect()
        assert not lease_file(folder).exists()
        assert other.exists()
        assert list(store.problems()) == []
    assert not other.exists()
    lease_file(folder).write_text("")
    with store.lease(DIGEST) or pytest.fail("a file without a lock is free"):
        assert store.lease(DIGEST) is None


def test_a_fresh_lease_file_is_left_to_whoever_is_about_to_lock_it(folder: Path) -> None:
    with FileStore(folder, create=True) as store:
        lease_file(folder).parent.mkdir()
        lease_file(folder).write_text("")
        store.rescan()
        store.collect()
        assert lease_file(folder).exists()


@pytest.mark.parametrize(
    "plant", [lambda at, target: at.symlink_to(target), lambda at, _: os.mkfifo(at), lambda at, _: at.mkdir()]
)
def test_what_is_planted_by_the_name_of_a_lease(folder: Path, store: FileStore, tmp_path: Path, plant: Any) -> None:
    path, target = lease_file(folder), tmp_path / "target"
    path.parent.mkdir()
    plant(path, target)
    with pytest.raises(StoreFolderError, match=r"lease: expected a regular file, found a link, pipe.*; remove it"):
        store.lease(DIGEST)
    store.rescan()
    store.collect()
    assert path.is_symlink() or path.exists()
    assert not target.exists()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOLCK])
def test_a_lock_that_the_system_does_not_give(store: FileStore, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no locks, a lease is one among the users of this store."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(error, "no lock")))
    if error == errno.EIO:
        with pytest.raises(StoreFolderError, match="no lock"):
            store.lease(DIGEST)
        return
    with store.lease(DIGEST) or pytest.fail("held"):
        assert store.lease(DIGEST) is None
    assert store.lease(DIGEST) is not None


def test_an_unlinked_lease_file_is_not_taken_for_the_new_one(folder: Path, store: FileStore) -> None:
    """Whoever removes the file by hand ends the lease; the old holder's release leaves the new one's alone."""
    old = store.lease(DIGEST)
    assert old is not None
    lease_file(folder).unlink()
    new = store.lease(DIGEST)
    assert new is not None
    old.release()
    assert lease_file(folder).exists()
    assert store.lease(DIGEST) is None
    new.release()


def test_a_lease_that_nobody_has_any_more_is_free(folder: Path) -> None:
    with FileStore(folder, create=True) as store:
        assert store.lease(DIGEST) is not None
        gc.collect()
        assert store.lease(DIGEST) is not None


NOBODY = 65534


def modes(folder: Path) -> set[int]:
    """Of the store's folder and its shards."""
    return {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}


def file_modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*/*")}


@pytest.fixture(autouse=True)
def usual_umask() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize(
    ("umask", "options", "mode"),
    [
        (0o022, {}, 0o700),
        (0o022, {"mode": "0750", "group": os.getgid()}, 0o2750),
        (0o077, {"mode": 0o750, "group": os.getgid()}, 0o2750),
        (0o022, {"mode": 0o770, "group": os.getgid()}, 0o2770),
    ],
)
def test_a_new_store_is_its_owners_alone_or_as_mode_and_group_say(
    folder: Path, umask: int, options: dict[str, Any], mode: int
) -> None:
    os.umask(umask)
    folder = folder / "below" / "store"
    with holding(folder, IDS[0], retention=PINNED, **options) as store, store.lease(IDS[1]) or pytest.fail("held"):
        assert modes(folder) == {mode}
        assert file_modes(folder) == {mode & 0o666}
        assert {path.stat().st_gid for path in folder.rglob("*")} == {os.getgid()}


@pytest.mark.parametrize("mode", ["0600", "rwx", "", 0o4700, 0o070, -1])
def test_modes_that_keep_the_owner_out_and_groups_that_are_none_are_refused(folder: Path, mode: int | str) -> None:
    with pytest.raises(InvalidPayload, match="mode of the store's folder: expected 0700 to 0777"):
        FileStore(folder, mode=mode)
    with pytest.raises(InvalidPayload, match="group of the store: expected a group, found 'no-such-group'"):
        FileStore(folder, group="no-such-group")


def test_who_names_no_mode_keeps_to_that_of_the_folder(folder: Path) -> None:
    """A pin by a command, say, in a store that a group shares."""
    holding(folder, IDS[0], mode="0770").close()
    with holding(folder, IDS[1]) as store:
        store.retain(IDS[0], PINNED)
    assert modes(folder) == {0o770}
    assert file_modes(folder) == {0o660}


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can reach, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


def test_another_users_store_is_read(public: Path) -> None:
    folder = public / "store"
    holding(folder, IDS[0], retention=PINNED, mode=0o755).close()
    if os.geteuid() != 0:
        for place in (*folder.iterdir(), folder):
            place.chmod(0o555)

    def read() -> None:
        """As somebody who may not write to this user's folders."""
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        with pytest.raises(StoreFolderError, match="expected a writable folder, found no permission"):
            FileStore(folder).open()
        with open_store(folder, write=False) as store:  # type: ignore[attr-defined]
            assert [(e.identity, e.retention) for e in store.list()] == [(IDS[0], PINNED)]
            assert read_fill(store) == 0
            store.rescan()
            balanced(store)
            for write in (
                lambda: store.put(sample_payload(IDS[0])),
                lambda: store.put(sample_payload(IDS[1])),
                lambda: store.retain(IDS[0], PINNED),
                lambda: store.delete(IDS[0]),
                lambda: store.lease(IDS[1]),
            ):
                with pytest.raises(StoreFolderError):
                    write()
            assert list(store.collect()) == []

    assert reap(fork(read), 120) == 0
    assert index_file(folder, IDS[0]).exists()
    assert keep_file(folder, IDS[0]).exists()
    for place in (folder, *folder.iterdir()):
        place.chmod(0o700)


def test_two_tiers_are_never_one_folder(folder: Path, tmp_path: Path) -> None:
    """Dropping a copy would remove the index."""
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(StoreFolderError, match=r"tiers of a store: expected different folders, found .* twice; give"):
        StoreServer(FileStore(folder, copies=copies_in(tmp_path / "link")), endpoint_in(tmp_path)).open()
    for addresses in ([folder, tmp_path / "link"], [folder, "memory:///", "file://" + str(folder)]):
        with pytest.raises(StoreFolderError, match="expected different folders"):
            open_store(addresses)


def test_a_store_that_somebody_keeps_locked_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefix_index.folder._EXCLUSIVE_WAIT_S", 0.05)
    with opened(folder, max_bytes=2 * ONE) as store:
        fd = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            for identity in IDS[:3]:
                store.put(sample_payload(identity))
            store.retain(IDS[2], Retention(expires=1.0))
            assert [e.identity for e in store.collect()] == [IDS[2]]
            assert len(store.list()) == 1
            balanced(store)
        finally:
            os.close(fd)


def write(path: Path, number: int, cap: int) -> None:
    """Each index once: while one is replaced, the old and the new file are there, above the cap."""
    folder_module._EXCLUSIVE_WAIT_S = 120.0  # type: ignore[misc]  # who gives up waiting may exceed the cap
    with opened(path, max_bytes=cap) as store:
        for step in range(60):
            store.put(sample_payload(identity_of(100 * number + step), fill=step))
            for entry in store.list():
                with contextlib.suppress(IndexNotFound):
                    read_fill(store, entry.digest)
            if step % 10 == 0:
                store.collect()
        assert list(store.problems()) == []


def test_processes_keep_one_cap_together(folder: Path) -> None:
    cap = 5 * ONE + 100
    with opened(folder) as store:
        children = [fork(partial(write, folder, number, cap)) for number in range(3)]
        most = 0
        fd = os.open(folder, os.O_RDONLY)
        running = True
        while running:
            ended = [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in children]
            running = None in ended  # so the last look is at what they leave
            fcntl.flock(fd, fcntl.LOCK_EX)  # so that nothing gets a name, or takes room, while files are counted
            sizes = 0
            for path in (*folder.rglob("*.pfxindex"), *folder.rglob(".partial-*")):
                with contextlib.suppress(FileNotFoundError):
                    sizes += path.stat().st_size
            fcntl.flock(fd, fcntl.LOCK_UN)
            most = max(most, sizes)
            time.sleep(0.03)
        os.close(fd)
        assert [reap(pid, SOON) for pid in children] == [0, 0, 0]
        store.rescan()
        assert store._books.used_bytes <= cap
        assert cap - ONE < most <= cap
        assert list(folder.rglob(".partial-*")) == []
        balanced(store)


def test_nobody_is_told_to_close_the_machines_own_folders() -> None:
    """As root the command would work: /tmp would be root's alone."""
    for asked in (SocketPlace(Path("/tmp/s")).take, StoreClient("ipc:///tmp/s").open):
        with pytest.raises(StoreFolderError, match=r"socket's folder: .* found mode 1777.*; give ") as refused:
            asked()
        assert "chmod" not in str(refused.value)
