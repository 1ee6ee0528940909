"""The build lease of a folder: threads, stores and processes, their deaths, and what others plant there."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefix_index import FileStore, StoreFolderError
from tests.prefix_index.samples import sample_identity

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


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "folder"])
def test_what_is_planted_by_the_name_of_a_lease(folder: Path, store: FileStore, tmp_path: Path, kind: str) -> None:
    path, target = lease_file(folder), tmp_path / "target"
    path.parent.mkdir()
    match kind:
        case "link":
            target.write_text("precious")
            path.symlink_to(target)
        case "dangling":
            path.symlink_to(target)
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
    with pytest.raises(StoreFolderError, match=r"lease: expected a regular file, found a link, pipe.*; remove it"):
        store.lease(DIGEST)
    store.rescan()
    store.collect()
    assert path.is_symlink() or path.exists()
    assert target.exists() == (kind == "link")
    if kind == "link":
        assert target.read_text() == "precious"


def test_folder_that_has_gone(folder: Path, store: FileStore) -> None:
    lease = store.lease(DIGEST)
    assert lease is not None
    lease_file(folder).unlink()
    lease_file(folder).parent.rmdir()
    folder.rmdir()
    lease.release()
    with pytest.raises(StoreFolderError, match="check that the folder exists"):
        store.lease(DIGEST)


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
