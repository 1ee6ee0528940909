"""What a store service counts: what clients read, and what leaves for what they put, and leases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prefix_index import FileStore
from prefix_index.removals import NAME
from prefix_index.service import Limits
from prefix_index.service.server import _leases
from tests.prefix_index.samples import sample_identity, sample_payload
from tests.prefix_index.small_stores import ONE
from tests.prefix_index.tiers import eventually, patient, served, two_tiers

OTHER = sample_identity(range(64))


def test_what_clients_evict_for_what_they_put_is_counted(tmp_path: Path) -> None:
    limits = Limits(rescan_s=0.01, collect_s=3600.0)

    def evicted() -> int | None:
        return client.status().tiers[-1].evicted

    own = FileStore(tmp_path / "store", create=True, max_bytes=ONE)
    with served(tmp_path, own, limits) as endpoint, patient(endpoint) as client:
        client.put(sample_payload())
        client.put(sample_payload(OTHER))
        eventually(lambda: evicted() == 1)
        client.delete(OTHER)
        for fill in range(3):  # none that is replaced or removed counts
            client.put(sample_payload(fill=fill))
        (tmp_path / "store" / NAME).unlink()
        client.put(sample_payload(OTHER))
        eventually(lambda: evicted() == 2)


@pytest.mark.parametrize("tiers", [1, 2])
def test_reads_are_hits_with_and_without_a_dram_tier_and_a_put_is_none(tmp_path: Path, tiers: int) -> None:
    own = two_tiers(tmp_path) if tiers == 2 else None
    with served(tmp_path, own) as endpoint, patient(endpoint) as client:
        client.put(sample_payload())
        for count in (0, 1, 2):
            assert sum(tier.hits for tier in client.status().tiers) == count
            client.get(sample_identity()).close()


def test_a_lock_on_another_disk_is_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file may have the same number there."""
    real = Path.read_text
    with FileStore(tmp_path / "store", create=True) as store, store.lease(sample_identity()) or pytest.fail("held"):
        (lease,) = store.folder.glob("*/.lease-*")
        number = f":{lease.stat().st_ino} "

        def elsewhere(path: Path) -> str:
            text = real(path)
            return re.sub(rf"[0-9a-f]+:[0-9a-f]+{number}", f"fff:ff{number}", text) if path.name == "locks" else text

        monkeypatch.setattr(Path, "read_text", elsewhere)
        assert number in Path("/proc/locks").read_text()
        assert _leases(store.folder) == []
