"""The store service's tiers: what is copied to DRAM and served from there, dropped, evicted, and put."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from prefix_index import ArrayKey, FileStore, IndexCorrupt, IndexPayload, LazyArray, StoreFolderError, StoreFull
from prefix_index.copies import digest_in
from prefix_index.folder import PARTIAL, come_back
from prefix_index.service import StoreClient, StoreServer
from prefix_index.testing import sample_identity, sample_payload
from tests.examples import examples
from tests.prefix_index.copied_stores import flip, remove
from tests.prefix_index.machine import STEPS, StoreMachine
from tests.prefix_index.served_stores import PROMPT, copied, patient, served, two_tiers
from tests.prefix_index.tiers import eventually, serving


@pytest.fixture
def own(tmp_path: Path) -> FileStore:
    return two_tiers(tmp_path)


@pytest.fixture
def client(tmp_path: Path, own: FileStore) -> Iterator[StoreClient]:
    with served(tmp_path, own) as endpoint, patient(endpoint) as client:
        yield client


def test_a_used_index_is_served_from_dram_and_a_replaced_one_never_is(
    client: StoreClient, own: FileStore, tmp_path: Path
) -> None:
    def tier() -> str:
        with client.get(sample_identity()) as index:
            assert index.array("channels")[0] == fill
            index.verify()
            return Path(index.path or "").relative_to(tmp_path).parts[0]

    for fill in (1, 2, 3):
        client.put(sample_payload(fill=fill))
        eventually(lambda: tier() == "dram")
    eventually(lambda: client.status().tiers[0].indexes == 1)
    assert client.status().tiers[0].hits > 0
    # Somebody who knows nothing of the service replaces it: the next get sees it.
    copied(own)
    fill = 4
    with FileStore(tmp_path / "store") as other:
        other.put(sample_payload(fill=fill))
    assert tier() == "store"
    eventually(lambda: tier() == "dram")


def test_a_damaged_copy_is_dropped_and_the_original_served(client: StoreClient, own: FileStore, tmp_path: Path) -> None:
    client.put(sample_payload(fill=5))
    (copy,) = wait_for_files(tmp_path / "dram")
    eventually(lambda: client.get(sample_identity()).path == str(copy))
    copied(own)
    flip(copy, 70)
    with client.get(sample_identity()) as index:
        assert index.array("channels")[0] == 5
        assert index.path == str(tmp_path / "store" / copy.parent.name / copy.name)
    assert list(client.problems()) == []
    eventually(lambda: client.get(sample_identity()).path == str(copy))
    error = IndexCorrupt("an array", expected="a", found="b", remedy="c", path=copy)
    client.report(sample_identity(), error)
    assert list(client.problems()) == []
    assert client.contains(sample_identity())


def wait_for_files(folder: Path) -> list[Path]:
    eventually(lambda: any(folder.glob("*/*.pfxindex")))
    return list(folder.glob("*/*.pfxindex"))


def test_a_damaged_original_becomes_a_problem(tmp_path: Path) -> None:
    with serving(tmp_path, fast_bytes=4096) as endpoint, patient(endpoint) as client:
        client.put(sample_payload(fill=5))
        (file,) = (tmp_path / "store").glob("*/*.pfxindex")
        flip(file, 70)
        with pytest.raises(IndexCorrupt, match="header entry checksum"):
            client.get(sample_identity())
        assert not client.contains(sample_identity())
        assert [p.path for p in client.problems()] == [str(file)]
        client.put(sample_payload(fill=6))
        assert list(client.problems()) == []
        assert client.contains(sample_identity())


def test_dram_contents_outlive_the_service(tmp_path: Path) -> None:
    with serving(tmp_path) as endpoint, patient(endpoint) as client:
        client.put(sample_payload(fill=1))
        (copy,) = wait_for_files(tmp_path / "dram")
    inode = copy.stat().st_ino
    with serving(tmp_path) as endpoint, patient(endpoint) as client, client.get(sample_identity()) as index:
        assert index.path == str(copy)
        assert copy.stat().st_ino == inode


def test_a_dram_folder_that_was_removed_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path) as endpoint, patient(endpoint) as client:
        client.put(sample_payload(fill=2))
        wait_for_files(tmp_path / "dram")
        remove(tmp_path / "dram")
        with client.get(sample_identity()) as index:
            assert index.array("channels")[0] == 2
        eventually(lambda: (tmp_path / "dram").is_dir())
        copy = tmp_path / "dram" / sample_identity().digest[:2] / f"{sample_identity().digest}.pfxindex"
        eventually(lambda: client.get(sample_identity()).path == str(copy))
        client.check_integrity()


def test_a_dram_tier_that_cannot_be_used_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    server = StoreServer(two_tiers(tmp_path), f"ipc://{tmp_path}/run/s")

    def tend() -> list[str | None]:
        server._look_after(collect=True)
        return [tier.error for tier in server.status().tiers]

    server.open()
    with caplog.at_level("WARNING", "prefix_index.service"):
        remove(tmp_path / "dram")
        assert tend() == [None, None]
        assert [record.message for record in caplog.records] == [
            f"{tmp_path}/dram: the DRAM tier's folder was gone, with all copies; it was made anew"
        ]
        remove(tmp_path / "dram")
        (tmp_path / "dram").touch()
        for _ in range(3):
            errors = tend()
        (message,) = [record.message for record in caplog.records[1:]]
        assert message == errors[0]
        assert "index store: expected a usable folder, found File exists" in message
        (tmp_path / "dram").unlink()
        tend()
        assert tend() == [None, None]
    server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_dram_folder_is_not_made_below_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, -1)
    with pytest.raises(StoreFolderError, match="folder's parent: expected one of user 0, found user 12345's"):
        come_back(tmp_path / "theirs" / "dram")
    assert not (tmp_path / "theirs" / "dram").exists()


def test_a_full_store_evicts_and_every_client_learns_of_it(tmp_path: Path) -> None:
    ids = [sample_identity(PROMPT[: 16 * n]) for n in range(1, 5)]
    own = two_tiers(tmp_path, max_bytes=3 * 45056)
    with served(tmp_path, own) as endpoint, patient(endpoint) as a, patient(endpoint) as b:
        for identity in ids:
            a.put(sample_payload(identity))
            copied(own)  # which is a use of it
            time.sleep(0.01)
        assert {e.identity.num_tokens for e in a.list()} == {32, 48, 64}
        b.rescan()
        assert a.list() == b.list()
        assert not b.contains(ids[0])
        with pytest.raises(StoreFull, match="index store: expected room for"):
            a.put(sample_payload(ids[0], values_per_array=1 << 18))
        assert len(a.list()) == 3
        a.check_integrity()


def test_a_failed_put_leaves_no_partial(client: StoreClient, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("the GPU went away")

    payload = IndexPayload(sample_identity(), {ArrayKey("kv"): LazyArray("uint8", (1 << 20,), fail)})  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the GPU went away"):
            client.put(payload)
    eventually(lambda: client.status().reservations == 0)
    assert not [p for p in (tmp_path / "store").glob("*/.*") if p.name.startswith(PARTIAL)]


def test_arrays_of_a_megabyte(client: StoreClient) -> None:
    values = np.random.default_rng(1).integers(0, 255, 1 << 20, dtype=np.uint8)
    client.put(IndexPayload(sample_identity(), {ArrayKey("kv"): values}))
    with client.get(sample_identity()) as index:
        assert np.array_equal(index.array("kv"), values)
        copy = index.payload()
        client.put(copy)


class ServiceMachine(StoreMachine):
    """One client of a service with both tiers, against the dictionary; a second client sees the same."""

    def make(self) -> StoreClient:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.context = serving(Path(self.folder.name))
        endpoint = self.context.__enter__()
        self.other = patient(endpoint)
        self.other.open()
        return patient(endpoint)

    def teardown(self) -> None:
        try:
            self.other.rescan()
            reported = {digest_in(problem.path) for problem in self.store.problems()}  # by this client, to itself
            assert [e for e in self.other.list() if e.digest not in reported] == list(self.store.list())
            self.other.close()
            super().teardown()
        finally:
            self.context.__exit__(None, None, None)
            self.folder.cleanup()

    def reopen(self) -> None:
        """What was reported would be offered again: another machine's."""


TestServiceMachine = ServiceMachine.TestCase
TestServiceMachine.settings = settings(STEPS, max_examples=examples(10, day=4))
