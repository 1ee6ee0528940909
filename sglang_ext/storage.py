"""Which store a process uses: the default folder, and what a configuration makes of an address.

Imports nothing heavy: the commands start with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from prefix_index import IndexStore
from prefix_index.connect import locate, open_store
from prefix_index.folder import GONE, SUFFIX, Access, check_folder

if TYPE_CHECKING:  # imports torch
    from sglang_ext.options import SparseAttnConfig

ENV_STORE = "SGLANG_SPARSE_ATTN_STORE"


def default_store() -> str:
    """The store folder when none is named, which need not exist yet: below `$XDG_CACHE_HOME`, or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "sglang-ext", "store")


def holds_indexes(folder: str) -> bool:
    """Whether a store's folder has the file of an index; one that cannot be looked through may have."""

    def refused(error: OSError) -> None:
        raise error

    try:
        return any(name.endswith(SUFFIX) for *_, names in os.walk(folder, onerror=refused) for name in names)
    except OSError as error:
        return error.errno not in GONE


LEAST_DIGITS, LEAST_TO_REMOVE = 4, 8
"""Of a digest's beginning that stands for it, and where it goes: a number may be a name that is no longer there."""


def is_meant(word: str, digest: str, name: str | None, least: int = LEAST_DIGITS) -> bool:
    """Whether a word that an operator wrote means this index: its name, its digest, or so many first digits."""
    start = word.lower()
    is_start = len(start) >= least and set(start) <= set("0123456789abcdef")
    return name == word or (is_start and digest.startswith(start))


def remote_addresses(config: SparseAttnConfig) -> list[str]:
    """The remote stores that the folder shares indexes with, fastest first."""
    remote = config.store_remote
    return [] if not remote else [remote] if isinstance(remote, str) else list(remote)


def make_folder(folder: str, config: SparseAttnConfig) -> None:
    """Makes a store's folder where it is missing. Raises IndexStoreError."""
    access = Access.of(config.store_mode, config.store_group)
    check_folder(Path(folder), create=True, write=False, access=access)


def configured_store(address: str, config: SparseAttnConfig, *, write: bool = True, publish: bool = True) -> IndexStore:
    """The store of a server or a job, open. The caller closes it.

    Who does not `publish` gives remote stores nothing. Who does not `write` may use a folder that cannot be written to:
    another user's, or on a disk mounted read-only.
    Raises IndexStoreError; StoreUnavailable when a service does not answer. A remote store that does not is a problem
    of the store's (``problems()``): what the folder has is served meanwhile.
    """
    folder = locate(address).kind == "file"
    store = open_store(
        [address, *(remote_addresses(config) if folder else [])],
        max_bytes=config.store_max_bytes,
        min_free_bytes=config.store_min_free_bytes,
        write=write,
        mode=config.store_mode,
        group=config.store_group,
        timeout_s=config.store_timeout_s,
        publish=publish,
    )
    store.open()
    return store
