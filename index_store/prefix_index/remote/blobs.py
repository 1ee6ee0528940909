"""What a remote tier asks of an existing distributed store: named values, and nothing else.

``ObjectBlobs`` (objects.py) and ``MooncakeBlobs`` (mooncake.py) implement it; ``RemoteStore`` (store.py) builds an
``IndexStore`` on it and believes nothing that comes back before its checksum was compared.
"""

# ruff: noqa: N818 (as in errors.py)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class BlobsError(Exception):
    """Base of what the methods below raise. The message is one line and holds no credentials."""


class BlobMissing(BlobsError):
    """No value of that name, as far as the store can tell."""


class BlobTooShort(BlobsError):
    """The value has not the bytes that were asked for."""


class BlobsFull(BlobsError):
    """The store has no room for the value."""


class BlobsLocal(BlobsError):
    """Nobody was asked: this machine has no memory or no descriptor for it."""


class BlobsFailed(BlobsError):
    """The store did not do it; asking again later may help."""


class Blobs(Protocol):
    """Named values in a store of somebody else's. Names are ASCII, ``/`` parts them.

    All methods may block, for as long as the store pleases: ``RemoteStore`` runs each on a thread of its own and
    gives up waiting in time. They may be called from several threads, between ``open`` and ``close`` only.
    """

    name: str
    """Which store, for messages: its address without credentials."""

    def open(self, timeout_s: float) -> None:
        """Connects. ``timeout_s`` is how long one request may take; a client that can limit itself does."""
        ...

    def close(self) -> None:
        """Disconnects. Called when no other call is running. Opening again is allowed."""
        ...

    def fetch(self, name: str, limit: int) -> bytes:
        """A whole small value. Raises BlobMissing; BlobTooShort for one of more than ``limit`` bytes."""
        ...

    def read(self, name: str, offset: int, parts: Sequence[memoryview]) -> None:
        """Fills the writable ``parts``, one after the other, from ``offset`` of a value.

        Raises BlobMissing, and BlobTooShort where the value ends before the parts are full.
        """
        ...

    def size(self, name: str) -> int:
        """Length in bytes. Raises BlobMissing."""
        ...

    def write(self, name: str, value: memoryview) -> None:
        """Stores a value; an older one of this name is replaced. Raises BlobsFull."""
        ...

    def create(self, name: str, value: memoryview) -> bool | None:
        """Stores a value unless there is one; returns whether it did. None: this store cannot promise that."""
        ...

    def delete(self, name: str) -> None:
        """Removes a value. One that is not there is no error."""
        ...

    def names(self, folder: str) -> Mapping[str, str]:
        """All names that begin with ``folder`` + ``/``, each with a tag that changes when its value is written
        ("" where the store tells none).
        """
        ...
