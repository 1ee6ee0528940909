"""An index whose bytes stay on the other machine until they are asked for."""

from __future__ import annotations

import contextlib
import mmap
import threading
from contextlib import AbstractContextManager

from ..format import invalid
from ..source import Fetch, Source
from .transfer import Values
from .values import Manifest


class OnDemandSource(Source):
    """Reads ranges of the remote chunks; one that needs the whole container (``mapping``) downloads it once.

    Ranges are not compared with a chunk's checksum, which covers all of it: the array's own checksum is what
    guards them (``IndexFile.read_into``). Once downloaded, the index outlives its remote values.
    """

    def __init__(self, values: Values, manifest: Manifest) -> None:
        self._values = values
        self.manifest = manifest
        self.nbytes = manifest.nbytes
        self._lock = threading.Lock()
        self._whole: mmap.mmap | None = None

    def read_at(self, offset: int, nbytes: int) -> bytes:
        out = bytearray(max(0, min(nbytes, self.nbytes - max(offset, 0))))
        self.read_into(memoryview(out), max(offset, 0))
        return bytes(out)

    def read_into(self, out: memoryview, offset: int) -> int:
        part = out[: max(0, self.nbytes - offset)]
        whole = self._whole
        if whole is not None:
            part[:] = memoryview(whole)[offset : offset + len(part)]
        elif part:
            self._values.read(self.manifest, offset, part)
        return len(part)

    def mapping(self) -> memoryview:
        with self._lock:
            if self._whole is None:
                self._whole = self._values.download(self.manifest)
            return memoryview(self._whole).toreadonly()

    def bulk(self, direct: bool | None) -> AbstractContextManager[Fetch]:
        if direct:
            raise invalid("direct read", "a file", "an index on another machine", "leave direct at None")
        return contextlib.nullcontext(self.read_into)

    def close(self) -> None:
        """Arrays that were handed out keep what was downloaded; there is nothing else to release."""
