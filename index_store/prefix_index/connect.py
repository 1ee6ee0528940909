"""From what a user writes to a store. Optional packages are imported when a store that needs them is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from .errors import InvalidPayload
from .file import FileStore
from .link import Source
from .remote import MooncakeBlobs, ObjectBlobs, RemoteStore
from .shared import SharedStore
from .store import IndexStore

StoreAddress: TypeAlias = str | os.PathLike[str]

ADDRESS_FORMS: Final = (
    "a folder, file:///FOLDER, ipc://SOCKET (a service), s3://BUCKET/PREFIX, gs://..., az://..., memory:///, "
    "or mooncake://HOST:PORT"
)
_MOONCAKE_OPTIONS: Final = {
    one.name: int if one.type == "int" else str for one in fields(MooncakeBlobs) if one.name != "master"
}


class Location(NamedTuple):
    """What an address means. ``value``: a folder's path, HOST:PORT of a Mooncake master, else the whole URL.

    ``options``: what follows a question mark, by the names of ``MooncakeBlobs``' arguments.
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
    # urlsplit ends a path at # or ?, and drops line breaks: such an address would mean another folder.
    is_whole = not (parts.query or parts.fragment) and text.isprintable()
    if parts.scheme == "file" and not parts.netloc and len(parts.path) > 1 and is_whole:
        return Location("file", unquote(parts.path))
    if parts.scheme == "ipc" and text != "ipc://":
        return Location("service", text)
    if parts.scheme in ("s3", "gs", "az", "memory") and bool(parts.netloc) == (parts.scheme != "memory"):
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
    timeout_s: float = 5.0,
    publish: bool = True,
    **options: Any,
) -> IndexStore:
    """The store at an address, a folder or a service's, ready to be opened (``open()`` or ``with``).

    Further addresses are remote stores, the fastest first, that it shares its indexes with (``SharedStore``).
    ``timeout_s`` bounds each answer of a service or a remote store; ``publish`` is ``SharedStore``'s. ``options`` are
    those of ``FileStore``, for an address that is a folder. Raises InvalidPayload.
    """
    remotes: list[StoreAddress] = []
    if isinstance(address, (str, bytes)) or not isinstance(address, Sequence):
        first: StoreAddress = address
    else:
        first, *remotes = [*address] or [""]
    kind, value, _ = locate(first)
    if kind == "file":
        local = FileStore(value, **options)
    elif kind == "service":
        from .service import StoreClient

        local = StoreClient(value, timeout_s=timeout_s)
    else:
        raise InvalidPayload(
            "index store's address",
            "a folder, file:///FOLDER or a service's ipc://SOCKET",
            f"a remote store, {repr(first)[:200]}",
            "name this machine's own store; a remote one is shared with it (store_remote)",
        )
    if not remotes:
        return local
    return SharedStore(local, [_remote(remote, timeout_s) for remote in remotes], timeout_s=timeout_s, publish=publish)


def _remote(address: StoreAddress, timeout_s: float) -> Source:
    kind, value, options = locate(address)
    if kind == "file":
        return FileStore(value)
    if kind == "service":
        raise _no_address(address)
    blobs = ObjectBlobs(value) if kind == "objects" else MooncakeBlobs(value, **options)
    return RemoteStore(blobs, timeout_s=timeout_s)


def _no_address(found: object) -> InvalidPayload:
    return InvalidPayload("index store's address", ADDRESS_FORMS, repr(found)[:200], "correct the address")
