"""Round trips, golden bytes, slices, what a writer refuses. And bytes from outside: damaged, cut, foreign, newer, or
made to hurt. An error with a name, never a wrong value.
"""

from __future__ import annotations

import io
import itertools
import json
import resource
import struct
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from prefix_index import (
    DTYPES,
    ArrayKey,
    BuildInfo,
    IndexCorrupt,
    IndexFile,
    IndexForeign,
    IndexFormatError,
    IndexMismatch,
    IndexNotFound,
    IndexPayload,
    IndexTooNew,
    IndexWriter,
    InvalidPayload,
    LazyArray,
    Retention,
    StoreClosed,
)
from prefix_index.format import ALIGN, PRELUDE, ArrayRecord, aligned, encode_footer, sealed, table_problem
from tests.prefix_index.samples import sample_identity, sample_model, sample_payload
from tests.prefix_index.small_stores import dump, in_memory

KEYS = st.builds(
    ArrayKey, st.from_regex(r"[a-z][a-z0-9_.]{0,5}", fullmatch=True), st.integers(-1, 5), st.integers(-1, 3)
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False,
    allow_infinity=False) | st.text(st.characters(codec="utf-8"), max_size=5), lambda inner: st.lists(inner,
    max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@st.composite
def payloads(draw: st.DrawFn) -> IndexPayload:
    arrays, dtypes = {}, {}
    for key in draw(st.lists(KEYS, unique=True, max_size=6)):
        dtypes[key] = draw(st.sampled_from(sorted(DTYPES)))
        shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=40)
        shape = draw(shapes.filter(lambda s: np.prod(s) < 5000))
        raw = np.random.default_rng(draw(st.integers(0, 2**32))).integers
        stored = DTYPES[dtypes[key]]
        array = raw(0, 256, int(np.prod(shape)) * stored.itemsize, dtype=np.uint8).view(stored).reshape(shape)
        arrays[key] = array.T if draw(st.booleans()) else array
    objects = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), JSON, max_size=4)
    seconds = st.floats(0, 1e12)
    return IndexPayload(
        identity=sample_identity(extra_key=draw(st.text(max_size=3))),
        arrays=arrays,
        dtypes=dtypes,
        spec=draw(objects),
        stats=draw(objects),
        info=BuildInfo(created=draw(seconds), build_seconds=draw(seconds)),
    )


def assert_holds(index: IndexFile, payload: IndexPayload) -> None:
    assert index.identity == payload.identity
    assert index.info == payload.info
    assert index.spec == payload.spec
    assert index.stats == payload.stats
    assert set(index.keys) == set(payload.arrays)
    for key, array in payload.arrays.items():
        assert isinstance(array, np.ndarray)
        got = index.array(*key)
        assert got.shape == array.shape
        assert got.tobytes() == array.tobytes()
        assert index.record(key).dtype == payload.dtypes.get(key, array.dtype.name)


@given(payloads())
def test_round_trip(payload: IndexPayload) -> None:
    raw = dump(payload)
    assert len(raw) % 4096 == 0
    index = in_memory(raw)
    assert_holds(index, payload)
    index.verify(threads=2)
    assert dump(payload) == raw


def test_a_released_file_is_still_read_and_written(tiny_payload: IndexPayload, fixture_file: Path) -> None:
    with IndexFile.open(fixture_file, expected=sample_identity()) as index:
        assert_holds(index, tiny_payload)
        assert dump(tiny_payload) == fixture_file.read_bytes()
        assert index.keys == (
            ArrayKey("empty"), ArrayKey("csa.ids", 0, 1), ArrayKey("csa.scores", 0, 1), ArrayKey("blocks", 1,
            0)
        )  # fmt: skip


