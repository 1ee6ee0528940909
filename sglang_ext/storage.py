"""Which store a process uses: the default folder, and what a configuration makes of an address.

Imports nothing heavy: the commands start with it.
"""

from __future__ import annotations

import os
from typing import Protocol

from prefix_index import IndexStore, StoreFolderError
from prefix_index.connect import locate, open_store

ENV_STORE = "SGLANG_SPARSE_ATTN_STORE"


class StoreConfig(Protocol):
    """The store's part of `SparseAttnConfig`."""

    @property
    def store_max_bytes(self) -> int | None: ...
    @property
    def store_min_free_bytes(self) -> int: ...
    @property
    def store_eviction(self) -> str: ...
    @property
    def store_remote(self) -> str | list[str] | None: ...
    @property
    def store_wait(self) -> str: ...
    @property
    def store_timeout_s(self) -> float: ...


def default_store() -> str:
    """The store folder when none is named: below the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "sglang-ext", "store")


def remote_addresses(config: StoreConfig) -> list[str]:
    """The remote stores below the folder, fastest first; the last one is the truth."""
    remote = config.store_remote
    return [] if not remote else [remote] if isinstance(remote, str) else list(remote)


def configured_store(address: str, config: StoreConfig) -> IndexStore:
    """The store of a server or a job, open. The caller closes it.

    Raises IndexStoreError; StoreUnavailable when a service or a remote store does not answer, StoreFolderError
    when the folder could not become the copy of the remote store without losing indexes.
    """
    timeout_s = config.store_timeout_s
    if locate(address).kind != "file":
        service = open_store(address, timeout_s=timeout_s)
        service.open()
        return service
    local = open_store(
        address,
        max_bytes=config.store_max_bytes,
        min_free_bytes=config.store_min_free_bytes,
        eviction=str(getattr(config.store_eviction, "value", config.store_eviction)),
    )
    below = remote_addresses(config)
    if not below:
        local.open()
        return local
    from prefix_index.tiered import TieredStore

    remote = open_store(below, timeout_s=timeout_s)
    wait = str(getattr(config.store_wait, "value", config.store_wait))
    tiers = TieredStore(local, remote, wait=wait, timeout_s=timeout_s)
    remote.open()
    try:
        _check_copies(address, local, remote)
        tiers.open()
    except BaseException:
        local.close()
        remote.close()
        raise
    return tiers


def _check_copies(address: str, local: IndexStore, remote: IndexStore) -> None:
    """In front of a remote store a folder holds copies only: what the remote lacks would be dropped from it."""
    local.open()
    there = {entry.digest for entry in remote.list()}
    alone = [entry.digest for entry in local.list() if entry.digest not in there]
    if alone:
        raise StoreFolderError(
            "folder in front of store_remote",
            expected="copies of the remote store's indexes only",
            found=f"{len(alone)} that it does not have ({alone[0][:12]}...)",
            remedy="carry them there with `sglang-ext index import FOLDER --store URL`, or name an empty folder",
            path=locate(address).value,
        )
