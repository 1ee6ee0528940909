"""From what a user writes to a store: a folder, a service's socket, an object store, Mooncake, or tiers of these.

Reading an address needs none of the optional packages; they are imported when a store that needs them is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from .errors import InvalidPayload
from .folder import check_apart
from .store import IndexStore

StoreAddress: TypeAlias = str | os.PathLike[str]

ADDRESS_FORMS: Final = (
    "a folder, file:///FOLDER, ipc://SOCKET (a service), s3://BUCKET/PREFIX, gs://..., az://..., memory:///, "
    "or mooncake://HOST:PORT"
)
_OBJECT_SCHEMES: Final = frozenset(("s3", "gs", "az", "memory"))
_MOONCAKE_OPTIONS: Final = {
    "metadata": str,
    "listing_url": str,
    "host": str,
    "protocol": str,
    "devices": str,
    "segment_nbytes": int,
    "local_buffer_nbytes": int,
    "replicas": int,
}


class Location(NamedTuple):
    """What an address means. ``value``: a folder's path, HOST:PORT of a Mooncake master, else the whole URL.

    ``options``: what follows a question mark in a Mooncake address, by the names of ``MooncakeBlobs``' arguments.
    """

    kind: Literal["file", "service", "objects", "mooncake"]
    value: str
    options: Mapping[str, Any] = MappingProxyType({})


def locate(address: StoreAddress) -> Location:
    """Reads an address; touches nothing. Raises InvalidPayload for what is none, naming the accepted forms."""
    text = os.fspath(address) if isinstance(address, os.PathLike) else address
    if not isinstance(text, str) or not text or "\0" in text:
        raise _no_address(text)
    if "://" not in text:
        return Location("file", text)
    try:
        parts = urlsplit(text)
        port = parts.port if parts.scheme == "mooncake" else None
        options = _options(parts.query) if port else {}
    except (ValueError, KeyError):
        raise _no_address(text) from None
    if parts.scheme == "file" and not parts.netloc and len(parts.path) > 1:
        return Location("file", unquote(parts.path))
    if parts.scheme == "ipc" and text != "ipc://":
        return Location("service", text)
    if parts.scheme in _OBJECT_SCHEMES and bool(parts.netloc) == (parts.scheme != "memory"):
        return Location("objects", text)
    if parts.scheme == "mooncake" and parts.hostname and port:
        return Location("mooncake", parts.netloc, options)
    raise _no_address(text)


def _options(query: str) -> dict[str, Any]:
    """Raises ValueError or KeyError for what is no option, or not its type."""
    pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    return {name: _MOONCAKE_OPTIONS[name](value) for name, value in pairs}


def open_store(
    address: StoreAddress | Sequence[StoreAddress],
    *,
    create: bool = False,
    max_bytes: int | None = None,
    min_free_bytes: int = 0,
    eviction: str = "lru",
    wait: str = "best_effort",
    timeout_s: float = 5.0,
    write: bool = True,
    mode: int | str | None = None,
    group: str | int | None = None,
) -> IndexStore:
    """The store at an address, ready to be opened (``open()`` or ``with``).

    Several addresses make tiers, the fastest first: a folder (or service) is the truth of the folders before it
    (``TieredStore``), and remote stores behind it are what other machines share with it (``SharedStore``, one around
    the other). Where nothing but remote stores is named, the last one is the truth.

    ``create``, ``max_bytes``, ``min_free_bytes``, ``eviction`` (``lru`` or ``cost_aware``), ``write``, ``mode`` and
    ``group`` hold for folders (``FileStore``); a service and a remote store have limits of their own. ``timeout_s``
    bounds each answer of a service or a remote store, and with ``wait`` (``best_effort``, ``wait_complete``,
    ``timeout``) what a tiered ``get`` waits for the slower tier. Raises InvalidPayload for an address or an option that
    is none.
    """
    of_folders: dict[str, Any] = {
        "create": create,
        "max_bytes": max_bytes,
        "min_free_bytes": min_free_bytes,
        "eviction": eviction,
        "write": write,
        "mode": mode,
        "group": group,
    }
    if isinstance(address, Sequence) and not isinstance(address, (str, bytes)):
        stores = [open_store(one, timeout_s=timeout_s, **of_folders) for one in address]
        _check_apart(stores)
        local = [number for number, one in enumerate(address) if locate(one).kind in ("file", "service")]
        if not local:
            return _tiers(stores, wait, timeout_s)
        last = local[-1]
        truth = share(stores[last], stores[last + 1 :], wait=wait, timeout_s=timeout_s)
        return _tiers([*stores[:last], truth], wait, timeout_s)
    kind, value, options = locate(address)
    if kind == "file":
        from .file import FileStore

        return FileStore(value, **of_folders)
    if kind == "service":
        from .service import StoreClient

        return StoreClient(value, timeout_s=timeout_s)
    from .remote import MooncakeBlobs, ObjectBlobs, RemoteStore

    blobs = ObjectBlobs(value) if kind == "objects" else MooncakeBlobs(value, **options)
    return RemoteStore(blobs, timeout_s=timeout_s)


def share(local: IndexStore, remotes: Sequence[IndexStore], *, wait: str, timeout_s: float) -> IndexStore:
    """``local`` sharing with each of ``remotes``, the fastest first; itself where there is none. Raises
    StoreFolderError for one folder twice.
    """
    from .shared import SharedStore

    _check_apart([local, *remotes])
    for remote in remotes:
        local = SharedStore(local, remote, wait=wait, timeout_s=timeout_s)
    return local


def _tiers(stores: Sequence[IndexStore], wait: str, timeout_s: float) -> IndexStore:
    if not stores:
        raise _no_address("no address")
    from .tiered import TieredStore

    *faster, below = stores
    for store in reversed(faster):
        below = TieredStore(store, below, wait=wait, timeout_s=timeout_s)
    return below


def _check_apart(stores: Sequence[IndexStore]) -> None:
    from .file import FileStore

    check_apart(store.folder for store in stores if isinstance(store, FileStore))


def _no_address(found: object) -> InvalidPayload:
    return InvalidPayload(
        "index store's address", expected=ADDRESS_FORMS, found=repr(found)[:200], remedy="correct the address"
    )
