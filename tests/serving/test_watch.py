"""The scheduler's look at a folder of indexes: now where that is quick, and never in its way."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefix_index import FileStore, StoreFolderError
from sglang_ext.config import Settings, config_from_dict
from sglang_ext.prefix.directory import StoreWatch
from tests.prefix_index.conformance import find
from tests.prefix_index.samples import sample_identity, sample_payload
from tests.prefix_index.test_index_refusals import stuck_listing


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with FileStore(tmp_path / "store", create=True) as store:
        store.put(sample_payload())
    return tmp_path / "store"


def settings(folder: Path, build: str = "off") -> Settings:
    return Settings(config=config_from_dict({"build": build}), store=str(folder))


@pytest.fixture
def watch(folder: Path) -> Iterator[StoreWatch]:
    watch = StoreWatch(settings(folder), lambda _: None)
    yield watch
    watch.close()


def eventually(watch: StoreWatch, number: int) -> None:
    deadline = time.monotonic() + 60
    while len(watch.store.list()) != number:
        assert time.monotonic() < deadline
        watch.rescan()
        time.sleep(0.02)


def test_what_another_process_stored_is_found(folder: Path, watch: StoreWatch) -> None:
    with FileStore(folder) as other:
        other.put(sample_payload(sample_identity(range(64))))
    watch.rescan()
    eventually(watch, 2)  # at once, but for a machine that is very busy


def test_nobody_waits_for_a_folder_that_takes_long(
    folder: Path, watch: StoreWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(folder) as other:
        other.put(sample_payload(sample_identity(range(64))))
    with stuck_listing(monkeypatch) as begun:  # for two minutes
        began = time.monotonic()
        for _ in range(20):
            watch.rescan()
            assert find(watch.store, range(32)) is not None
        assert begun.wait(60)
        assert any("found none yet" in text for text in watch.snapshot()["store_problems"])
        assert time.monotonic() - began < 30
    eventually(watch, 2)
    assert watch.snapshot()["indexes_in_store"] == 2


def test_a_folder_that_has_gone_is_said(folder: Path, watch: StoreWatch) -> None:
    shutil.rmtree(folder)

    def look() -> None:
        for _ in range(100):
            watch.rescan()
            time.sleep(0.02)

    with pytest.raises(StoreFolderError):
        look()


def test_only_who_builds_needs_a_folder_to_write_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    watch = StoreWatch(settings(folder), lambda _: None)
    assert watch.snapshot()["indexes_in_store"] == 1
    watch.close()
    for build in ("shared", "prefill"):
        with pytest.raises(StoreFolderError, match="expected a writable folder"):
            StoreWatch(settings(folder, build), lambda _: None)
