"""Round trips, golden bytes, slices, and what a writer refuses."""

from __future__ import annotations

import io
import tracemalloc
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from prefix_index import (
    DTYPES,
    ArrayKey,
    BuildInfo,
    IndexFile,
    IndexForeign,
    IndexMismatch,
    IndexNotFound,
    IndexPayload,
    IndexWriter,
    InvalidPayload,
    LazyArray,
    Retention,
    StoreClosed,
)
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


@pytest.mark.parametrize(
    "value",
    ["\ud800", np.float64(1.5), type("F", (float,), {})(1.0), type("I", (int,), {})(1)],
    ids=repr,
)
def test_what_json_cannot_say_is_refused(value: Any) -> None:
    for stats in ({"a": value}, {"a": [{"b": value}]}, *([{value: 1}] if isinstance(value, str) else [])):
        with pytest.raises(InvalidPayload, match="stats"):
            IndexWriter(replace(sample_payload(), stats=stats)).write(io.BytesIO())


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
