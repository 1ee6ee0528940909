"""Disks that are full, read-only or broken, and a folder that goes away under a store. And what somebody else puts in
the way: links, pipes and devices under the store's own names.

File systems are mounted in a mount namespace of a test's own process, and gone with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from prefix_index import FileStore, IndexNotFound, IndexStoreError, Retention, StoreFolderError, StoreFull
from prefix_index.folder import PARTIAL
from tests.examples import examples
from tests.prefix_index.samples import MEDIUM, SMALL, fill_of, identity_of, payload_of, read_fill
from tests.prefix_index.small_stores import SOON, balanced, fork, opened, reap, remove, stored_files

CLONE_NEWNS = 0x0002_0000
NO_NAMESPACE = 77


def mounting(work: Callable[[], None]) -> None:
    """Does it in a child with a mount namespace of its own; the test is skipped without the right to one."""

    def child() -> None:
        if os.geteuid() != 0 or ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
            os._exit(NO_NAMESPACE)
        try:
            run("mount", "--make-rprivate", "/")
        except (OSError, subprocess.SubprocessError):
            os._exit(NO_NAMESPACE)
        work()

    code = reap(fork(child), 10 * SOON)
    if code == NO_NAMESPACE:
        pytest.skip("needs root and mounts")
    assert code == 0


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=300)


@contextlib.contextmanager
def disk(at: Path, kind: str) -> Iterator[Path]:
    """24 MiB: ``tmpfs``, or ``ext4`` in a file on a loop device; of few ``inodes``; or ``limit``, which is no disk but
    a process that may not write files of more than 1 MiB.
    """
    at.mkdir()
    if kind == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (MEDIUM, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        yield at
        return
    if kind == "tmpfs":
        run("mount", "-t", "tmpfs", "-o", f"size={24 * MEDIUM}", "tmpfs", str(at))
    else:
        at.with_suffix(".img").touch()
        os.truncate(at.with_suffix(".img"), 24 * MEDIUM)
        few = ("-N", "128") if kind == "inodes" else ()
        run("mkfs.ext4", "-q", "-m", "0", *few, str(at.with_suffix(".img")))
        run("mount", "-o", "loop", str(at.with_suffix(".img")), str(at))
    try:
        yield at
    finally:
        run("umount", "--lazy", str(at))


def check_all(store: FileStore, acked: dict[int, int]) -> None:
    """Every acknowledged index is there with the bytes that were acknowledged."""
    assert {number: read_fill(store, number) for number in acked} == acked
    balanced(store)


NEEDS_MKFS = pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="needs mkfs.ext4")


DISKS = ["tmpfs", "limit", *(pytest.param(kind, marks=NEEDS_MKFS) for kind in ("ext4", "inodes"))]


@pytest.mark.parametrize("kind", DISKS)
def test_a_full_disk(tmp_path: Path, kind: str) -> None:
    """Puts that find no room fail with StoreFull; everything stored stays; after a delete there is room again."""

    def work() -> None:
        with disk(tmp_path / "disk", kind) as place:
            fill_up(place / "store", kind, examples(75, 8))

    if kind == "limit":
        assert reap(fork(work), 10 * SOON) == 0
    else:
        mounting(work)


def fill_up(path: Path, kind: str, refusals: int) -> None:
    """Puts, replaces and now and then deletes until so many puts were refused for want of room."""
    acked: dict[int, int] = {}
    rng, refused, puts = random.Random(7), 0, 0
    with opened(path) as store:
        while refused < refusals:
            puts += 1
            number = rng.randrange(1000)
            nbytes = SMALL if kind == "inodes" else rng.choice((SMALL, MEDIUM // 2, 2 * MEDIUM))
            try:
                store.put(payload_of(number, puts, nbytes))
                acked[number] = puts
                continue
            except StoreFull as err:
                assert "No space" in str(err) or "too large" in str(err)  # noqa: PT017
            refused += 1
            full_for_the_rest(store, rng.choice(sorted(acked)))
            assert [name for name in stored_files(path) if name.startswith(PARTIAL)] == []
            if refused % 8 == 0:
                check_all(store, acked)
                for number in rng.sample(sorted(acked), 3):
                    assert store.delete(identity_of(number))
                    del acked[number]
                balanced(store)
        check_all(store, acked)
        for number in list(acked)[: len(acked) // 2 + 1]:
            store.delete(identity_of(number))
            del acked[number]
        store.put(payload_of(number, 1))
        acked[number] = 1
    with opened(path, partial_grace_s=0.0) as store:
        assert len(store.list()) == len(acked)
        assert list(store.problems()) == []
        check_all(store, acked)


def full_for_the_rest(store: FileStore, number: int) -> None:
    """On a full disk a retention is kept as it was or as it was asked for, and a lease is given or refused."""
    digest = identity_of(number).digest
    before = next(e.retention for e in store.list() if e.digest == digest)
    wanted = Retention(pinned=not before.pinned, expires=4e9)
    try:
        store.retain(digest, wanted)
    except StoreFull:
        wanted = before
    with contextlib.suppress(StoreFull):
        lease = store.lease(digest)
        if lease is not None:
            lease.release()
    store.rescan(full=True)
    assert next(e.retention for e in store.list() if e.digest == digest) == wanted
    store.collect()


def test_a_disk_that_turns_read_only(tmp_path: Path) -> None:
    """Each write fails clearly; each read works, also of a new store, which may not open but for reading."""

    def work() -> None:
        with disk(tmp_path / "disk", "tmpfs") as place, opened(place / "store") as store:
            for number in range(4):
                store.put(payload_of(number, 1))
            for turn in range(4):
                run("mount", "-o", "remount,ro", str(place))
                for number in (turn, 1000 + turn):
                    with pytest.raises(StoreFolderError):
                        store.put(payload_of(number, 99))
                with pytest.raises(StoreFolderError):
                    store.delete(identity_of(turn))
                assert store.contains(identity_of(turn))
                store.rescan(full=turn % 2 == 0)
                assert len(store.list()) == 4
                check_all(store, dict.fromkeys(range(4), 1))
                with pytest.raises(StoreFolderError, match=r"writ|ermission"):
                    opened(place / "store")
                run("mount", "-o", "remount,rw", str(place))
                store.put(payload_of(turn, 1))

    mounting(work)


def replace(place: Path, other: Path) -> None:
    place.rename(place.parent / "moved")
    other.rename(place)


def replace_shard(place: Path, _: Path) -> None:
    """The shard of index 0 becomes a file."""
    shard = place / identity_of(0).digest[:2]
    while not shard.is_file():
        shutil.rmtree(shard, ignore_errors=True)
        with contextlib.suppress(OSError):
            shard.write_text("not a folder")


def put_until_gone(place: Path, fill: int) -> None:
    """A writer that meets the deletion in the middle; StoreFolderError is how it should end."""
    with contextlib.suppress(StoreFolderError), opened(place, create=False) as store:
        for _ in range(10):
            store.put(payload_of(3, fill, MEDIUM))


@pytest.mark.parametrize("change", [lambda place, _: remove(place), replace, replace_shard])
def test_a_folder_goes_under_a_store_and_a_writer(tmp_path: Path, change: Callable[[Path, Path], None]) -> None:
    """Reads miss, writes say why, nothing of the old folder is offered, and what comes back is used."""
    place, other, rng = tmp_path / "store", tmp_path / "other", random.Random(7)
    for turn in range(1, examples(60, 6)):
        with opened(other) as store:
            store.put(payload_of(50, turn))
        with opened(place) as store:
            for number in range(3):
                store.put(payload_of(number, turn))
            reader, lease = store.get(identity_of(0)), store.lease(identity_of(0))
            assert lease is not None
            writer = fork(partial(put_until_gone, place, turn))
            time.sleep(rng.uniform(0, 0.01))
            change(place, other)
            lease.release()
            gone_under(store, replaced=change is replace)
            assert fill_of(reader) == turn
            assert reap(writer, SOON) == 0
            place.mkdir(exist_ok=True)
            store.rescan(full=True)
            store.put(payload_of(7, turn))
            assert read_fill(store, 7) == turn
            balanced(store)
        for one in (place, other, tmp_path / "moved"):
            shutil.rmtree(one, ignore_errors=True)


def gone_under(store: FileStore, *, replaced: bool) -> None:
    with pytest.raises(IndexNotFound):
        store.get(identity_of(0))
    assert not store.contains(identity_of(0))
    with contextlib.suppress(StoreFolderError):
        assert not store.delete(identity_of(0))
    with contextlib.suppress(StoreFolderError):
        store.rescan()
        assert identity_of(0).digest not in {e.digest for e in store.list()}
    if replaced:
        assert store.contains(identity_of(50))
        assert identity_of(50).digest in {e.digest for e in store.list()}
        read_fill(store, 50)
    else:
        with pytest.raises(StoreFolderError):
            store.put(payload_of(0, 1))
        with pytest.raises(StoreFolderError):
            store.lease(identity_of(0))


MINE = identity_of(0).digest
ROLES = {
    "shard folder": "",
    "index": f"{MINE}.pfxindex",
    "sidecar": f"{MINE}.pfxkeep",
    "lease": f".lease-{MINE}",
    "partial": f"{PARTIAL}1-0011223344556677",
    "foreign name": "notes",
}
Plant = Callable[[Path, Path], None]


def link_to(target: str) -> Plant:
    return lambda at, outside: at.symlink_to(outside / target)


def full_folder(at: Path, _: Path) -> None:
    at.mkdir()
    (at / "inside").write_text("x")


def bound_socket(at: Path, _: Path) -> None:
    folder = os.open(at.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"/proc/self/fd/{folder}/{at.name}")  # a path of a socket is short
    os.close(folder)


PLANTS: dict[str, Plant] = {
    "link to an index": link_to("whole.pfxindex"),
    "link to text": link_to("text"),
    "link to a sidecar": link_to("keep"),
    "link to a folder": link_to("folder"),
    "link to nothing": link_to("nothing"),
    "link to a pipe": link_to("pipe"),
    "pipe": lambda at, _: os.mkfifo(at),
    "folder": full_folder,
    "socket": bound_socket,
    "device": lambda at, _: os.mknod(at, stat.S_IFCHR | 0o666, os.makedev(1, 5)),
    "terminal": lambda at, _: os.mknod(at, stat.S_IFCHR | 0o666, os.makedev(5, 0)),
}
if os.geteuid() != 0:
    del PLANTS["device"], PLANTS["terminal"]

CALLS: dict[str, Callable[[FileStore], object]] = {
    "get": lambda store: read_fill(store) == 9 and pytest.fail("the link was followed"),
    "contains": lambda store: store.contains(MINE),
    "rescan": lambda store: store.rescan(full=True),
    "put": lambda store: put(store, None),
    "put with retention": lambda store: put(store, Retention(pinned=True)),
    "retain": lambda store: store.retain(MINE, Retention(pinned=True, expires=4e9)),
    "lease": lambda store: (lease := store.lease(MINE)) and lease.release(),
    "collect": lambda store: store.collect(),
    "clean_partials": lambda store: store._clean(0.0),
    "delete": lambda store: store.delete(MINE),
}


def put(store: FileStore, retention: Retention | None) -> None:
    store.put(payload_of(0, 2), retention=retention)
    assert read_fill(store) == 2


def prepare(path: Path, role: str, plant: str, early: bool) -> FileStore:
    """A store with two indexes, then something else in the place of one of its files; opened before or after."""
    outside = path / "outside"
    (outside / "folder").mkdir(parents=True)
    with opened(path / "source") as source:
        shutil.copy(source.put(payload_of(0, 9)).path or "", outside / "whole.pfxindex")
    shutil.copy(outside / "whole.pfxindex", outside / "folder" / f"{MINE}.pfxindex")
    (outside / "text").write_text("outside")
    (outside / "keep").write_text('{"pinned":true,"expires":1.0}')
    os.mkfifo(outside / "pipe")
    store = opened(path / "store", partial_grace_s=0.0)
    store.put(payload_of(0, 1), retention=Retention(pinned=True))
    store.put(payload_of(1, 1))
    at = path / "store" / MINE[:2] / ROLES[role]
    if not early:
        store.close()
    if at.is_dir():
        shutil.rmtree(at)
    at.unlink(missing_ok=True)
    PLANTS[plant](at, outside)
    return store


def snapshot(path: Path) -> dict[Path, tuple[int, int, int, bytes]]:
    """Every file below, with mode, size, time and bytes; folders with their mode only."""
    found = {}
    for one in path.rglob("*"):
        status = one.lstat()
        regular = stat.S_ISREG(status.st_mode)
        times = (status.st_size, status.st_mtime_ns) if regular else (0, 0)
        found[one] = (status.st_mode, *times, one.read_bytes() if regular else b"")
    return found


def one_call(store: FileStore, name: str) -> None:
    """An error of ours or none; the index beside is there, and this one is ours or a miss."""
    store.open()
    with contextlib.suppress(IndexStoreError):
        CALLS[name](store)
    assert read_fill(store, 1) == 1
    with contextlib.suppress(IndexStoreError):
        assert read_fill(store) != 9, "what lies outside"
    store.rescan(full=True)
    balanced(store)


def test_what_is_planted_is_never_followed_nor_waited_for_and_nothing_outside_changes(tmp_path: Path) -> None:
    cases = [*product(ROLES, PLANTS, CALLS, (True, False))]
    for number, case in enumerate(random.Random(7).sample(cases, examples(400, 30))):
        role, plant, call, early = case
        path = tmp_path / str(number)
        store = prepare(path, role, plant, early)
        before = snapshot(path / "outside")
        assert reap(fork(partial(one_call, store, call)), SOON) == 0, case
        assert snapshot(path / "outside") == before, case
        store.close()
        shutil.rmtree(path)