def test_arrays_outlive_the_file(fixture_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(fixture_file.read_bytes())
    with IndexFile.open(path) as index:
        ids = index.array("csa.ids", 0, 1)
    path.unlink()
    assert ids.sum() == 15
    with pytest.raises(StoreClosed, match=r"index file: expected open, found closed; get it from the store"):
        index.array("csa.scores", 0, 1)


def test_what_is_not_there_is_named(fixture_file: Path, tmp_path: Path) -> None:
    message = r"array: expected \('csa.ids', 5, 0\), found no such array"
    with IndexFile.open(fixture_file) as index, pytest.raises(IndexNotFound, match=message):
        index.array("csa.ids", 5, 0)
    wanted = sample_identity(model=sample_model(kv_dtype="float32"))
    with pytest.raises(IndexMismatch, match=r"v1.pfxindex: model.kv_dtype: expected float32, found bfloat16"):
        IndexFile.open(fixture_file, expected=wanted)
    with pytest.raises(IndexNotFound, match="nothing: index: expected a file, found none"):
        IndexFile.open(tmp_path / "nothing")
    with pytest.raises(IndexForeign, match="expected a regular file, found a folder"):
        IndexFile.open(tmp_path)


def test_lazy_arrays_are_made_one_at_a_time() -> None:
    nbytes = 8 << 20
    keys = [ArrayKey("kv", layer) for layer in range(8)]
    lazy = {k: LazyArray("uint8", (nbytes,), partial(np.full, nbytes, k.layer, np.uint8)) for k in keys}

    class Sink:
        def seek(self, offset: int, /) -> object:
            return None

        def write(self, data: memoryview, /) -> int:
            return min(len(data), 1 << 20)

    tracemalloc.start()
    try:
        IndexWriter(IndexPayload(sample_identity(), lazy)).write(Sink())
        assert tracemalloc.get_traced_memory()[1] < 2.5 * nbytes
    finally:
        tracemalloc.stop()


def test_a_file_and_a_buffer_get_the_same_bytes(tmp_path: Path) -> None:
    """To files, long arrays go in parts, and the kernel is told to begin writing them; nothing of that shows."""
    sizes = [0, 1, 65_536, 65_537, (8 << 20) - 4096, (8 << 20) + 1, 20_000_000, 5]
    make = np.random.default_rng(0).integers
    arrays = {ArrayKey("a", i): make(0, 256, n, np.uint8) for i, n in enumerate(sizes)}
    payload = IndexPayload(sample_identity(), arrays, info=BuildInfo(created=1.0))
    path = tmp_path / "x"
    with io.FileIO(path, "wb") as out:
        IndexWriter(payload).write(out)
    assert path.read_bytes() == dump(payload)


A = ArrayKey("a")
ONE = {A: np.zeros(3, np.uint8)}
OF_VERSION_2 = msgspec.structs.replace(sample_identity(), format_version=2)
DEEP: list[Any] = reduce(lambda inner, _: [inner], range(10_000), [])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"arrays": {A: np.zeros(3, bool)}}, r"dtype of \('a', -1, -1\): expected one of .*, found bool"),
        ({"arrays": {A: np.zeros(3, complex)}}, "found complex128"),
        ({"arrays": ONE, "dtypes": {A: "bfloat16"}}, r"expected uint16 \(3,\) for bfloat16, found uint8"),
        ({"arrays": ONE, "dtypes": {ArrayKey("b"): "int8"}}, "dtypes: expected keys of arrays only"),
        ({"arrays": {ArrayKey("../a"): ONE[A]}}, "array name: expected"),
        ({"arrays": {ArrayKey("a", -2): ONE[A]}}, "address of array a"),
        ({"arrays": {ArrayKey("a", 1 << 16): ONE[A]}}, "address of array a"),
        ({"arrays": {A: np.zeros((1,) * 9, np.uint8)}}, "at most 8 sizes"),
        ({"arrays": {A: LazyArray("uint8", (-1,), lambda: ONE[A])}}, "shape of"),
        ({"arrays": {A: LazyArray("uint8", (2,), lambda: ONE[A])}}, r"expected uint8 \(2,\)"),
        ({"spec": {"x": float("nan")}}, "spec: expected a JSON value .*, found .*nan"),
        ({"spec": {"x": [b"raw"]}}, "spec: expected a JSON value"),
        ({"spec": {"x": DEEP}}, "spec: expected a JSON value"),
        ({"stats": {"x": {1: 2}}}, "stats: expected a JSON value .*, found .*1: 2"),
        ({"stats": {"\ud800": 1}}, "stats"),
        ({"stats": {"a": [{"b": "\ud800"}]}}, "stats"),
        ({"stats": {"a": np.float64(1.5)}}, "stats"),
        ({"stats": {"a": type("F", (float,), {})(1.0)}}, "stats"),
        ({"stats": {"a": [{"b": type("I", (int,), {})(1)}]}}, "stats"),
        ({"identity": OF_VERSION_2}, r"identity.format_version: expected 1, found 2"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_writing(parts: dict[str, Any], message: str) -> None:
    out = io.BytesIO()
    with pytest.raises(InvalidPayload, match=message):
        IndexWriter(IndexPayload(**{"identity": sample_identity(), "arrays": {}, **parts})).write(out)
    assert not out.getvalue().startswith(b"\x89PFX")


def test_oversized_spec_is_refused() -> None:
    with pytest.raises(InvalidPayload, match="header table bytes: expected at most"):
        IndexWriter(IndexPayload(sample_identity(), {}, spec={"x": "y" * (65 << 20)})).write(io.BytesIO())


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, "1", False, True, 10**300, 1e13, None])
def test_impossible_times_are_refused(seconds: Any) -> None:
    for name in ("created", "build_seconds"):
        with pytest.raises(ValueError, match=rf"{name}: expected finite seconds, 0 to 1e\+12, found"):
            BuildInfo(**{name: seconds})


