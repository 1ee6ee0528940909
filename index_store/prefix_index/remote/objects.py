"""Values in an object store or on a shared file system, through ``obstore``.

Credentials come from the environment, the way obstore reads them (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``); none is
taken from, or shown in, an address or a message.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from .blobs import BlobMissing, BlobsError, BlobsFailed, BlobsFull, BlobsLocal, BlobTooShort
from .values import copy_bytes

_SECRET: Final = re.compile(r"\?\S*|(?<=://)[^/\s@]*@")
_FULL: Final = ("(os error 27)", "(os error 28)", "(os error 122)", "QuotaExceeded")  # EFBIG, ENOSPC, EDQUOT
_LOCAL: Final = ("(os error 12)", "(os error 23)", "(os error 24)")  # ENOMEM, ENFILE, EMFILE
_RANGE: Final = ("InvalidRange", "Requested range was invalid", "Wanted range starting at")


class ObjectBlobs:
    """A ``Blobs`` at ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///folder`` or ``memory:///``.

    ``options`` go to ``obstore.store.from_url`` (``endpoint``, ``region``, ``client_options``, ...). A ``file``
    address is for file systems that several machines share; it is not synced to the disk (obstore does not), so a
    FileStore is the better store of one machine. What is at ``memory:///`` lives as long as this object.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.name = _SECRET.sub("", url)
        self._url, self._options = url, options
        self._store: Any = None
        self._api: Any = None

    def open(self, timeout_s: float) -> None:
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
            Path(unquote(urlsplit(self._url).path)).mkdir(parents=True, exist_ok=True)
        elif scheme != "memory":
            # The client's own limits end its calls soon after nobody waits for them any more.
            limit = timedelta(seconds=timeout_s)
            options["client_options"] = {"timeout": limit, **options.get("client_options", {})}
            options.setdefault("retry_config", {"max_retries": 2, "retry_timeout": limit})
        try:
            self._store = from_url(self._url, **options)
        except Exception as err:
            raise _failed(err) from None

    def close(self) -> None:
        """Keeps the client: it holds no connection that would have to end, and ``memory:///`` lives in it."""

    def fetch(self, name: str, limit: int) -> bytes:
        try:
            found = self._api.get(self._store, name)
            if found.meta["size"] > limit:
                raise BlobTooShort(f"{found.meta['size']} bytes")
            return bytes(found.bytes())
        except BlobsError:
            raise
        except Exception as err:
            raise _failed(err) from None

    def read(self, name: str, offset: int, parts: Sequence[memoryview]) -> None:
        length = sum(len(part) for part in parts)
        try:
            found = memoryview(self._api.get_range(self._store, name, start=offset, length=length))
        except Exception as err:
            if any(word in str(err) for word in _RANGE):
                raise BlobTooShort(f"less than {offset} bytes") from None
            raise _failed(err) from None
        # A range that reaches past the end is cut in silence.
        if len(found) != length:
            raise BlobTooShort(f"{offset + len(found)} bytes")
        done = 0
        for part in parts:
            copy_bytes(part, found[done : done + len(part)])
            done += len(part)

    def size(self, name: str) -> int:
        try:
            return int(self._api.head(self._store, name)["size"])
        except Exception as err:
            raise _failed(err) from None

    def write(self, name: str, value: memoryview) -> None:
        try:
            self._api.put(self._store, name, value, use_multipart=False)
        except Exception as err:
            raise _failed(err) from None

    def create(self, name: str, value: memoryview) -> bool | None:
        try:
            self._api.put(self._store, name, value, mode="create")
        except NotImplementedError:
            return None
        except Exception as err:
            if type(err).__name__ == "AlreadyExistsError":
                return False
            raise _failed(err) from None
        return True

    def delete(self, name: str) -> None:
        try:
            self._api.delete(self._store, name)
        except FileNotFoundError:
            return
        except Exception as err:
            raise _failed(err) from None

    def names(self, folder: str) -> Mapping[str, str]:
        try:
            pages = self._api.list(self._store, folder, chunk_size=1000)
            return {item["path"]: str(item["e_tag"] or item["last_modified"]) for page in pages for item in page}
        except Exception as err:
            raise _failed(err) from None


def _failed(err: Exception) -> BlobsError:
    if isinstance(err, FileNotFoundError):
        return BlobMissing("no such object")
    text = str(err)
    line = _SECRET.sub("", text.partition("\n")[0])[:200]
    local = isinstance(err, MemoryError) or any(word in text for word in _LOCAL)
    kind = BlobsLocal if local else BlobsFull if any(word in text for word in _FULL) else BlobsFailed
    return kind(f"{type(err).__name__}: {line}")
