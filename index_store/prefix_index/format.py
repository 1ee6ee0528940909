"""What an index belongs to, and the bytes of its file: identities, layout, and every check on bytes from outside.

``docs/index-format.md`` is the specification. Everything here is a pure function of its arguments. One index is one
container, the same bytes in a file, in memory and on another machine.
"""

from __future__ import annotations

import hashlib
import math
import re
import string
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from .errors import IndexCorrupt, IndexForeign, IndexTooNew, InvalidPayload

FORMAT_VERSION = 1
PAGE_TOKENS = 16

_NAMESPACE_TAG = b"prefix_index/namespace/1\0"
_IDENTITY_TAG = b"prefix_index/identity/1\0"
_HEX = frozenset(string.hexdigits.lower())


def namespace_digest(fields: Mapping[str, str | None]) -> str:
    """SHA-256 (64 hex digits) of everything in SGLang's ``RadixKey`` that is not tokens, by field name.

    Names and values are hashed with their lengths, in the order of the names: no two sets of fields meet. A field that
    is None is as one that does not exist, unlike an empty string. The values do not appear in the result.
    """
    h = hashlib.sha256(_NAMESPACE_TAG)
    for name, value in sorted(fields.items()):
        if value is None:
            continue
        for text in (name, value):
            raw = text.encode("utf-8", "surrogatepass")
            h.update(len(raw).to_bytes(8, "little"))
            h.update(raw)
    return h.hexdigest()


