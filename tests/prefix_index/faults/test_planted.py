"""What somebody else puts in the way: links, pipes and devices under the store's own names."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import stat
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from prefix_index import FileStore, IndexStoreError, Retention
from prefix_index.folder import PARTIAL
from tests.examples import examples
from tests.prefix_index.samples import identity_of, payload_of, read_fill
from tests.prefix_index.small_stores import SOON, balanced, fork, opened, reap

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