@pytest.mark.parametrize("seconds", [1_700_000_000, np.float64(1.5), 0, 1e12])
def test_times_are_floats_so_that_an_index_written_again_has_the_same_bytes(seconds: Any) -> None:
    payload = replace(sample_payload(), info=BuildInfo(created=seconds, build_seconds=seconds))
    assert type(payload.info.created) is type(payload.info.build_seconds) is float
    raw = dump(payload)
    assert dump(in_memory(raw).payload()) == raw


@pytest.mark.parametrize("name", ["kv_dtype", "config_digest"])
def test_model_text_is_plain_text(name: str) -> None:
    with pytest.raises(ValueError, match=rf"model.{name}: expected 1 to 256 printable characters"):
        sample_model(**{name: type("S", (str,), {})("q")})


def test_retentions_are_plain_values() -> None:
    assert type(Retention(expires=5).expires) is float
    for bad in (True, 10**400, float("nan"), -1, "1"):
        with pytest.raises(ValueError, match="expires: expected finite seconds, 0 or more"):
            Retention(expires=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pinned: expected True or False, found 1"):
        Retention(pinned=1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def raw(tiny_payload: IndexPayload) -> bytes:
    return dump(tiny_payload)


def survivors(raw: bytes, bits: Iterable[int], use: Callable[[bytes], object]) -> list[int]:
    """Those of the single-bit flips after which `use` raises nothing."""
    data = bytearray(raw)
    undetected = []
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
        try:
            use(bytes(data))
            undetected.append(bit)
        except IndexFormatError:
            pass
        data[bit // 8] ^= 1 << bit % 8
    assert bytes(data) == raw
    return undetected


def test_every_bit_of_header_and_footer_is_detected_by_opening(raw: bytes) -> None:
    """Prelude, entry, table, the padding behind them, and the footer with its zeros: 65,536 flips."""
    entry_nbytes, table_nbytes = struct.unpack_from("<II", raw, 12)
    header = aligned(PRELUDE.size + entry_nbytes + table_nbytes)
    bits = [*range(header * 8), *range((len(raw) - ALIGN) * 8, len(raw) * 8)]
    assert len(bits) == 65_536
    assert survivors(raw, bits, in_memory) == []


def test_every_bit_of_arrays_and_every_byte_of_their_padding_is_detected(raw: bytes) -> None:
    index = in_memory(raw)
    start = len(raw) - ALIGN - sum(aligned(index.record(k).nbytes) for k in index.keys)
    bits: list[int] = []
    for record in map(index.record, index.keys):
        first = start + record.offset
        bits += range(first * 8, (first + record.nbytes) * 8)
        padding = range(first + record.nbytes, first + aligned(record.nbytes))
        bits += [byte * 8 + byte % 8 for byte in padding]
    assert len(bits) > 12_000
    assert survivors(raw, bits, lambda data: in_memory(data).verify()) == []


def test_every_other_length_is_detected(raw: bytes) -> None:
    for length in range(len(raw)):
        with pytest.raises(IndexCorrupt, match="file length"):
            in_memory(raw[:length])
    for extra in (1, 4095, 4096, 8192):
        with pytest.raises(IndexCorrupt, match="file length"):
            in_memory(raw + bytes(extra))
    with pytest.raises(IndexCorrupt, match="footer: expected"):  # a write that was never finished
        in_memory(raw[:-4096] + bytes(4096))


@pytest.mark.parametrize(
    "data",
    [b"PK\x03\x04" + bytes(100), b"\x93NUMPY" + bytes(9000), bytes(8192), b"{}", b"\x89PNG\r\n\x1a\n" + bytes(99)],
    ids=["zip", "npy", "zeros", "json", "png"],
)
def test_foreign_files_are_called_foreign(data: bytes) -> None:
    with pytest.raises(IndexForeign, match=r"file type: expected a prefix index .*move it elsewhere"):
        in_memory(data)


def test_newer_version_is_not_called_corrupt(raw: bytes, tmp_path: Path) -> None:
    data = reprelude(raw, version=7)
    with pytest.raises(IndexTooNew, match=r"at most 1, found 7 \(written by a newer version\); upgrade"):
        in_memory(data)
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(IndexTooNew, match="x: format version of file"):
        IndexFile.open(tmp_path / "x")
    with pytest.raises(IndexCorrupt, match="format version of file: expected 1, found 0"):
        in_memory(reprelude(raw, version=0))
    flipped = bytearray(raw)
    flipped[8] ^= 2
    with pytest.raises(IndexCorrupt, match="prelude checksum"):
        in_memory(bytes(flipped))


def reprelude(raw: bytes, **changes: int) -> bytes:
    """The container with other prelude fields and right prelude and footer checksums."""
    names = ["magic", "version", "entry_nbytes", "table_nbytes", "zero"]
    names += ["total", "entry_xxh3", "table_xxh3", "zero2", "checksum"]
    fields: dict[str, Any] = {**dict(zip(names, PRELUDE.unpack(raw[: PRELUDE.size]), strict=True)), **changes}
    head = sealed(PRELUDE.pack(*fields.values()))
    return head + raw[PRELUDE.size : -ALIGN] + encode_footer(int.from_bytes(head[-8:], "little"), fields["total"])


def rebuild(entry: bytes, table: bytes, data: bytes) -> bytes:
    """A container around any two sections, with every checksum of the frame right: what an attacker would send."""
    header_nbytes = PRELUDE.size + len(entry) + len(table)
    total = aligned(header_nbytes) + len(data) + ALIGN
    prelude = PRELUDE.pack(b"\x89PFXIDX\n", 1, 0, 0, 0, 0, 0, 0, 0, 0)
    body = (prelude + entry + table).ljust(aligned(header_nbytes), b"\0") + data + bytes(ALIGN)
    return reprelude(
        body,
        entry_nbytes=len(entry),
        table_nbytes=len(table),
        total=total,
        entry_xxh3=xxhash.xxh3_64_intdigest(entry),
        table_xxh3=xxhash.xxh3_64_intdigest(table),
    )


def sections(raw: bytes) -> tuple[Any, Any, bytes]:
    entry_nbytes, table_nbytes = struct.unpack_from("<II", raw, 12)
    entry = raw[PRELUDE.size : PRELUDE.size + entry_nbytes]
    table = raw[PRELUDE.size + entry_nbytes : PRELUDE.size + entry_nbytes + table_nbytes]
    data = raw[aligned(PRELUDE.size + entry_nbytes + table_nbytes) : -ALIGN]
    return msgspec.json.decode(entry), msgspec.json.decode(table), data


def test_impossible_preludes(raw: bytes) -> None:
    for field in ("zero", "zero2"):
        with pytest.raises(IndexCorrupt, match="reserved prelude fields"):
            in_memory(reprelude(raw, **{field: 1}))
    for field, nbytes in itertools.product(("entry_nbytes", "table_nbytes"), (0, 1, 65536, 2**31, 2**32 - 1)):
        with pytest.raises(IndexCorrupt):
            in_memory(reprelude(raw, **{field: nbytes}))


NAME, LAYER, KV_HEAD, DTYPE, SHAPE, OFFSET, NBYTES, XXH3 = range(8)


def put(row: int, field: int, value: object) -> Callable[[list[list[Any]]], object]:
    return lambda rows: rows[row].__setitem__(field, value)


HOSTILE_ROWS: dict[str, Callable[[list[list[Any]]], object]] = {
    "negative offset": put(1, OFFSET, -4096),
    "offset past the end": put(1, OFFSET, 2**62),
    "unaligned offset": put(2, OFFSET, 4100),
    "overlap": put(2, OFFSET, 0),
    "hole": lambda rows: rows.pop(2),
    "missing last": lambda rows: rows.pop(),
    "more data than there is": lambda rows: rows.append(["z", 0, 0, "uint8", [1], 12288, 1, "0" * 16]),
    "huge dimension": put(1, SHAPE, [2**62, 2**62]),
    "product that wraps in 64 bits": put(1, SHAPE, [2**32, 2**32, 6]),
    "negative dimensions": put(1, SHAPE, [-2, -3]),
    "zero behind sizes that no array can have": put(0, SHAPE, [2**46, 2**46, 0]),
    "zero times huge": put(0, SHAPE, [0, 2**60]),
    "too many dimensions": put(1, SHAPE, [6] + [1] * 1000),
    "bytes other than shape": put(1, NBYTES, 20),
    "huge bytes": put(1, NBYTES, 2**63 - 1),
    "duplicate": lambda rows: rows[2].__setitem__(slice(0, 3), rows[1][:3]),
    "unknown dtype": put(1, DTYPE, "object"),
    "path as name": put(1, NAME, "../../etc"),
    "no name": put(1, NAME, ""),
    "negative layer": put(1, LAYER, -2),
    "huge head": put(1, KV_HEAD, 2**40),
    "checksum not hex": put(1, XXH3, "z" * 16),
    "checksum not hex in the middle": put(1, XXH3, "0" * 7 + "g" + "0" * 8),
    "checksum in upper case": put(1, XXH3, "A" * 16),
    "checksum of other digits": put(1, XXH3, "\uff11" * 16),
    "long checksum": put(1, XXH3, "0" * 17),
    "checksum with a newline": put(1, XXH3, "0" * 15 + "\n"),
    "short row": lambda rows: rows[1].pop(),
    "long row": lambda rows: rows[1].append(0),
    "float offset": put(1, OFFSET, 0.5),
    "integer of a thousand digits": put(1, SHAPE, [10**1000]),
    "string for shape": put(1, SHAPE, "6"),
}


@pytest.mark.parametrize("name", HOSTILE_ROWS)
def test_hostile_rows_with_right_checksums(raw: bytes, name: str) -> None:
    entry, table, data = sections(raw)
    assert in_memory(rebuild(msgspec.json.encode(entry), msgspec.json.encode(table), data))
    HOSTILE_ROWS[name](table["arrays"])
    hostile = rebuild(msgspec.json.encode(entry), json.dumps(table).encode(), data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(IndexCorrupt):
        in_memory(hostile)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def rows_of(count: int) -> list[ArrayRecord]:
    """A right table of many arrays, two names and two shapes in turn."""
    forms = [("csa.ids", "int32", (3, 4), 48), ("csa.scores", "uint16", (5000,), 10_000)]
    rows, offset = [], 0
    for i in range(count):
        name, dtype, shape, nbytes = forms[i % 2]
        rows.append(ArrayRecord(name, i // 16, i // 2 % 8, dtype, shape, offset, nbytes, f"{i:016x}"))
        offset += aligned(nbytes)
    return rows


LATE_PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "array name": ({"name": "csa.Ids"}, "array name"),
    "address": ({"layer": 1 << 16}, "address of array csa.ids"),
    "known shape, other bytes": ({"nbytes": 49}, "bytes of"),
    "known shape, other dtype": ({"dtype": "int64"}, "bytes of"),
    "negative shape of the same product": ({"shape": (-3, -4)}, "shape of"),
    "unknown dtype": ({"dtype": "bool"}, "dtype of"),
    "offset": ({"offset": 4096}, "offset of"),
    "checksum": ({"xxh3": "0" * 15}, "checksum of"),
    "twice": ({"layer": 0, "kv_head": 0}, "array ('csa.ids', 0, 0)"),
}


@pytest.mark.parametrize("name", LATE_PROBLEMS)
def test_a_bad_row_among_good_ones_of_its_name_and_shape(name: str) -> None:
    at, rows = 50, rows_of(100)
    total = rows[-1].offset + aligned(rows[-1].nbytes)
    assert table_problem(rows, total) is None
    changes, what = LATE_PROBLEMS[name]
    rows[at] = msgspec.structs.replace(rows[at], **changes)
    problem = table_problem(rows, total)
    assert problem is not None
    assert problem[0].startswith(what)


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"spec":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b'{"spec":{},"stats":{},"arrays":[],"more":1}',
        b'{"spec":{"x":' + b"9" * 100_000 + b'},"stats":{},"arrays":[]}',
        b'{"spec":{},"stats":{},"arrays":[' + b"[]," * 100_000 + b"[]]}",
    ],
    ids=["empty", "null", "list", "not utf-8", "open", "deep", "unknown field", "long number", "empty rows"],
)
def test_hostile_tables(raw: bytes, table: bytes) -> None:
    entry, _, _ = sections(raw)
    with pytest.raises(IndexCorrupt):
        in_memory(rebuild(msgspec.json.encode(entry), table, b""))


def test_hostile_entries(raw: bytes) -> None:
    entry, table, data = sections(raw)
    changes: list[Callable[[Any], object]] = [
        lambda e: e["identity"].__setitem__("num_tokens", 33),
        lambda e: e["identity"].__setitem__("namespace", "../" * 20),
        lambda e: e["identity"].__setitem__("format_version", 2),
        lambda e: e["identity"].__setitem__("salt", "s"),
        lambda e: e["identity"]["model"].__setitem__("head_dim", -1),
        lambda e: e["info"].__setitem__("created", None),
        lambda e: e["info"].__setitem__("build_seconds", -1),
        lambda e: e.pop("info"),
    ]
    for change in changes:
        copy = msgspec.json.decode(msgspec.json.encode(entry))
        change(copy)
        with pytest.raises(IndexCorrupt, match=r"header entry|identity.format_version"):
            in_memory(rebuild(msgspec.json.encode(copy), msgspec.json.encode(table), data))


@given(st.binary(max_size=300))
def test_random_sections_never_crash(raw: bytes, table: bytes) -> None:
    entry, _, data = sections(raw)
    with pytest.raises(IndexFormatError):
        in_memory(rebuild(msgspec.json.encode(entry), table, data))
    with pytest.raises(IndexFormatError):
        in_memory(rebuild(table, msgspec.json.encode({}), data))
