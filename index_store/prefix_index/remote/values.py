"""The bytes of one remote value: a 64-byte header that says what it is, then its body.

A container is cut into chunks, each one value under ``<folder>/<digest>.<generation>.<index>``; a manifest under
``<folder>/<digest>.manifest`` names the generation. It is written last and removed first. A generation is new for
every put, so that no name is ever written twice and bytes of two puts cannot be mixed.
"""

from __future__ import annotations

import mmap
import secrets
import struct
from typing import Final, TypeVar

import msgspec
import numpy as np
import xxhash

from ..errors import IndexForeign, IndexTooNew
from ..format import ALIGN, MAX_NBYTES, Entry, aligned, corrupt
from ..store import IndexEntry, Retention

MAGIC: Final = b"\x89PFXVAL\n"
VERSION: Final = 1
MANIFEST: Final = 1
CHUNK: Final = 2
LEASE: Final = 3
KINDS: Final = {MANIFEST: "manifest", CHUNK: "chunk", LEASE: "lease"}
MAX_MANIFEST_NBYTES: Final = 4 << 20

# magic, version, kind, index, first half of the digest, generation, length of the body, its xxh3, xxh3 of the 56
# bytes before
HEADER: Final = struct.Struct("<8sHHI16sQQQQ")

_Record = TypeVar("_Record", bound=msgspec.Struct)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one index consists of. ``chunks`` are the xxh3 of the chunk bodies, 16 hex digits each.

    All chunks have ``chunk_nbytes`` bytes of the container but the last, which has the rest of ``nbytes``.
    """

    entry: Entry
    nbytes: int
    chunk_nbytes: int
    generation: str
    chunks: list[str]
    retention: Retention

    def __post_init__(self) -> None:
        for name in ("nbytes", "chunk_nbytes"):
            value = getattr(self, name)
            if not 0 < value <= MAX_NBYTES or value % ALIGN:
                raise ValueError(f"{name}: expected a multiple of {ALIGN}, at most {MAX_NBYTES}, found {value}")
        if len(self.chunks) != -(-self.nbytes // self.chunk_nbytes):
            raise ValueError(f"chunks: expected {-(-self.nbytes // self.chunk_nbytes)}, found {len(self.chunks)}")

    @property
    def listed(self) -> IndexEntry:
        info = self.entry.info
        return IndexEntry(
            identity=self.entry.identity,
            nbytes=self.nbytes,
            created=info.created,
            build_seconds=info.build_seconds,
            retention=self.retention,
        )

    def size_of(self, index: int) -> int:
        """Bytes of the container in one chunk; the value has 64 more."""
        return min(self.chunk_nbytes, self.nbytes - index * self.chunk_nbytes)


class LeaseRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who may build an index, until when (seconds since the Unix epoch, by the holder's clock)."""

    holder: str
    expires: float


_MANIFESTS: Final = msgspec.json.Decoder(Manifest)
#: Decodes the body of a lease.
LEASES: Final = msgspec.json.Decoder(LeaseRecord)


def new_generation(now: float) -> str:
    """16 hex digits: ``now``, seconds since the Unix epoch (for ``collect``), then 32 random bits."""
    return f"{int(now) & 0xFFFFFFFF:08x}{secrets.token_hex(4)}"


def generation_time(generation: str) -> int:
    """When its writer began, seconds since the Unix epoch."""
    return int(generation[:8], 16)


def value_header(kind: int, digest: str, generation: str, index: int, body: memoryview | bytes) -> bytes:
    """The 64 bytes before ``body``."""
    raw = HEADER.pack(
        MAGIC,
        VERSION,
        kind,
        index,
        bytes.fromhex(digest[:32]),
        int(generation, 16),
        len(body),
        xxhash.xxh3_64_intdigest(body),
        0,
    )[:-8]
    return raw + xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little")


def check_header(raw: bytes, kind: int, digest: str, generation: str | None, index: int) -> tuple[int, int, str]:
    """(length, xxh3, generation) that the header states. Raises IndexForeign, IndexTooNew or IndexCorrupt, also
    for an intact value of another index, generation or place.
    """
    what = f"{KINDS[kind]} {index}" if kind == CHUNK else KINDS[kind]
    if raw[:8] != MAGIC[: len(raw)]:
        remedy = "delete the index, or give the store another folder"
        raise IndexForeign(f"{what} value", f"ours ({MAGIC!r})", repr(raw[:8]), remedy)
    if len(raw) < HEADER.size:
        raise corrupt(f"length of {what}", f"at least {HEADER.size}", len(raw))
    _, version, found_kind, found_index, prefix, number, length, checksum, header_sum = HEADER.unpack(raw)
    if xxhash.xxh3_64_intdigest(raw[:-8]) != header_sum:
        raise corrupt(f"header checksum of {what}", f"{header_sum:016x}", xxhash.xxh3_64_hexdigest(raw[:-8]))
    if version > VERSION:
        remedy = "upgrade sglang-ext, or build the index again with this version"
        raise IndexTooNew(f"version of {what}", f"at most {VERSION}", f"{version} (written by a newer version)", remedy)
    expected = (VERSION, kind, index, digest[:32], generation or f"{number:016x}")
    found_all = (version, found_kind, found_index, prefix.hex(), f"{number:016x}")
    if found_all != expected:
        raise corrupt(f"(version, kind, index, digest, generation) of {what}", expected, found_all)
    return length, checksum, f"{number:016x}"


