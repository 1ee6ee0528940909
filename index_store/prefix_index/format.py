"""The bytes of an index file: constants, header records, layout, and every check on bytes that came from
outside.

``docs/index-format.md`` is the specification. This module does no I/O: ``writer.py`` writes, ``reader.py``
reads. One index is one container, the same bytes in a file, in memory and on another machine.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import xxhash

from .errors import IndexCorrupt, IndexForeign, IndexTooNew, InvalidPayload
from .keys import FORMAT_VERSION, IndexIdentity

MAGIC: Final = b"\x89PFXIDX\n"
END_MAGIC: Final = b"PFXEND\r\n"
ALIGN: Final = 4096
MAX_ENTRY_NBYTES: Final = 64 << 10
MAX_TABLE_NBYTES: Final = 64 << 20
MAX_ARRAYS: Final = 1 << 18
MAX_DIMS: Final = 8
MAX_NBYTES: Final = 1 << 46
MAX_SECONDS: Final = 1e12

# magic, version, entry_nbytes, table_nbytes, 0, total_nbytes, entry_xxh3, table_xxh3, 0, xxh3 of the 56 bytes
# before
PRELUDE: Final = struct.Struct("<8sIIIIQQQQQ")
# end magic, total_nbytes, prelude_xxh3, xxh3 of the 24 bytes before
FOOTER: Final = struct.Struct("<8sQQQ")

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in ("float16", "float32", "float64")},
    **{
        f"{sign}int{bits}": np.dtype(f"{sign}int{bits}").newbyteorder("<")
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    "bfloat16": np.dtype("<u2"),
    "float8_e4m3fn": np.dtype("u1"),
    "float8_e5m2": np.dtype("u1"),
    "int4x2": np.dtype("u1"),
}
"""Dtype tag -> the little-endian numpy dtype that holds its bytes. A shape always counts these stored
elements:
``bfloat16`` is held as raw 16 bits, ``int4x2`` as bytes of two 4-bit values, the first in the low half."""

_NAME = re.compile(r"[a-z][a-z0-9_.]{0,63}")
_HEX_DIGITS = "0123456789abcdef"
_ADDRESS = attrgetter("name", "layer", "kv_head")
_REBUILD = "delete the file and build the index again"


class ArrayKey(NamedTuple):
    """Address of one array. ``layer`` or ``kv_head`` is -1 where there is none."""

    name: str
    layer: int = -1
    kv_head: int = -1


class BuildInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When the index was built (seconds since the Unix epoch) and how long that took (seconds): 0 to 1e12, int or
    float, held as a float: an int would come back as one, and give other bytes. Raises ValueError.
    """

    created: float = 0.0
    build_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("created", "build_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
                raise ValueError(f"{name}: expected finite seconds, 0 to {MAX_SECONDS:g}, found {_clip(repr(value))}")
            msgspec.structs.force_setattr(self, name, float(value))


class ArrayRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One row of the array table. ``offset`` is from the first byte of data; ``xxh3`` is 16 hex digits.

    Not tracked by the garbage collector: it cannot be part of a cycle, and an index may have 50,000 of them.
    """

    name: str
    layer: int
    kv_head: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    xxh3: str

    @property
    def key(self) -> ArrayKey:
        return ArrayKey(self.name, self.layer, self.kv_head)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First header section: all that a listing needs, so that a scan of a store reads 4 KiB a file."""

    identity: IndexIdentity
    info: BuildInfo


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Second header section: the build spec, statistics of the build, and where each array lies."""

    spec: dict[str, Any]
    stats: dict[str, Any]
    arrays: list[ArrayRecord]


# Made once, while the module is imported: msgspec works out a type at its first use, and two threads that do so at
# the same time crash the process (seen with msgspec 0.22).
_ENTRY: Final = msgspec.json.Decoder(Entry)
_TABLE: Final = msgspec.json.Decoder(Table)


class Prelude(NamedTuple):
    """The first 64 bytes, checked."""

    entry_nbytes: int
    table_nbytes: int
    total_nbytes: int
    entry_xxh3: int
    table_xxh3: int
    prelude_xxh3: int

    @property
    def table_offset(self) -> int:
        return PRELUDE.size + self.entry_nbytes

    @property
    def header_nbytes(self) -> int:
        return PRELUDE.size + self.entry_nbytes + self.table_nbytes

    @property
    def data_offset(self) -> int:
        return aligned(self.header_nbytes)


_Section = TypeVar("_Section", Entry, Table)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of 4 KiB."""
    return -(-nbytes // ALIGN) * ALIGN


def xxh3_hex(data: Any) -> str:
    """xxh3-64 of a contiguous buffer, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def corrupt(what: str, expected: object, found: object) -> IndexCorrupt:
    return IndexCorrupt(what, str(expected), _clip(str(found)), _REBUILD)


def invalid(what: str, expected: object, found: object, remedy: str) -> InvalidPayload:
    return InvalidPayload(what, str(expected), _clip(str(found)), remedy)


def _clip(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."


# ---- building a header ----


def lay_out(shapes: Iterable[tuple[ArrayKey, str, Sequence[int]]]) -> list[ArrayRecord]:
    """Places (key, dtype tag, shape) rows one after the other, 4 KiB apart; checksums are still zeros.

    Raises InvalidPayload for a key, tag or shape that the format does not allow.
    """
    records: list[ArrayRecord] = []
    offset = 0
    for key, tag, shape in shapes:
        if tag not in DTYPES:
            raise invalid(f"dtype of {tuple(key)}", f"one of {', '.join(DTYPES)}", tag, "cast it, or tag its raw bytes")
        dims = tuple(int(d) for d in shape)
        nbytes = math.prod(dims) * DTYPES[tag].itemsize
        records.append(ArrayRecord(key.name, key.layer, key.kv_head, tag, dims, offset, nbytes, "0" * 16))
        offset += aligned(nbytes)
    problem = table_problem(records, offset)
    if problem is not None:
        raise invalid(*problem, "see the limits in docs/index-format.md")
    return records


def encode_sections(entry: Entry, table: Table) -> tuple[bytes, bytes]:
    """The two header sections as JSON. Their lengths do not depend on the checksums in the table."""
    if entry.identity.format_version != FORMAT_VERSION:
        raise invalid(
            "identity.format_version", FORMAT_VERSION, entry.identity.format_version, "leave the field at its default"
        )
    for name, value in (("spec", table.spec), ("stats", table.stats)):
        check_json(value, name)
    try:
        raw_entry, raw_table = msgspec.json.encode(entry), msgspec.json.encode(table)
    except (TypeError, ValueError, RecursionError) as err:
        raise invalid("header", "what JSON can say", err, "convert it") from err
    for what, raw, limit in (("entry", raw_entry, MAX_ENTRY_NBYTES), ("table", raw_table, MAX_TABLE_NBYTES)):
        if len(raw) > limit:
            raise invalid(f"header {what} bytes", f"at most {limit}", len(raw), "store fewer arrays or a smaller spec")
    return raw_entry, raw_table


def check_json(value: Any, where: str, depth: int = 0) -> None:
    """Raises InvalidPayload for what would not come back from JSON as it went in (NaN, bytes, int keys, subclasses of
    str, int and float, numpy's scalars among them, and text that is no Unicode).
    """
    if depth > 32:
        raise invalid(where, "at most 32 levels of nesting", "more", "flatten it")
    if isinstance(value, dict):
        for name, item in value.items():
            if type(name) is not str or not _is_unicode(name):
                raise invalid(f"key in {where}", "str", repr(name), "convert the key")
            check_json(item, f"{where}.{name}", depth + 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_json(item, f"{where}[{i}]", depth + 1)
    elif not (
        isinstance(value, bool | None)
        or (type(value) is str and _is_unicode(value))
        or (type(value) is int and -(2**63) <= value < 2**63)
        or (type(value) is float and math.isfinite(value))
    ):
        raise invalid(
            where, "a JSON value (finite float, 64-bit int, str, bool, None, list, dict)", repr(value), "convert it"
        )


def _is_unicode(text: str) -> bool:
    """False for lone surrogates, which UTF-8 cannot say."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_prelude(raw_entry: bytes, raw_table: bytes, total_nbytes: int) -> bytes:
    """The 64 bytes before the two sections."""
    sums = xxhash.xxh3_64_intdigest(raw_entry), xxhash.xxh3_64_intdigest(raw_table)
    raw = PRELUDE.pack(MAGIC, FORMAT_VERSION, len(raw_entry), len(raw_table), 0, total_nbytes, *sums, 0, 0)[:-8]
    return raw + xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little")


def encode_footer(prelude: bytes, total_nbytes: int) -> bytes:
    """The last 4 KiB: zeros, then the 32 bytes that prove that the file is whole."""
    raw = FOOTER.pack(END_MAGIC, total_nbytes, int.from_bytes(prelude[-8:], "little"), 0)[:-8]
    return (raw + xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little")).rjust(ALIGN, b"\0")


# ---- checking a header ----


def parse_prelude(raw: bytes, actual_nbytes: int) -> Prelude:
    """Checks the first 64 bytes of ``actual_nbytes``. Raises IndexForeign, IndexTooNew or IndexCorrupt."""
    if raw[:8] != MAGIC[: len(raw)]:
        raise IndexForeign("file type", f"a prefix index ({MAGIC!r})", repr(raw[:8]), "move the file elsewhere")
    if len(raw) < PRELUDE.size:
        raise corrupt("file length", f"at least {PRELUDE.size} bytes", len(raw))
    _, version, entry_nbytes, table_nbytes, _, total, entry_xxh3, table_xxh3, _, checksum = PRELUDE.unpack(raw)
    if xxhash.xxh3_64_intdigest(raw[:-8]) != checksum:
        raise corrupt("prelude checksum", f"{checksum:016x}", xxhash.xxh3_64_hexdigest(raw[:-8]))
    if version > FORMAT_VERSION:
        raise IndexTooNew(
            "format version",
            f"at most {FORMAT_VERSION}",
            f"{version} (written by a newer version)",
            "upgrade sglang-ext, or build the index again with this version",
        )
    if version != FORMAT_VERSION:
        raise corrupt("format version", FORMAT_VERSION, version)
    again = PRELUDE.pack(MAGIC, version, entry_nbytes, table_nbytes, 0, total, entry_xxh3, table_xxh3, 0, checksum)
    if again != raw:
        raise corrupt("reserved prelude fields", "zeros", "other values")
    if entry_nbytes > MAX_ENTRY_NBYTES or table_nbytes > MAX_TABLE_NBYTES:
        limits = f"at most {MAX_ENTRY_NBYTES} and {MAX_TABLE_NBYTES}"
        raise corrupt("header section bytes", limits, f"{entry_nbytes} and {table_nbytes}")
    if total != actual_nbytes:
        raise corrupt("file length", f"{total} bytes", actual_nbytes)
    prelude = Prelude(entry_nbytes, table_nbytes, total, entry_xxh3, table_xxh3, checksum)
    if total % ALIGN or prelude.data_offset + ALIGN > total:
        raise corrupt("file length", f"a multiple of {ALIGN}, {prelude.data_offset + ALIGN} or more", total)
    return prelude


def check_footer(raw: bytes, prelude: Prelude) -> None:
    """Checks the last 4 KiB. Raises IndexCorrupt for a write that was never finished."""
    body = FOOTER.pack(END_MAGIC, prelude.total_nbytes, prelude.prelude_xxh3, 0)[:-8]
    want = (body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")).rjust(ALIGN, b"\0")
    if raw != want:
        raise corrupt("footer", f"{want[-32:].hex()} after zeros", raw[-32:].hex())


def parse_entry(raw: bytes, prelude: Prelude) -> Entry:
    """Checks and decodes the first header section. Raises IndexCorrupt."""
    entry = _decode(raw, prelude.entry_xxh3, _ENTRY, "entry")
    if entry.identity.format_version != FORMAT_VERSION:
        raise corrupt("identity.format_version", FORMAT_VERSION, entry.identity.format_version)
    return entry


def parse_table(raw: bytes, prelude: Prelude) -> Table:
    """Checks and decodes the second header section, each row included. Raises IndexCorrupt."""
    table = _decode(raw, prelude.table_xxh3, _TABLE, "table")
    problem = table_problem(table.arrays, prelude.total_nbytes - ALIGN - prelude.data_offset)
    if problem is not None:
        raise corrupt(*problem)
    return table


def _decode(raw: bytes, checksum: int, decoder: msgspec.json.Decoder[_Section], what: str) -> _Section:
    if xxhash.xxh3_64_intdigest(raw) != checksum:
        raise corrupt(f"header {what} checksum", f"{checksum:016x}", xxhash.xxh3_64_hexdigest(raw))
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise corrupt(f"header {what}", f"the JSON of format version {FORMAT_VERSION}", err) from err


def table_problem(records: Sequence[ArrayRecord], data_nbytes: int) -> tuple[str, object, object] | None:
    """(what, expected, found) of the first row that breaks the format, or None.

    Rows must lie one after the other, each on the next 4 KiB boundary, and together fill ``data_nbytes``:
    then nothing overlaps, nothing is outside and nothing is hidden between them.
    """
    if len(records) > MAX_ARRAYS:
        return "number of arrays", f"at most {MAX_ARRAYS}", len(records)
    # Tens of thousands of rows, few different names and shapes: each of those is checked once.
    names: set[str] = set()
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    seen: set[tuple[str, int, int]] = set()
    offset = 0
    for r in records:
        name, layer, kv_head, nbytes, form = r.name, r.layer, r.kv_head, r.nbytes, (r.dtype, r.shape)
        key = (name, layer, kv_head)
        if name not in names:
            if not _NAME.fullmatch(name):
                return "array name", _NAME.pattern, repr(name)
            names.add(name)
        if not (-1 <= layer < 1 << 16 and -1 <= kv_head < 1 << 16):
            return f"address of array {name}", "layer and kv_head of -1 to 65535", (layer, kv_head)
        if key in seen:
            return f"array {key}", "one row", "two"
        seen.add(key)
        if form not in sizes:
            problem = _form_problem(key, *form)
            if problem is not None:
                return problem
            sizes[form] = math.prod(r.shape) * DTYPES[r.dtype].itemsize
        if sizes[form] != nbytes or nbytes > MAX_NBYTES:
            return f"bytes of {key}", f"shape {r.shape} of {r.dtype}, at most {MAX_NBYTES}", nbytes
        if r.offset != offset:
            return f"offset of {key}", offset, r.offset
        if len(r.xxh3) != 16 or r.xxh3.strip(_HEX_DIGITS):
            return f"checksum of {key}", "16 hex digits", repr(r.xxh3)
        offset += -(-nbytes // ALIGN) * ALIGN
    return None if offset == data_nbytes else ("bytes of data", offset, data_nbytes)


def _form_problem(key: tuple[str, int, int], dtype: str, shape: tuple[int, ...]) -> tuple[str, object, object] | None:
    if dtype not in DTYPES:
        return f"dtype of {key}", f"one of {', '.join(DTYPES)}", dtype
    if len(shape) > MAX_DIMS or any(not 0 <= d <= MAX_NBYTES for d in shape):
        return f"shape of {key}", f"at most {MAX_DIMS} sizes of 0 or more", shape
    # A size of 0 hides the others in the product of all, but not from whoever makes the array.
    if math.prod(d or 1 for d in shape) * DTYPES[dtype].itemsize > MAX_NBYTES:
        return f"shape of {key}", f"sizes, those of 0 aside, of at most {MAX_NBYTES} bytes together", shape
    return None


def records_by_key(records: Sequence[ArrayRecord]) -> dict[ArrayKey, ArrayRecord]:
    """Address -> row, in the order of the rows."""
    return dict(zip(map(ArrayKey._make, map(_ADDRESS, records)), records, strict=True))
