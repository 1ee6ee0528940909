"""Addresses of stores: what each form becomes, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore, InvalidPayload, SharedStore, StoreFull, TieredStore
from prefix_index.connect import ADDRESS_FORMS, locate, open_store
from prefix_index.remote import RemoteStore
from prefix_index.testing import sample_identity, sample_payload


@pytest.mark.parametrize(
    ("address", "kind", "value"),
    [
        ("store", "file", "store"),
        ("./a b/store", "file", "./a b/store"),
        (Path("x") / "y", "file", "x/y"),
        ("file:///srv/a%20b", "file", "/srv/a b"),
        ("ipc:///run/store.sock", "service", "ipc:///run/store.sock"),
        ("s3://bucket/prefix", "objects", "s3://bucket/prefix"),
        ("gs://bucket", "objects", "gs://bucket"),
        ("az://container/x", "objects", "az://container/x"),
        ("memory:///", "objects", "memory:///"),
        ("mooncake://10.0.0.1:50051", "mooncake", "10.0.0.1:50051"),
    ],
)
def test_what_an_address_means(address: Any, kind: str, value: str) -> None:
    assert locate(address)[:2] == (kind, value)


def test_a_mooncake_address_may_carry_options() -> None:
    options = locate("mooncake://m:1?segment_nbytes=1048576&protocol=rdma&devices=").options
    assert options == {"segment_nbytes": 1 << 20, "protocol": "rdma", "devices": ""}


@pytest.mark.parametrize(
    "address",
    [
        "",
        b"bytes",
        7,
        "a\0b",
        "http://host/path",
        "s3://",
        "memory://name",
        "file://host/path",
        "file://",
        "ipc://",
        "mooncake://host",
        "mooncake://host:port",
        "mooncake://host:99999",
        "mooncake://:50051",
        "mooncake://m:1?segment_nbytes=much",
        "mooncake://m:1?colour=red",
        "mooncake://m:1?junk",
        "://",
        "s3://[broken",
    ],
)
def test_anything_else_is_refused_with_the_accepted_forms(address: Any) -> None:
    with pytest.raises(InvalidPayload) as caught:
        open_store(address)
    assert ADDRESS_FORMS in str(caught.value)
    assert repr(address) in str(caught.value)


def test_no_address_at_all_is_refused() -> None:
    with pytest.raises(InvalidPayload, match="index store's address"):
        open_store([])


def test_a_folder_takes_its_options(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new", create=True, max_bytes=4096, min_free_bytes=5, eviction="cost_aware")
    assert isinstance(store, FileStore)
    assert not (tmp_path / "new").exists(), "not opened yet"
    store.open()
    with pytest.raises(StoreFull, match="4096"):
        store.put(sample_payload())
    store.close()
    assert (tmp_path / "new").is_dir()
    with pytest.raises(InvalidPayload, match="eviction"):
        open_store(tmp_path, eviction="random")


def test_a_service_is_reached_by_its_client() -> None:
    from prefix_index.service import StoreClient

    assert isinstance(open_store("ipc:///run/none.sock", timeout_s=1.0), StoreClient)


def test_several_folders_are_tiers_fastest_first(tmp_path: Path) -> None:
    tiers = open_store([tmp_path / "a", tmp_path / "b"], create=True, wait="wait_complete")
    assert isinstance(tiers, TieredStore)
    assert isinstance(tiers.fast, FileStore)
    assert isinstance(tiers.slow, FileStore)
    with tiers:
        entry = tiers.put(sample_payload())
        with tiers.get(sample_identity()) as index:
            index.verify()
    assert (tmp_path / "a" / entry.digest[:2] / f"{entry.digest}.pfxindex").exists()
    assert isinstance(open_store([tmp_path / "a"]), FileStore)


def test_remote_stores_behind_a_folder_share_with_it_and_folders_before_it_hold_copies(tmp_path: Path) -> None:
    tiers = open_store([tmp_path / "a", tmp_path / "b", "memory:///", "mooncake://m:1"], create=True)
    assert isinstance(tiers, TieredStore)
    assert isinstance(tiers.fast, FileStore)
    outer = tiers.slow
    assert isinstance(outer, SharedStore)
    assert isinstance(outer.remote, RemoteStore)
    assert isinstance(outer.local, SharedStore)
    assert isinstance(outer.local.remote, RemoteStore)
    assert isinstance(outer.local.local, FileStore)
    assert outer.local.local.folder == tmp_path / "b"


def test_a_store_of_three_kinds_works(tmp_path: Path) -> None:
    with open_store([tmp_path / "a", tmp_path / "b", "memory:///"], create=True) as tiers:  # type: ignore[attr-defined]
        assert isinstance(tiers, TieredStore)
        assert isinstance(tiers.slow, SharedStore)
        entry = tiers.put(sample_payload())
        assert tiers.slow.flush(60)
        for below in (tiers.fast, tiers.slow.local, tiers.slow.remote):
            assert below.contains(entry.digest)
        tiers.slow.local.delete(entry.digest)
        with tiers.get(entry.digest) as index:
            index.verify()


def test_of_remote_stores_alone_the_last_is_the_truth() -> None:
    tiers = open_store(["mooncake://m:1", "memory:///"])
    assert isinstance(tiers, TieredStore)
    assert isinstance(tiers.slow, RemoteStore)


def test_reading_an_address_imports_no_optional_package() -> None:
    code = (
        "import sys; from prefix_index.connect import locate; "
        "[locate(a) for a in ('s3://b/p', 'mooncake://h:1', 'ipc:///s', 'x')]; "
        "assert not {'zmq', 'obstore', 'mooncake'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