def check_chunk(header: bytes, body: memoryview, manifest: Manifest, index: int) -> None:
    """Compares a chunk with its own header and with the manifest. Raises IndexFormatError."""
    digest = manifest.entry.identity.digest
    length, checksum, _ = check_header(header, CHUNK, digest, manifest.generation, index)
    found = xxhash.xxh3_64_intdigest(body)
    if length != len(body) or checksum != found or manifest.chunks[index] != f"{found:016x}":
        expected = f"{len(body)} bytes of xxh3 {manifest.chunks[index]}"
        raise corrupt(f"chunk {index}", expected, f"{length} bytes of xxh3 {checksum:016x}, in fact {found:016x}")


def pack_record(kind: int, digest: str, generation: str, record: msgspec.Struct) -> bytes:
    """A manifest or lease as one value."""
    body = msgspec.json.encode(record)
    return value_header(kind, digest, generation, 0, body) + body


def unpack_record(kind: int, digest: str, raw: bytes, decoder: msgspec.json.Decoder[_Record]) -> _Record:
    """The other way. Raises IndexFormatError for anything that is not exactly that."""
    header, body = raw[: HEADER.size], raw[HEADER.size :]
    length, checksum, _ = check_header(header, kind, digest, None, 0)
    if length != len(body) or checksum != xxhash.xxh3_64_intdigest(body):
        found = f"{len(body)} bytes of xxh3 {xxhash.xxh3_64_hexdigest(body)}"
        raise corrupt(KINDS[kind], f"{length} bytes of xxh3 {checksum:016x}", found)
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise corrupt(KINDS[kind], f"the JSON of version {VERSION}", err) from err


def unpack_manifest(digest: str, raw: bytes) -> Manifest:
    """A manifest, its identity compared with the name it was found under. Raises IndexFormatError."""
    manifest = unpack_record(MANIFEST, digest, raw, _MANIFESTS)
    if manifest.entry.identity.digest != digest:
        raise corrupt("identity digest", digest, manifest.entry.identity.digest)
    check_header(raw[: HEADER.size], MANIFEST, digest, manifest.generation, 0)
    return manifest


class ChunkedBuffer:
    """A container in memory as the chunk values that go out, each with room for its header: no second copy.

    A ``SeekableWriter``: write the container into it, ``seal()`` it, then take each ``value(i)``.
    """

    def __init__(self, nbytes: int, chunk_nbytes: int) -> None:
        self.nbytes, self.chunk_nbytes = nbytes, chunk_nbytes
        self.count = -(-nbytes // chunk_nbytes)
        self._view = memoryview(mmap.mmap(-1, nbytes + self.count * HEADER.size))
        self._at = 0

    def seek(self, offset: int, /) -> int:
        self._at = offset
        return offset

    def write(self, data: memoryview, /) -> int:
        """Takes what fits into the chunk where the position is."""
        index, within = divmod(self._at, self.chunk_nbytes)
        part = data[: self.chunk_nbytes - within]
        start = self._at + (index + 1) * HEADER.size
        copy_bytes(self._view[start : start + len(part)], part)
        self._at += len(part)
        return len(part)

    def value(self, index: int) -> memoryview:
        """Header and body of one chunk."""
        size = HEADER.size + self.chunk_nbytes
        return self._view[index * size : (index + 1) * size]

    def seal(self, digest: str, generation: str) -> list[str]:
        """Fills the headers in; returns the checksum of each body, 16 hex digits."""
        sums = []
        for index in range(self.count):
            value = self.value(index)
            header = value_header(CHUNK, digest, generation, index, value[HEADER.size :])
            value[: HEADER.size] = header
            sums.append(f"{HEADER.unpack(header)[7]:016x}")
        return sums


def copy_bytes(out: memoryview, data: memoryview | bytes) -> None:
    """``out[:] = data`` without the interpreter lock: chunks are large, and copied by several threads."""
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))


def check_chunk_nbytes(chunk_nbytes: int) -> int:
    """Raises ValueError for what is not a positive multiple of 4 KiB."""
    if chunk_nbytes <= 0 or aligned(chunk_nbytes) != chunk_nbytes:
        raise ValueError(f"chunk_nbytes: expected a positive multiple of {ALIGN}, found {chunk_nbytes}")
    return chunk_nbytes
