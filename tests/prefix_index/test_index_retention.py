"""How long an index in a folder stays: sidecars, read by other stores, damaged, orphaned or half written."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from prefix_index import (
    FileStore,
    IndexCorrupt,
    IndexForeign,
    IndexStoreError,
    Retention,
    StoreFolderError,
    StoreFull,
)
from prefix_index.retention import remove_orphans
from tests.prefix_index.balance import balanced
from tests.prefix_index.samples import IDS, PINNED, sample_payload
from tests.prefix_index.small_stores import Clock, index_file, keep_file, opened, refuse_call


def test_a_sidecar_on_disk(folder: Path) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        path = keep_file(folder, IDS[0])
        assert not path.exists()
        store.retain(IDS[0], Retention(pinned=True, expires=4e9))
        kept, checksum = path.read_bytes().splitlines()
        assert msgspec.json.decode(kept) == {"pinned": True, "expires": 4e9}
        assert checksum.decode() == xxhash.xxh3_64_hexdigest(IDS[0].digest.encode() + b"\n" + kept)
        assert path.stat().st_mode & 0o777 == 0o600
        assert store.delete(IDS[0])
        assert [p for p in folder.rglob("*") if p.is_file()] == []


def test_a_sidecar_from_before_names_is_read(folder: Path) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        seal(keep_file(folder, IDS[0]), b'{"pinned":true,"expires":null}')
        store.rescan()
        assert [e.retention for e in store.list()] == [Retention(pinned=True)]


def test_expiry_set_elsewhere_does_not_hide_what_was_put_since(folder: Path, clock: Clock) -> None:
    with opened(folder, clock=clock) as store, opened(folder, clock=clock) as other:
        store.put(sample_payload(IDS[0]), retention=Retention(expires=clock.now + 10))
        clock.now += 20
        other.put(sample_payload(IDS[0], fill=1))
        assert store.contains(IDS[0])
        store.get(IDS[0]).close()


def seal(path: Path, kept: bytes, digest: str | None = None) -> None:
    """Writes a sidecar whose checksum is right: by default that of the index it belongs to."""
    checksum = xxhash.xxh3_64_hexdigest((digest or path.stem).encode() + b"\n" + kept)
    path.write_bytes(kept + b"\n" + checksum.encode() + b"\n")


PLANTS: dict[str, tuple[Callable[[Path, Path], object], type[IndexStoreError], str]] = {
    "empty": (lambda p, _: p.write_bytes(b""), IndexCorrupt, "expected checksum"),
    "unsealed": (lambda p, _: p.write_bytes(b'{"pinned":true}'), IndexCorrupt, "expected checksum"),
    "another's": (lambda p, _: seal(p, b'{"pinned":true}', "0" * 64), IndexCorrupt, "expected checksum"),
    "garbage": (lambda p, _: seal(p, b"\xff\x00{"), IndexCorrupt, "JSON of Retention"),
    "name-of-a-terminal": (lambda p, _: seal(p, rb'{"name":"a\u001b[1m"}'), IndexCorrupt, "printable characters"),
    "name-too-long": (lambda p, _: seal(p, b'{"name":"%s"}' % (b"a" * 257)), IndexCorrupt, "printable characters"),
    "other-field": (lambda p, _: seal(p, b'{"pinned":true,"x":1}'), IndexCorrupt, "JSON of Retention"),
    "nan": (lambda p, _: seal(p, b'{"expires":-1}'), IndexCorrupt, "0 or more, found -1"),
    "nested": (lambda p, _: seal(p, b"[" * 4000), IndexCorrupt, "JSON of Retention"),
    "large": (lambda p, _: p.write_bytes(b" " * 5000), IndexCorrupt, "at most 4096 bytes, found more"),
    "link": (lambda p, t: p.symlink_to(t), IndexForeign, "a regular file, found a link"),
    "dangling": (lambda p, _: p.symlink_to("nowhere"), IndexForeign, "a regular file, found a link"),
    "fifo": (lambda p, _: os.mkfifo(p), IndexForeign, "a regular file, found a link, folder, pipe"),
    "folder": (lambda p, _: p.mkdir(), IndexForeign, "a regular file, found a link, folder"),
}


@pytest.mark.parametrize("kind", PLANTS)
def test_a_bad_sidecar_is_a_problem_and_counts_as_none(folder: Path, tmp_path: Path, kind: str) -> None:
    plant, error, message = PLANTS[kind]
    target = tmp_path / "target"
    target.write_bytes(b'{"pinned":true}')
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        path = keep_file(folder, IDS[0])
        plant(path, target)
        for full in (False, True):
            store.rescan(full=full)
            assert [(p.path, type(p.error)) for p in store.problems()] == [(str(path), error)]
            assert message in str(store.problems()[0].error)
            assert str(path) in str(store.problems()[0].error)
            assert [e.retention for e in store.list()] == [Retention()]
            balanced(store)
        store.get(IDS[0]).close()
        store.collect()
        assert path.is_symlink() or path.exists()
        assert store.put(sample_payload(IDS[0], fill=1)).retention == Retention()
        if kind == "folder":
            with pytest.raises(StoreFolderError):
                store.retain(IDS[0], PINNED)
            with pytest.raises(StoreFolderError):
                store.put(sample_payload(IDS[0], fill=2), retention=PINNED)
            with store.get(IDS[0]) as index:
                assert index.array("channels")[0] == 1
        else:
            assert not path.is_symlink()
            assert not path.exists()
            assert list(store.problems()) == []
            plant(path, target)
            store.rescan()
            assert store.retain(IDS[0], PINNED).retention == PINNED
            assert list(store.problems()) == []
            store.rescan()
            assert [e.retention for e in store.list()] == [PINNED]
        store.rescan()
        balanced(store)
        assert store.delete(IDS[0])
        assert target.read_bytes() == b'{"pinned":true}'


def test_no_damage_of_a_sidecar_makes_a_retention_that_nobody_set(folder: Path) -> None:
    """Every flipped bit and every cut of it."""
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]), retention=PINNED)
        path = keep_file(folder, IDS[0])
        raw = path.read_bytes()
        bits = [bytes([*raw[:i], raw[i] ^ 1 << bit, *raw[i + 1 :]]) for i in range(len(raw)) for bit in range(8)]
        for damaged in bits + [raw[:cut] for cut in range(len(raw))]:
            path.write_bytes(damaged)
            store.rescan(full=True)
            assert [entry.retention for entry in store.list()] in ([Retention()], [PINNED]), damaged
            assert store.collect() == ()


def test_sidecars_without_an_index_are_cleared_away(folder: Path) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]), retention=PINNED)
        index_file(folder, IDS[0]).unlink()
        keep_file(folder, IDS[1]).parent.mkdir(exist_ok=True)
        keep_file(folder, IDS[1]).symlink_to(folder)
        foreign = keep_file(folder, IDS[0]).with_name("notes.pfxkeep")
        foreign.write_text("hello")
        store.rescan()
        assert store.collect() == ()
        assert [p for p in folder.rglob("*") if not p.is_dir()] == [foreign]
        assert [(p.path, type(p.error)) for p in store.problems()] == [(str(foreign), IndexForeign)]
        assert store.put(sample_payload(IDS[0])).retention == Retention()
        balanced(store)


def test_an_orphan_speaks_for_no_new_index(folder: Path) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]), retention=Retention(expires=1.0))
        index_file(folder, IDS[0]).unlink()
        assert store.put(sample_payload(IDS[0])).retention == Retention()
        assert store.contains(IDS[0])


@pytest.mark.parametrize("before", [None, PINNED, Retention(expires=1.0)])
@pytest.mark.parametrize("suffix", [".pfxindex", ".pfxkeep"])
def test_a_failed_put_leaves_the_retention(
    folder: Path, before: Retention | None, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as store:
        if before is not None:
            store.put(sample_payload(IDS[0], fill=1), retention=before)
        files = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        with monkeypatch.context() as patch:
            refuse_call(patch, "rename", lambda _, to: to.endswith(suffix), errno.ENOSPC)
            with pytest.raises(StoreFull):
                store.put(sample_payload(IDS[0], fill=2), retention=Retention(expires=5e9))
        store.rescan()
        balanced(store)
        if suffix == ".pfxkeep" and before is not None:
            assert keep_file(folder, IDS[0]).read_bytes() == files[keep_file(folder, IDS[0])]  # the longer one
            return
        assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == files


def test_orphans_and_the_dead_s_files_of_the_future_go_too(folder: Path) -> None:
    """The clock was set back."""
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]), retention=PINNED)
        shard = index_file(folder, IDS[0]).parent
        index_file(folder, IDS[0]).unlink()
        left = [shard / ".partial-1-deadbeefdeadbeef", shard / f".lease-{IDS[0].digest}", keep_file(folder, IDS[0])]
        for path in left:
            path.touch()
            os.utime(path, (time.time() + 3600, time.time() + 3600))
        store.collect()
        assert [path.name for path in left if path.exists()] == []
        left[0].touch()
        os.utime(left[0], (time.time() + 3600, time.time() + 3600))
        assert store._keeper.clean_partials() == 1
        fd = os.open(shard, os.O_RDONLY)
        keep_file(folder, IDS[0]).touch()
        os.utime(keep_file(folder, IDS[0]), (time.time() + 3600, time.time() + 3600))
        assert remove_orphans(fd, [IDS[0].digest], grace_s=60.0) == 1
        os.close(fd)


@pytest.mark.parametrize("what", ["retain", "put"])
def test_nothing_fails_behind_the_rename_of_a_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    rename, fstat, armed = os.rename, os.fstat, []

    def renaming(*args: Any, **options: Any) -> None:
        rename(*args, **options)
        armed.extend([1] if str(args[1]).endswith(".pfxkeep") else [])

    def looking(fd: int) -> os.stat_result:
        if armed:
            armed.clear()
            raise OSError(errno.EIO, "Input/output error")
        return fstat(fd)

    with FileStore(tmp_path / "store", create=True) as store:
        store.put(sample_payload(fill=1))
        monkeypatch.setattr(os, "rename", renaming)
        monkeypatch.setattr(os, "fstat", looking)
        if what == "retain":
            store.retain(sample_payload().identity, Retention(pinned=True))
        else:
            store.put(sample_payload(fill=2), retention=Retention(pinned=True))
        monkeypatch.undo()
        store.rescan(full=True)
        assert [entry.retention.pinned for entry in store.list()] == [True]
