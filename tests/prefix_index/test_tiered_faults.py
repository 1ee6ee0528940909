"""Two stores as one, of which one is damaged, gone or does not answer."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from prefix_index import (
    FileStore,
    IndexCorrupt,
    IndexStoreError,
    MemoryStore,
    Retention,
    StoreFolderError,
    StoreUnavailable,
    copies,
)
from prefix_index.testing import sample_identity, sample_payload
from prefix_index.tiered import TieredStore
from tests.prefix_index.tiered_stores import (
    SOON,
    FarStore,
    GatedStore,
    array_offset,
    fill_of,
    flip,
    memory,
    opened,
    put_elsewhere,
)


@pytest.mark.parametrize("where", ["magic", "footer", "cut"])
def test_a_damaged_header_of_a_copy_costs_only_time(folder: Path, where: str) -> None:
    fast = FileStore(folder.parent / "fast", create=True)
    with opened(fast, FileStore(folder, create=True)) as store:
        store.put(sample_payload(fill=4))
        path = fast.path_of(sample_identity())
        if where == "cut":
            path.write_bytes(path.read_bytes()[:5000])
        else:
            flip(path, 2 if where == "magic" else path.stat().st_size - 3)
        index = store.get(sample_identity())
        assert index.path != str(path)
        assert fill_of(index) == 4
        assert store.counters.damaged_dropped == 1
        assert list(store.problems()) == []
        assert store.promotion(sample_identity(), SOON)
        index = store.get(sample_identity())
        assert index.path == str(path)
        assert fill_of(index) == 4


def test_damage_in_a_copy_is_never_held_against_the_index(folder: Path) -> None:
    fast = FileStore(folder.parent / "fast", create=True)
    with opened(fast, FileStore(folder, create=True)) as store:
        store.put(sample_payload(fill=4))
        path = fast.path_of(sample_identity())
        flip(path, array_offset(path))
        readers = [store.get(sample_identity()) for _ in range(3)]
        for reader in readers:
            assert reader.path == str(path)
            with pytest.raises(IndexCorrupt, match="checksum of") as caught:
                reader.verify()
            reader.close()
            store.report(sample_identity(), caught.value)
            assert list(store.problems()) == []
            assert fill_of(store.get(sample_identity())) == 4
            assert store.promotion(sample_identity(), SOON)
        assert store.counters.damaged_dropped == 1


def test_damage_in_slow_found_while_copying_takes_the_index_out_of_the_offer(folder: Path) -> None:
    put_elsewhere(folder, fill=4)
    slow = FileStore(folder)
    path = slow.path_of(sample_identity())
    flip(path, array_offset(path))
    with opened(memory(), slow) as store:
        assert not store.promotion(sample_identity(), SOON)
        assert list(store.list()) == []
        assert [type(p.error) for p in store.problems()] == [IndexCorrupt]
        store.put(sample_payload(fill=5))
        assert fill_of(store.get(sample_identity())) == 5
        assert list(store.problems()) == []


def test_a_copy_that_slow_confirmed_is_served_while_slow_is_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_ASK_AGAIN_S", 3600.0)  # all gets are within the pause
    slow = FarStore(folder, create=True)
    other = sample_identity(range(48))
    with opened(memory(), slow) as store:
        store.put(sample_payload(fill=4))
        slow.cut = True
        asked = slow.asked
        for _ in range(50):
            assert fill_of(store.get(sample_identity())) == 4
        assert slow.asked - asked == 1
        assert store.contains(sample_identity())
        assert not store.contains(other)
        with pytest.raises(StoreUnavailable, match="far store: expected an answer, found none; ask again later"):
            store.get(other)
        store.fast.put(sample_payload(fill=5))
        with pytest.raises(StoreUnavailable):
            store.get(sample_identity())
        slow.cut = False
        assert fill_of(store.get(sample_identity())) == 4


def test_a_copy_is_not_served_beyond_its_expiry_while_slow_is_away(folder: Path) -> None:
    slow = FarStore(folder, create=True)
    with opened(memory(), slow) as store:
        store.put(sample_payload())
        store.retain(sample_identity(), Retention(expires=time.time() + 0.3))
        slow.cut = True
        time.sleep(0.35)
        with pytest.raises(StoreUnavailable):
            store.get(sample_identity())
        slow.cut = False


def test_what_slow_confirmed_in_an_earlier_life_does_not_count(folder: Path) -> None:
    slow = FarStore(folder, create=True)
    with opened(FileStore(folder.parent / "fast", create=True), slow) as store:
        store.put(sample_payload())
        store.close()
        store.open()
        slow.cut = True
        with pytest.raises(StoreUnavailable):
            store.get(sample_identity())
        slow.cut = False
        assert fill_of(store.get(sample_identity())) == 0


def test_what_this_store_replaced_is_not_served_while_slow_is_away(folder: Path) -> None:
    class Both(GatedStore, FarStore):
        """The new index cannot be copied before the line is cut."""

    slow = Both(folder)
    with opened(memory(), slow) as store:
        store.put(sample_payload(fill=1))
        with MemoryStore(1 << 20) as other:
            other.put(sample_payload(fill=2))
            store.put(other.get(sample_identity()).payload())
        slow.cut = True
        with pytest.raises(StoreUnavailable):
            store.get(sample_identity())
        slow.cut = False
        assert fill_of(store.get(sample_identity())) == 2


def test_the_fast_folder_may_go(folder: Path) -> None:
    fast = FileStore(folder.parent / "fast", create=True)
    with TieredStore(fast, FileStore(folder, create=True)) as store:
        store.put(sample_payload(fill=4))
        shutil.rmtree(fast.folder)
        assert fill_of(store.get(sample_identity())) == 4
        store.put(sample_payload(fill=5))
        assert fill_of(store.get(sample_identity())) == 5
        store.rescan()
        assert [type(p.error) for p in store.problems()] == [StoreFolderError]
        assert store.delete(sample_identity())
        fast.folder.mkdir()
        store.rescan()
        assert list(store.problems()) == []
        store.check_integrity()


def test_a_fast_folder_that_cannot_be_opened_is_an_error_at_once(folder: Path) -> None:
    slow = FileStore(folder, create=True)
    store = TieredStore(FileStore(folder.parent / "missing"), slow)
    with pytest.raises(StoreFolderError, match="expected an existing folder, found nothing"):
        store.open()
    with pytest.raises(IndexStoreError, match="expected open, found closed"):
        slow.list()
