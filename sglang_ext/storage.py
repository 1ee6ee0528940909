"""Which store a process uses: the default folder, and what a configuration makes of an address.

Imports nothing heavy: the commands start with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from prefix_index import IndexStore
from prefix_index.connect import locate, open_store
from prefix_index.folder import Access, check_folder
from sglang_ext.cache_folder import cache_folder

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
    def store_mode(self) -> str: ...
    @property
    def store_group(self) -> str | None: ...
    @property
    def store_remote(self) -> str | list[str] | None: ...
    @property
    def store_timeout_s(self) -> float: ...


def default_store() -> str:
    """The store folder when none is named: below the user's cache folder."""
    return os.path.join(cache_folder(), "store")


def remote_addresses(config: StoreConfig) -> list[str]:
    """The remote stores that the folder shares indexes with, fastest first."""
    remote = config.store_remote
    return [] if not remote else [remote] if isinstance(remote, str) else list(remote)


def make_folder(folder: str, config: StoreConfig) -> None:
    """Makes a store's folder where it is missing. Raises IndexStoreError."""
    access = Access.of(config.store_mode, config.store_group)
    check_folder(Path(folder), create=True, write=False, access=access)


def configured_store(address: str, config: StoreConfig, *, write: bool = True) -> IndexStore:
    """The store of a server or a job, open. The caller closes it.

    Who does not `write` may use a folder that cannot be written to: another user's, or on a disk mounted read-only.
    Raises IndexStoreError; StoreUnavailable when a service does not answer. A remote store that does not is a problem
    of the store's (``problems()``): what the folder has is served meanwhile.
    """
    folder = locate(address).kind == "file"
    store = open_store(
        [address, *(remote_addresses(config) if folder else [])],
        max_bytes=config.store_max_bytes,
        min_free_bytes=config.store_min_free_bytes,
        eviction=_word(config.store_eviction),
        write=write,
        mode=config.store_mode,
        group=config.store_group,
        timeout_s=config.store_timeout_s,
    )
    store.open()
    return store


def _word(choice: object) -> str:
    """Of an enum's member, or of a plain string."""
    return str(getattr(choice, "value", choice))
