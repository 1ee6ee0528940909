"""The longest index of a prompt, the named reason where there is none, and what is known of the store meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefix_index import FileStore, StoreFolderError, page_hashes
from sglang_ext.config import Settings, config_from_dict
from sglang_ext.prefix.directory import PrefixDirectory
from tests.prefix_index.samples import find, sample_identity, sample_model, sample_payload
from tests.prefix_index.test_index_refusals import stuck_listing
from tests.serving.admitting import eventually

PROMPT = list(range(200))


@pytest.fixture
def directory(bench: Any) -> Iterator[Callable[..., PrefixDirectory]]:
    """Directories of the bench's store, as another process sees it."""
    made: list[PrefixDirectory] = []

    def make(min_prefix_len: int = 16, **changes: Any) -> PrefixDirectory:
        config = msgspec.structs.replace(bench.config, min_sparse_prompt_len=min_prefix_len)
        known = {"model": bench.model, "profile_digest": bench.profile, **changes}
        made.append(PrefixDirectory(Settings(config=config, store=str(bench.store.folder)), **known))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_another_model_or_profile_is_a_mismatch_that_names_the_field(bench: Any, directory: Any) -> None:
    bench.put(PROMPT[:96])
    other = msgspec.structs.replace(bench.model, kv_dtype="bfloat16")
    found = directory(model=other).lookup({"extra_key": None}, PROMPT)
    assert (found.entry, found.reason, list(found.hashes)) == (None, "index_mismatch", page_hashes(PROMPT))
    assert all(word in str(found.detail) for word in ("kv_dtype", "float32", "bfloat16")), found.detail
    found = directory(profile_digest="other").lookup({"extra_key": None}, PROMPT)
    assert found.reason == "index_mismatch"
    assert "profile_digest" in str(found.detail)


def test_short_prompts_and_short_indexes_are_short_prefix(bench: Any, directory: Any) -> None:
    bench.put(PROMPT[:64])
    directory = directory(min_prefix_len=100)
    assert directory.lookup({"extra_key": None}, PROMPT[:99]).reason == "short_prefix"
    assert directory.lookup({"extra_key": None}, PROMPT).reason == "short_prefix"


def test_a_system_that_gives_no_more_threads_stops_no_look_up(bench: Any, directory: Any) -> None:
    directory, entry = directory(), bench.put(PROMPT[:64])
    before = threading.stack_size(1 << 46)  # no thread has that much
    try:
        assert directory.lookup({"extra_key": None}, PROMPT).entry == entry
    finally:
        threading.stack_size(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with FileStore(tmp_path / "store", create=True) as store:
        store.put(sample_payload())
    return tmp_path / "store"


def watched(folder: Path, build: str = "off") -> PrefixDirectory:
    settings = Settings(config=config_from_dict({"build": build}), store=str(folder))
    return PrefixDirectory(settings, sample_model(), "a profile")


@pytest.fixture
def watch(folder: Path) -> Iterator[PrefixDirectory]:
    watch = watched(folder)
    yield watch
    watch.close()


def test_nobody_waits_for_a_folder_that_takes_long(
    folder: Path, watch: PrefixDirectory, monkeypatch: pytest.MonkeyPatch
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
    assert eventually(lambda: (watch.rescan(), len(watch.store.list()))[1] == 2)
    assert watch.snapshot()["indexes_in_store"] == 2


def test_what_fits_is_counted_again_only_when_the_store_has_changed(
    folder: Path, watch: PrefixDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten thousand indexes it takes tens of milliseconds, between two decode steps."""
    counted, real = [], watch.misfit
    monkeypatch.setattr(watch, "misfit", lambda identity: (counted.append(identity), real(identity))[1])
    before = watch.snapshot()
    assert (watch.snapshot(), watch.summary().count("of 1 indexes"), counted) == (before, 1, [])
    with FileStore(folder) as other:
        other.put(sample_payload(sample_identity(range(64))))
    assert eventually(lambda: (watch.rescan(), watch.snapshot()["indexes_in_store"])[1] == 2)
    assert sum(watch.snapshot()["indexes_unusable"].values()) == 2
    assert len(counted) == 2


def test_a_store_that_breaks_when_it_is_asked_is_a_problem_and_what_was_known_stays(
    watch: PrefixDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch.store, "problems", lambda: 1 / 0)
    entries, _ = watch.known()
    assert len(entries) == 1
    assert "ZeroDivisionError" in watch.problems[0]


def test_a_store_that_has_gone_is_an_exported_problem_until_it_is_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ext.prefix.directory._PUBLISH_SECONDS", 0.0)
    told: list[tuple[int, int, int]] = []
    settings = Settings(config=config_from_dict({}), store=str(folder))
    watch = PrefixDirectory(settings, sample_model(), "a profile", lambda *figures: told.append(figures))
    whole = told[-1]
    for there, problems in ((folder, 1), (folder.with_name("elsewhere"), 0)):
        there.rename(folder.with_name("elsewhere") if problems else folder)
        assert eventually(lambda wanted=(*whole[:2], problems): (watch.rescan(), told[-1])[1] == wanted)
    watch.close()


def test_only_who_builds_needs_a_folder_to_write_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    watch = watched(folder)
    assert watch.snapshot()["indexes_in_store"] == 1
    watch.close()
    for build in ("shared", "prefill"):
        with pytest.raises(StoreFolderError, match="expected a writable folder"):
            watched(folder, build)