def page_hashes(token_ids: Sequence[int] | NDArray[Any], page_tokens: int = PAGE_TOKENS) -> list[bytes]:
    """Chained SHA-256 of each full page: ``digest[i] = sha256(digest[i-1] + int64_le(tokens of page i))``.

    The parent of page 0 is 32 zero bytes. ``token_ids`` [num_tokens] integers. Returns num_tokens // page_tokens
    digests of 32 bytes: digest n-1 names the first n pages. Raises InvalidPayload for anything but a flat sequence of
    int64 integers.
    """
    if page_tokens < 1:
        raise InvalidPayload("page_tokens", "1 or more", str(page_tokens), "use SGLang's page of 16 tokens")
    raw, step, sha256 = _int64_le(token_ids).view(np.uint8).data, page_tokens * 8, hashlib.sha256
    out = [bytes(32)]
    for start in range(0, len(raw) // step * step, step):
        out.append(sha256(out[-1] + raw[start : start + step]).digest())
    return out[1:]


def _int64_le(token_ids: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    try:
        tokens = np.asarray(token_ids)
    except (OverflowError, ValueError) as err:
        tokens = np.empty(0, dtype=object)
        found = str(err)
    else:
        found = f"dtype {tokens.dtype}, shape {tokens.shape}"
        if tokens.size == 0 and tokens.ndim == 1:
            return np.empty(0, dtype="<i8")
    fits = tokens.dtype.kind in "iu" and tokens.ndim == 1
    if fits and tokens.dtype == np.uint64:
        fits = bool(tokens.max() <= np.iinfo(np.int64).max)
    if not fits:
        raise InvalidPayload("token ids", "a flat sequence of int64 integers", found, "pass the prompt's ids")
    return np.ascontiguousarray(tokens, dtype="<i8")


def canonical_digest(value: Any) -> str:
    """SHA-256 (64 hex digits) of a JSON value, or a msgspec Struct, with sorted keys."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


class ModelFingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that an index was built with. Two models with equal fingerprints have the same KV.

    ``config_digest``   digest of the architecture's configuration
    ``weights_digest``  digest or immutable revision of the weights
    ``rope_digest``     digest of the RoPE settings in force (scaling included)
    ``kv_dtype``        dtype of the KV cache, as SGLang says it (``bfloat16``, ``fp8_e4m3``, ...)
    ``num_layers``, ``num_kv_heads``  of the whole model, not of one tensor-parallel rank
    ``head_dim``, ``v_head_dim``      per head of K and of V
    """

    config_digest: str
    weights_digest: str
    rope_digest: str
    kv_dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        for name in ("config_digest", "weights_digest", "rope_digest", "kv_dtype"):
            _check_text(f"model.{name}", getattr(self, name))
        for name in ("num_layers", "num_kv_heads", "head_dim", "v_head_dim"):
            _check_count(f"model.{name}", getattr(self, name))

    @property
    def kv_width(self) -> int:
        """Values in the KV cache per token and head. One head's V that is narrower than its K (MLA) is a part of K."""
        latent = self.num_kv_heads == 1 and self.v_head_dim < self.head_dim
        return self.head_dim + (0 if latent else self.v_head_dim)


class IndexIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one index is the index of. A difference in any field is a miss, never a hit.

    ``namespace``       from ``namespace_digest`` (64 hex digits)
    ``page_tokens``     tokens per hashed page (not SGLang's page size: positions are logical)
    ``num_tokens``      prefix length, a multiple of page_tokens
    ``prefix_hash``     the chained hash of the last page (64 hex digits)
    ``model``           the model
    ``profile_digest``  of the profile or build spec: what was built, and how
    """

    namespace: str
    prefix_hash: str
    num_tokens: int
    model: ModelFingerprint
    profile_digest: str
    page_tokens: int = PAGE_TOKENS
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("namespace", "prefix_hash"):
            if not is_digest(getattr(self, name)):
                raise ValueError(f"{name}: expected 64 lower-case hex digits, found {getattr(self, name)!r}")
        _check_text("profile_digest", self.profile_digest)
        for name in ("page_tokens", "num_tokens", "format_version"):
            _check_count(name, getattr(self, name))
        if self.num_tokens % self.page_tokens:
            raise ValueError(
                f"num_tokens: expected a multiple of page_tokens={self.page_tokens}, found {self.num_tokens}"
            )

    @classmethod
    def for_prefix(
        cls,
        *,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
    ) -> IndexIdentity:
        """The identity of the prefix that ends with the last of ``page_hashes`` (at least one)."""
        if not page_hashes:
            raise InvalidPayload("prefix", "at least one full page", "none", "index longer prefixes only")
        return cls(
            namespace=namespace,
            prefix_hash=page_hashes[-1].hex(),
            num_tokens=len(page_hashes) * PAGE_TOKENS,
            model=model,
            profile_digest=profile_digest,
        )

    @property
    def digest(self) -> str:
        """SHA-256 (64 hex digits) over all fields; the name of the index in every store."""
        return hashlib.sha256(_IDENTITY_TAG + msgspec.json.encode(self, order="sorted")).hexdigest()

    def mismatch(self, other: IndexIdentity) -> str | None:
        """None when equal, else the first field that differs from ``self``'s: "model.kv_dtype: expected A, found B"."""
        order = ("format_version", "namespace", "page_tokens", "num_tokens", "prefix_hash")
        return (
            _first_difference(self, other, order)
            or model_mismatch(self.model, other.model)
            or _first_difference(self, other, ("profile_digest",))
        )


def model_mismatch(expected: ModelFingerprint, found: ModelFingerprint) -> str | None:
    """None when equal, else the first model field that differs, with both values."""
    return _first_difference(expected, found, ModelFingerprint.__struct_fields__, prefix="model.")


def is_digest(text: object) -> bool:
    """Whether ``text`` is 64 lower-case hex digits: the only strings that ever become part of a path."""
    return isinstance(text, str) and len(text) == 64 and _HEX.issuperset(text)


def _first_difference(a: object, b: object, names: Sequence[str], prefix: str = "") -> str | None:
    for name in names:
        left, right = getattr(a, name), getattr(b, name)
        if left != right:
            return f"{prefix}{name}: expected {left}, found {right}"
    return None


def _check_text(name: str, value: object) -> None:
    if type(value) is not str or not 1 <= len(value) <= 256 or not value.isprintable():
        raise ValueError(f"{name}: expected 1 to 256 printable characters, found {value!r}")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value < 2**53:
        raise ValueError(f"{name}: expected a positive integer below 2**53, found {value!r}")


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
"""Dtype tag -> the little-endian numpy dtype that holds its bytes. A shape always counts these stored elements:
``bfloat16`` is held as raw 16 bits, ``int4x2`` as bytes of two 4-bit values, the first in the low half.
"""

_NAME = re.compile(r"[a-z][a-z0-9_.]{0,63}")
_REBUILD = "delete the file and build the index again"


class ArrayKey(NamedTuple):
    """Address of one array. ``layer`` or ``kv_head`` is -1 where there is none."""

    name: str
    layer: int = -1
    kv_head: int = -1


class BuildInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When it was built (since the Unix epoch), and how long that took: seconds, 0 to 1e12. Raises ValueError."""

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

    Not tracked by the garbage collector: an index may have 50,000 of them.
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
    def data_offset(self) -> int:
        return aligned(self.table_offset + self.table_nbytes)


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


def encode_sections(entry: Entry, table: Table) -> tuple[bytes, bytes]:
    """The two header sections as JSON. Their lengths do not depend on the checksums in the table."""
    if entry.identity.format_version != FORMAT_VERSION:
        raise invalid(
            "identity.format_version", FORMAT_VERSION, entry.identity.format_version, "leave the field at its default"
        )
    _check_json("spec", table.spec)
    _check_json("stats", table.stats)
    raw_entry, raw_table = msgspec.json.encode(entry), msgspec.json.encode(table)
    for what, raw, limit in (("entry", raw_entry, MAX_ENTRY_NBYTES), ("table", raw_table, MAX_TABLE_NBYTES)):
        if len(raw) > limit:
            raise invalid(f"header {what} bytes", f"at most {limit}", len(raw), "store fewer arrays or a smaller spec")
    return raw_entry, raw_table


def _check_json(what: str, value: Any) -> None:
    """Raises InvalidPayload for what would not come back as it went in: NaN, int keys, tuples, numpy's scalars."""
    expected = "a JSON value (finite floats, str keys, lists)"
    try:
        same = msgspec.json.decode(msgspec.json.encode(value)) == value
    except (TypeError, ValueError, RecursionError) as err:
        raise invalid(what, expected, err, "convert it") from err
    if not same:
        raise invalid(what, expected, value, "convert it")


def encode_prelude(raw_entry: bytes, raw_table: bytes, total_nbytes: int) -> bytes:
    """The 64 bytes before the two sections."""
    sums = xxhash.xxh3_64_intdigest(raw_entry), xxhash.xxh3_64_intdigest(raw_table)
    return sealed(PRELUDE.pack(MAGIC, FORMAT_VERSION, len(raw_entry), len(raw_table), 0, total_nbytes, *sums, 0, 0))


def encode_footer(prelude_xxh3: int, total_nbytes: int) -> bytes:
    """The last 4 KiB: zeros, then the 32 bytes that prove that the file is whole."""
    return sealed(FOOTER.pack(END_MAGIC, total_nbytes, prelude_xxh3, 0)).rjust(ALIGN, b"\0")


def sealed(raw: bytes) -> bytes:
    """The same, its last 8 bytes replaced by the xxh3 of those before."""
    return raw[:-8] + xxhash.xxh3_64_intdigest(raw[:-8]).to_bytes(8, "little")


def unsealed(raw: bytes, form: struct.Struct, magic: bytes, version: int, what: str) -> tuple[Any, ...]:
    """What ``sealed`` bytes of this form say between version and checksum. Raises IndexForeign, IndexTooNew or
    IndexCorrupt.
    """
    if raw[:8] != magic[: len(raw)]:
        raise IndexForeign(f"{what} type", f"a prefix index ({magic!r})", repr(raw[:8]), "move it elsewhere")
    if len(raw) < form.size:
        raise corrupt(f"{what} length", f"at least {form.size} bytes", len(raw))
    _, found, *fields, checksum = form.unpack(raw)
    if xxhash.xxh3_64_intdigest(raw[:-8]) != checksum:
        raise corrupt(f"prelude checksum of {what}", f"{checksum:016x}", xxh3_hex(raw[:-8]))
    if found > version:
        newer, remedy = f"{found} (written by a newer version)", "upgrade sglang-ext, or build the index again"
        raise IndexTooNew(f"format version of {what}", f"at most {version}", newer, remedy)
    if found != version:
        raise corrupt(f"format version of {what}", version, found)
    return tuple(fields)


def parse_prelude(raw: bytes, actual_nbytes: int) -> Prelude:
    """Checks the first 64 bytes of ``actual_nbytes``. Raises IndexForeign, IndexTooNew or IndexCorrupt."""
    entry_nbytes, table_nbytes, zero, total, entry_xxh3, table_xxh3, nil = unsealed(
        raw, PRELUDE, MAGIC, FORMAT_VERSION, "file"
    )
    if zero or nil:
        raise corrupt("reserved prelude fields", "zeros", "other values")
    if entry_nbytes > MAX_ENTRY_NBYTES or table_nbytes > MAX_TABLE_NBYTES:
        limits = f"at most {MAX_ENTRY_NBYTES} and {MAX_TABLE_NBYTES}"
        raise corrupt("header section bytes", limits, f"{entry_nbytes} and {table_nbytes}")
    if total != actual_nbytes:
        raise corrupt("file length", f"{total} bytes", actual_nbytes)
    prelude = Prelude(entry_nbytes, table_nbytes, total, entry_xxh3, table_xxh3, int.from_bytes(raw[-8:], "little"))
    if total % ALIGN or prelude.data_offset + ALIGN > total:
        raise corrupt("file length", f"a multiple of {ALIGN}, {prelude.data_offset + ALIGN} or more", total)
    return prelude


def check_footer(raw: bytes, prelude: Prelude) -> None:
    """Checks the last 4 KiB. Raises IndexCorrupt for a write that was never finished."""
    want = encode_footer(prelude.prelude_xxh3, prelude.total_nbytes)
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

    Rows must lie one after the other and together fill ``data_nbytes``: nothing overlaps, is outside or is hidden.
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
        if len(r.xxh3) != 16 or not _HEX.issuperset(r.xxh3):
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
