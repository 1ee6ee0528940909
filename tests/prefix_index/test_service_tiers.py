"""The store service's tiers: what is copied to DRAM and served from there, dropped, evicted, and put."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefix_index import FileStore, StoreFolderError
from prefix_index.folder import come_back
from prefix_index.service import StoreClient, StoreServer
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.copied_stores import remove
from tests.prefix_index.served_stores import copied, patient, served, two_tiers
from tests.prefix_index.tiers import eventually, serving


@pytest.fixture
def own(tmp_path: Path) -> FileStore:
    return two_tiers(tmp_path)


@pytest.fixture
def client(tmp_path: Path, own: FileStore) -> Iterator[StoreClient]:
    with served(tmp_path, own) as endpoint, patient(endpoint) as client:
        yield client


def test_a_used_index_is_served_from_dram_and_a_replaced_one_never_is(
    client: StoreClient, own: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefix_index.service.server._WANT_AGAIN_S", 0.1)

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


def wait_for_files(folder: Path) -> list[Path]:
    eventually(lambda: any(folder.glob("*/*.pfxindex")))
    return list(folder.glob("*/*.pfxindex"))


def test_a_dram_folder_that_was_removed_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefix_index.service.server._WANT_AGAIN_S", 3600.0)
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
