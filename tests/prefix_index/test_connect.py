"""Addresses of stores: what each form becomes, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore, InvalidPayload, SharedStore, StoreFull
from prefix_index.connect import ADDRESS_FORMS, locate, open_store
from prefix_index.remote import RemoteStore
from tests.prefix_index.samples import sample_payload


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


NO_ADDRESSES = "http://host/path s3:// s3://[broken memory://name file://host/path file:// ipc:// :// mooncake://host"
NO_ADDRESSES += " mooncake://host:port mooncake://host:99999 mooncake://:50051 mooncake://m:1?segment_nbytes=much"
NO_ADDRESSES += " mooncake://m:1?colour=red mooncake://m:1?junk file:///a#b file:///a?b"


@pytest.mark.parametrize("address", ["", b"bytes", 7, "a\0b", "file:///a\nb", *NO_ADDRESSES.split()])
def test_anything_else_is_refused_with_the_accepted_forms(address: Any) -> None:
    with pytest.raises(InvalidPayload) as caught:
        open_store(address)
    assert ADDRESS_FORMS in str(caught.value)
    assert repr(address) in str(caught.value)


def test_no_address_at_all_is_refused() -> None:
    with pytest.raises(InvalidPayload, match="index store's address"):
        open_store([])


def test_a_folder_takes_its_options(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new", create=True, max_bytes=4096, min_free_bytes=5)
    assert isinstance(store, FileStore)
    assert not (tmp_path / "new").exists(), "not opened yet"
    store.open()
    with pytest.raises(StoreFull, match="4096"):
        store.put(sample_payload())
    store.close()
    assert (tmp_path / "new").is_dir()


def test_a_service_is_reached_by_its_client() -> None:
    from prefix_index.service import StoreClient

    assert isinstance(open_store("ipc:///run/none.sock", timeout_s=1.0), StoreClient)


def test_remote_stores_behind_a_folder_share_with_it(tmp_path: Path) -> None:
    store = open_store([tmp_path / "a", "memory:///", "mooncake://m:1", f"file://{tmp_path}/b"], create=True)
    assert isinstance(store, SharedStore)
    assert store.local.folder == tmp_path / "a"
    assert [type(remote) for remote in store.remotes] == [RemoteStore, RemoteStore, FileStore]
    assert isinstance(open_store([tmp_path / "a"]), FileStore)


def test_who_only_looks_writes_nothing(tmp_path: Path) -> None:
    """Neither to the remote store nor to the folder, where a writer died."""
    folder, remote = tmp_path / "a", tmp_path / "b"
    with open_store(folder, create=True) as store:
        entry = store.put(sample_payload())
    partial = folder / entry.digest[:2] / ".partial-1-x"
    partial.write_bytes(b"x")
    os.utime(partial, (1.0, 1.0))
    remote.mkdir()
    with open_store([folder, f"file://{remote}"], write=False, publish=False) as store:
        assert [one.digest for one in store.list()] == [entry.digest]
        store.flush(5.0)
        store.rescan(full=True)
        assert not store.flush(5.0), "the remote store lacks it"
    assert (list(remote.iterdir()), partial.exists()) == ([], True)
    with open_store([folder, f"file://{remote}"]) as store:
        assert store.flush(5.0)
    assert ([path.name for path in remote.rglob("*.pfxindex")], partial.exists()) == (
        [f"{entry.digest}.pfxindex"],
        False,
    )


def test_a_remote_folder_that_cannot_be_read_is_a_problem_and_no_error(tmp_path: Path) -> None:
    with open_store([tmp_path / "a", f"file://{tmp_path}/{'b' * 300}"], create=True) as store:
        ((_, error),) = store.problems()
        assert "File name too long" in str(error)
        assert not store.list()


@pytest.mark.parametrize("addresses", [["mooncake://m:1", "memory:///"], "s3://b"])
def test_what_shares_is_this_machines_own(addresses: list[str] | str) -> None:
    with pytest.raises(InvalidPayload, match=r"expected a folder, .* found a remote store"):
        open_store(addresses)
    with pytest.raises(InvalidPayload, match="index store's address"):
        open_store(["/a", "ipc:///run/s"])


def test_reading_an_address_imports_no_optional_package() -> None:
    code = (
        "import sys; from prefix_index.connect import locate; "
        "[locate(a) for a in ('s3://b/p', 'mooncake://h:1', 'ipc:///s', 'x')]; "
        "assert not {'zmq', 'obstore', 'mooncake'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
