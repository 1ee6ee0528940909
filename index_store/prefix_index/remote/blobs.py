"""What a remote tier asks of an existing distributed store: named values, nothing else; and how object stores do it.

``RemoteStore`` (store.py) builds an ``IndexStore`` on a ``Blobs`` and believes nothing that comes back before its
checksum was compared. ``MooncakeBlobs`` (mooncake.py) is the other one.
"""

# ruff: noqa: N818 (as in errors.py)

from __future__ import annotations

import contextlib
import importlib
import re
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

_SECRET: Final = re.compile(r"\?\S*|(?<=://)[^/\s@]*@")
_FULL: Final = ("(os error 27)", "(os error 28)", "(os error 122)", "QuotaExceeded")  # EFBIG, ENOSPC, EDQUOT
_LOCAL: Final = ("(os error 12)", "(os error 23)", "(os error 24)")  # ENOMEM, ENFILE, EMFILE


class BlobsError(Exception):
    """Base of what the methods below raise. The message is one line and holds no credentials."""


class BlobMissing(BlobsError):
    """No value of that name, as far as the store can tell."""


class BlobTooLong(BlobsError):
    """The value has more bytes than were asked for."""


class BlobsFull(BlobsError):
    """The store has no room for the value."""


class BlobsLocal(BlobsError):
    """Nobody was asked: this machine has no memory or no descriptor for it."""


class BlobsFailed(BlobsError):
    """The store did not do it; asking again later may help."""


class Blobs(Protocol):
    """Named values in a store of somebody else's. Names are ASCII, ``/`` parts them.

    All methods may block: ``RemoteStore`` runs each on a thread of its own and gives up waiting in time. They may be
    called from several threads, between ``open`` and ``close`` only.
    """

    name: str
    """Which store, for messages: its address without credentials."""

    def open(self, timeout_s: float) -> None:
        """Connects. ``timeout_s`` is how long one request may take; a client that can limit itself does."""

    def close(self) -> None:
        """Disconnects. Called when no other call is running. Opening again is allowed."""

    def fetch(self, name: str, limit: int) -> bytes:
        """A whole value. Raises BlobMissing; BlobTooLong for one of more than ``limit`` bytes."""

    def size(self, name: str) -> int:
        """Length in bytes. Raises BlobMissing."""

    def write(self, name: str, value: memoryview) -> None:
        """Stores a value; an older one of this name is replaced. Raises BlobsFull."""

    def create(self, name: str, value: memoryview) -> bool | None:
        """Stores a value unless there is one; returns whether it did. None: this store cannot promise that."""

    def delete(self, name: str) -> None:
        """Removes a value. One that is not there is no error."""

    def names(self, folder: str) -> Mapping[str, str]:
        """All names below ``folder``, each with a tag that changes when its value is written (or "": none)."""


class ObjectBlobs:
    """A ``Blobs`` at ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///folder`` or ``memory:///``.

    ``options`` go to ``obstore.store.from_url``. A ``file`` address is for file systems that several machines share; it
    is not synced to the disk. What is at ``memory:///`` lives as long as this object.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.name = _SECRET.sub("", url)
        self._url, self._options = url, options
        self._store: Any = None
        self._api: Any = None
        self._timeout_s = 5.0

    def open(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        if self._store is not None:
            return
        try:
            self._api = importlib.import_module("obstore")
            from_url = importlib.import_module("obstore.store").from_url
        except ImportError as err:
            raise BlobsFailed(f"{err}: install obstore") from None
        options = dict(self._options)
        scheme = urlsplit(self._url).scheme
        if scheme == "file":
            try:
                Path(unquote(urlsplit(self._url).path)).mkdir(parents=True, exist_ok=True)
            except OSError as err:
                raise BlobsFailed(f"{type(err).__name__}: {err}") from None
        elif scheme != "memory":
            # The client's own limits end its calls soon after nobody waits for them any more.
            limit = timedelta(seconds=timeout_s)
            options["client_options"] = {"timeout": limit, **options.get("client_options", {})}
            options.setdefault("retry_config", {"max_retries": 2, "retry_timeout": limit})
        with _translated():
            self._store = from_url(self._url, **options)

    def close(self) -> None:
        """Keeps the client: it holds no connection that would have to end, and ``memory:///`` lives in it."""

    def fetch(self, name: str, limit: int) -> bytes:
        with _translated():
            found = self._api.get(self._store, name)
            if found.meta["size"] > limit:
                raise BlobTooLong(f"{found.meta['size']} bytes")
            return bytes(found.bytes())

    def size(self, name: str) -> int:
        with _translated():
            return int(self._api.head(self._store, name)["size"])

    def write(self, name: str, value: memoryview) -> None:
        with _translated():
            self._api.put(self._store, name, value, use_multipart=False)

    def create(self, name: str, value: memoryview) -> bool | None:
        with _translated():
            try:
                self._api.put(self._store, name, value, mode="create")
            except NotImplementedError:
                return None
            except Exception as err:
                if type(err).__name__ == "AlreadyExistsError":
                    return False
                raise
        return True

    def delete(self, name: str) -> None:
        with _translated(), contextlib.suppress(FileNotFoundError):
            self._api.delete(self._store, name)

    def names(self, folder: str) -> Mapping[str, str]:
        found, deadline = dict[str, str](), time.monotonic() + self._timeout_s
        with _translated():
            for page in self._api.list(self._store, folder, chunk_size=1000):
                found.update((item["path"], str(item["e_tag"] or item["last_modified"])) for item in page)
                if time.monotonic() > deadline:  # nobody waits any more; some stores begin anew at each page
                    raise BlobsFailed(f"a listing that takes more than {self._timeout_s:g} s")
        return found


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """What ``obstore`` raises, as a BlobsError without credentials."""
    try:
        yield
    except BlobsError:
        raise
    except FileNotFoundError:
        raise BlobMissing("no such object") from None
    except Exception as err:
        text = str(err)
        line = _SECRET.sub("", text.partition("\n")[0])[:200]
        local = isinstance(err, MemoryError) or any(word in text for word in _LOCAL)
        kind = BlobsLocal if local else BlobsFull if any(word in text for word in _FULL) else BlobsFailed
        raise kind(f"{type(err).__name__}: {line}") from None
