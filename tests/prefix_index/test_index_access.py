"""Who may look into a store's folder, and stores that are read but not written to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore, IndexNotFound, InvalidPayload, Retention, StoreFolderError
from prefix_index import folder as folder_module
from prefix_index.connect import open_store
from prefix_index.service import StoreServer
from tests.prefix_index.samples import IDS, PINNED, identity_of, read_fill, sample_payload
from tests.prefix_index.small_stores import ONE, SOON, balanced, fork, holding, index_file, keep_file, opened, reap
from tests.prefix_index.tiers import copies_in, endpoint_in

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


def test_what_cannot_be_read_either_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.R_OK)
    with pytest.raises(StoreFolderError, match="expected a readable folder, found no permission; change"):
        FileStore(folder, write=False).open()


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
