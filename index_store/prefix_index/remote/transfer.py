"""Moving an index's values to and from a ``Blobs``: names, deadlines, checks, and what each failure means."""

from __future__ import annotations

import contextlib
import mmap
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from ..errors import IndexFormatError, IndexNotFound, StoreFull, StoreUnavailable, out_of_memory
from ..format import corrupt
from .blobs import BlobMissing, Blobs, BlobsError, BlobsFull, BlobsLocal, BlobTooShort
from .calls import Calls
from .values import (
    HEADER,
    MANIFEST,
    MAX_MANIFEST_NBYTES,
    ChunkedBuffer,
    Manifest,
    check_chunk,
    pack_record,
    unpack_manifest,
)

_NAME = re.compile(r"([0-9a-f]{64})\.(?:(manifest)|(lease)|([0-9a-f]{16})\.([0-9]{6}))")
_BATCH: Final = 16


class Found(NamedTuple):
    """What a listing shows of one digest: the manifest's tag (None: no manifest), chunks by generation, a lease."""

    tag: str | None
    chunks: dict[str, frozenset[int]]
    leased: bool

    def is_whole(self, manifest: Manifest) -> bool:
        return self.chunks.get(manifest.generation, frozenset()).issuperset(range(len(manifest.chunks)))


class Values:
    """The values of one store: ``<folder>/<digest>.manifest``, ``<folder>/<digest>.<generation>.<index>``.

    Every method raises StoreUnavailable when the store does not answer in time, or says that it cannot.
    """

    def __init__(self, blobs: Blobs, calls: Calls, folder: str) -> None:
        self._blobs, self._calls, self._folder = blobs, calls, folder

    # What is small

    def manifest(self, digest: str) -> Manifest:
        """Raises IndexNotFound, IndexFormatError."""
        with self.asking():
            return self._calls.run(partial(self._fetch_manifest, digest))

    def manifests(self, digests: Sequence[str]) -> dict[str, Manifest | IndexNotFound | IndexFormatError]:
        """Many at once, each with what became of it."""

        def fetch(batch: Sequence[str]) -> dict[str, Manifest | IndexNotFound | IndexFormatError]:
            outcomes: dict[str, Manifest | IndexNotFound | IndexFormatError] = {}
            for digest in batch:
                try:
                    outcomes[digest] = self._fetch_manifest(digest)
                except (IndexNotFound, IndexFormatError) as err:
                    outcomes[digest] = err
            return outcomes

        batches = [partial(fetch, digests[i : i + _BATCH]) for i in range(0, len(digests), _BATCH)]
        with self.asking():
            return {digest: outcome for part in self._calls.run_all(batches) for digest, outcome in part.items()}

    def put_manifest(self, manifest: Manifest) -> None:
        """From now on the index is there. Raises StoreFull."""
        digest = manifest.entry.identity.digest
        raw = pack_record(MANIFEST, digest, manifest.generation, manifest)
        self.write(f"{digest}.manifest", raw)

    def remove_manifest(self, digest: str) -> None:
        """From now on it is not."""
        self.remove([f"{digest}.manifest"])

    def write(self, name: str, raw: bytes) -> None:
        with self.asking():
            self._calls.run(partial(self._blobs.write, self._at(name), memoryview(raw)))

    def create(self, name: str, raw: bytes) -> bool | None:
        """See ``Blobs.create``."""
        with self.asking():
            return self._calls.run(partial(self._blobs.create, self._at(name), memoryview(raw)))

    def fetch(self, name: str) -> bytes | None:
        """A whole small value, None where there is none."""
        with self.asking():
            try:
                return self._calls.run(partial(self._blobs.fetch, self._at(name), MAX_MANIFEST_NBYTES))
            except BlobMissing:
                return None

    def remove(self, names: Sequence[str]) -> None:
        with self.asking():
            self._calls.run_all([partial(self._blobs.delete, self._at(name)) for name in names])

    def listing(self) -> tuple[dict[str, Found], list[str]]:
        """What there is, by digest, and the names that are none of ours."""
        with self.asking():
            names = self._calls.run(partial(self._blobs.names, self._folder))
        tags: dict[str, str] = {}
        leased: set[str] = set()
        chunks: dict[str, dict[str, set[int]]] = {}
        strays = []
        for name, tag in names.items():
            match = _NAME.fullmatch(name.removeprefix(self._folder + "/"))
            if match is None:
                strays.append(name)
                continue
            digest, is_manifest, is_lease, generation, index = match.groups()
            generations = chunks.setdefault(digest, {})
            if is_manifest:
                tags[digest] = tag
            elif is_lease:
                leased.add(digest)
            else:
                generations.setdefault(generation, set()).add(int(index))
        return {
            digest: Found(tags.get(digest), {g: frozenset(s) for g, s in generations.items()}, digest in leased)
            for digest, generations in chunks.items()
        }, strays

    # What is large

    def upload(self, digest: str, generation: str, buffer: ChunkedBuffer) -> None:
        """Writes all chunks. Raises StoreFull."""
        with self.asking():
            self._calls.run_all(
                [
                    partial(self._blobs.write, self._chunk(digest, generation, i), buffer.value(i))
                    for i in range(buffer.count)
                ]
            )

    def download(self, manifest: Manifest) -> mmap.mmap:
        """The whole container, each chunk compared with its checksums. Raises IndexNotFound, IndexFormatError,
        OutOfMemory.
        """
        try:
            buffer = mmap.mmap(-1, manifest.nbytes)
        except (OSError, ValueError, OverflowError) as err:
            if not self.is_whole(manifest):
                raise corrupt("manifest", "the lengths of its chunks", f"{manifest.nbytes} bytes") from None
            raise out_of_memory(err, f"{manifest.nbytes} bytes") from err
        view = memoryview(buffer)
        digest = manifest.entry.identity.digest

        def fetch(index: int) -> None:
            start = index * manifest.chunk_nbytes
            header, body = memoryview(bytearray(HEADER.size)), view[start : start + manifest.size_of(index)]
            self._read(digest, manifest.generation, index, 0, [header, body])
            check_chunk(bytes(header), body, manifest, index)

        with self.asking():
            self._calls.run_all([partial(fetch, i) for i in range(len(manifest.chunks))])
        return buffer

    def is_whole(self, manifest: Manifest) -> bool:
        """Whether all chunks are there and have their lengths; their bytes are not read."""
        digest = manifest.entry.identity.digest
        names = [self._chunk(digest, manifest.generation, i) for i in range(len(manifest.chunks))]
        with self.asking():
            try:
                sizes = self._calls.run_all([partial(self._blobs.size, name) for name in names])
            except BlobMissing:
                return False
        return sizes == [HEADER.size + manifest.size_of(i) for i in range(len(names))]

    def remove_chunks(self, digest: str, generation: str, indexes: Sequence[int]) -> None:
        self.remove([f"{digest}.{generation}.{i:06d}" for i in indexes])

    def _at(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _chunk(self, digest: str, generation: str, index: int) -> str:
        return self._at(f"{digest}.{generation}.{index:06d}")

    def _fetch_manifest(self, digest: str) -> Manifest:
        try:
            raw = self._blobs.fetch(self._at(f"{digest}.manifest"), MAX_MANIFEST_NBYTES)
        except BlobMissing:
            raise not_found(digest, "none", "build it: a remote tier may lose what it held") from None
        except BlobTooShort as err:
            raise corrupt("manifest", f"at most {MAX_MANIFEST_NBYTES} bytes", err) from None
        return unpack_manifest(digest, raw)

    def _read(self, digest: str, generation: str, index: int, offset: int, parts: Sequence[memoryview]) -> None:
        name = self._chunk(digest, generation, index)
        try:
            self._blobs.read(name, offset, parts)
        except BlobMissing:
            found = f"chunk {index} gone (evicted, lost with its machine, or replaced)"
            raise not_found(digest, found, "build it again") from None
        except BlobTooShort as err:
            raise corrupt(f"length of chunk {index}", offset + sum(len(p) for p in parts), err) from None

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        what = self._blobs.name
        try:
            yield
        except BlobMissing:
            raise
        except BlobsLocal as err:
            raise out_of_memory(err, "a request sent") from err
        except BlobsFull as err:
            remedy = "free room there, add machines, or raise its limit"
            raise StoreFull(what, "room for the index", str(err), remedy) from err
        except BlobsError as err:
            remedy = "check the store, the network and the permissions"
            raise StoreUnavailable(what, "the request done", str(err), remedy) from err


def not_found(digest: str, found: str, remedy: str) -> IndexNotFound:
    return IndexNotFound("index", digest, found, remedy)
