"""Indexes whose KV heads are built by several ranks: the files in between, and the whole against one rank's index."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prefix_index import ArrayKey
from sglang_ext.prefill import background_build, parts, shared_builds
from sglang_ext.prefill.builds import PrefillBuilds
from sglang_ext.prefill.parts import KEPT_S, MAX_KEPT, Parts
from sglang_ext.prefill.recorder import Admission
from sglang_ext.prefill.shared_builds import SharedBuilds
from sglang_ext.ranks import Ranks
from tests.serving.admitting import DIM, GQA, KV_HEADS, LAYERS, NAMESPACE, PROMPT, Model, eventually, hashes
from tests.serving.meeting import Meeting

ARRAYS = {ArrayKey("m.a", 0, 1): np.arange(6, dtype=np.int16).reshape(2, 3), ArrayKey("m.b", 2, 1): np.ones(0)}


def test_rank_0_takes_parts_once_all_ranks_have_left_theirs(tmp_path: Path) -> None:
    """Their folder is made again where a cleaner took it."""
    first, second, third = (Parts(rank, 3, tmp_path / "parts") for rank in range(3))
    assert first.taken("d") is None
    second.leave("d", ARRAYS)
    assert first.taken("d") is None
    third.leave("d", {ArrayKey("m.a", 0, 2): np.zeros(3)})
    third.leave("other", ARRAYS)
    found = first.taken("d")
    assert found.keys() == {*ARRAYS, ArrayKey("m.a", 0, 2)}
    for key, array in ARRAYS.items():
        assert (found[key].dtype, found[key].tolist()) == (array.dtype, array.tolist())
    assert first.taken("d") is None, "taken"
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["other.2.npz"]


def test_a_part_that_cannot_be_read_or_written_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "d.1.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ValueError, match=r"d\.1\.npz"):
        Parts(0, 2, tmp_path).taken("d")
    assert Parts(0, 2, tmp_path).taken("d") is None, "the next part is another one"
    other = {ArrayKey("m.a", 0, 0): np.zeros(3), ArrayKey("m.b", 0, 0): np.array(["x"], dtype=object)}
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        Parts(1, 2, tmp_path / "file").leave("d", ARRAYS)
    (tmp_path / "file").unlink()
    Parts(1, 2, tmp_path).leave("d", other)
    with pytest.raises(ValueError, match=r"d\.1\.npz"):
        Parts(0, 2, tmp_path).taken("d")
    assert list(tmp_path.iterdir()) == []


def test_parts_that_nobody_takes_are_removed(tmp_path: Path) -> None:
    rank, now = Parts(1, 2, tmp_path), time.time()
    for number in range(MAX_KEPT + 3):
        rank.leave(f"{number:02}", ARRAYS)
        os.utime(tmp_path / f"{number:02}.1.npz", (now, now - 1000 + number))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{n:02}.1.npz" for n in range(3, MAX_KEPT + 3)]
    for number in range(3, MAX_KEPT + 1):
        os.utime(tmp_path / f"{number:02}.1.npz", (now, now - KEPT_S - 60))
    rank.leave("last", ARRAYS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["33.1.npz", "34.1.npz", "last.1.npz"]
    assert rank.has_left("last")
    assert not rank.has_left("03")
    assert not Parts(0, 2, tmp_path).has_left("last")


def test_ranks_agree_on_a_folder_and_what_killed_servers_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, other = tmp_path / "sglang-ext-ranks-left", tmp_path / "another"
    for folder in (left, other):
        folder.mkdir()
        (folder / "x").write_text("x")
    alive = Meeting(2).run(Parts.of_server)[0]._folder
    fresh = tmp_path / "sglang-ext-ranks-fresh"
    fresh.mkdir()
    for folder in (left, other, alive):
        os.utime(folder, (time.time() - 1000,) * 2)
    made = Meeting(2).run(Parts.of_server)
    assert made[0]._folder == made[1]._folder
    assert [(one.rank, one.size) for one in made] == [(0, 2), (1, 2)]
    assert sorted(tmp_path.iterdir()) == sorted([other, alive, fresh, made[0]._folder])
    assert Parts.of_server(SimpleNamespace(rank=0, size=1)) is None


def test_no_folder_stops_the_start_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.tempfile, "mkdtemp", lambda **_: os.stat("/nowhere"))

    def refused(ranks: Any) -> None:
        with pytest.raises(RuntimeError, match=r"got: FileNotFoundError: .*/nowhere.* another folder with TMPDIR"):
            Parts.of_server(ranks)

    Meeting(2).run(refused)


class Rank:
    """One rank's builds on its own KV heads of the same keys and queries."""

    def __init__(self, bench: Any, number: int, size: int, builds: Callable[..., Any], *of_ranks: Any) -> None:
        width, gen = KV_HEADS // size, torch.Generator().manual_seed(0)
        heads = slice(number * width, (number + 1) * width)
        self.queries = torch.randn(LAYERS, 256, KV_HEADS, GQA, DIM, generator=gen)[:, :, heads]
        self.store, self.view = bench.store, Model(bench.model, heads)
        self.builds = builds(bench.store, bench.config, self.view, bench.model, None, *of_ranks)

    def prefill(self, rid: str, prompt: list[int], cached: int) -> None:
        self.builds.admit(Admission(rid, prompt, NAMESPACE, None, hashes=hashes(prompt)))
        chunks = self.builds.begin_prefill([rid], [cached], [len(prompt) - cached])
        for layer in range(LAYERS):
            q = self.queries[layer, cached : len(prompt)].reshape(len(prompt) - cached, -1)
            self.builds.recorder.record(chunks, layer, q, DIM**-0.5)
        self.builds.prefilled(chunks)

    def decode_until(self, rid: str, done: Callable[[dict[str, Any]], bool]) -> bool:
        def step() -> bool:
            self.builds.decoding([rid], torch.tensor([0]))
            self.builds.settle()
            return done(self.builds.snapshot())

        return eventually(step)


@pytest.fixture
def start(make_bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Rank]]]:
    monkeypatch.setattr(background_build, "PARTS_S", 0.01)
    made: list[Rank] = []

    def make(size: int, left: bool = False) -> list[Rank]:
        bench = make_bench(
            build="shared", method="token_index", build_align=16, build_share=1.0,
            build_report=str(tmp_path / f"report-{size}.jsonl"),
        )  # fmt: skip
        folder = tmp_path / f"parts-{size}"
        folder.mkdir()
        of_server = [None] if size == 1 else [Parts(rank, size, folder) for rank in range(size)]
        ranks = [Rank(bench, number, size, SharedBuilds, part) for number, part in enumerate(of_server)]
        for rank in ranks:
            rank.prefill("a", [*PROMPT, *range(100, 118)], 0)
            rank.prefill("b", [*PROMPT, *range(200, 218)], 64)
            rank.prefill("c", [*PROMPT, *range(300, 318)], 64)
        made.extend(ranks)
        if left:
            assert ranks[1].decode_until("c", lambda state: state["left"] == 1)
        return ranks

    yield make
    for rank in made:
        rank.builds.close()


def _arrays(rank: Any) -> dict[Any, Any]:
    (entry,) = rank.store.list()
    with rank.store.get(entry.identity) as file:
        return dict(file.read_many(file.keys))


def _check_equal(found: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        assert np.array_equal(found[key], array), key


def _built(state: dict[str, Any]) -> bool:
    return int(state["built"]) == 1


def test_two_ranks_build_the_very_index_that_one_builds(start: Any, tmp_path: Path) -> None:
    (alone,) = start(1)
    assert alone.decode_until("c", _built)
    first, second = start(2)
    assert first.decode_until("c", lambda state: state["open"] and state["open"][0]["pieces"] == LAYERS)
    time.sleep(0.1)
    assert first.builds.snapshot()["built"] == 0, "the other rank has given nothing yet"
    assert second.decode_until("c", lambda state: state["left"] == 1)
    assert first.decode_until("c", _built)
    assert first.builds.snapshot()["open"] == second.builds.snapshot()["open"] == []
    _check_equal(_arrays(first), _arrays(alone))
    assert len((tmp_path / "report-2.jsonl").read_text().splitlines()) == 1, "rank 0 reports"
    assert list((tmp_path / "parts-2").iterdir()) == []


def test_a_part_that_rank_0_never_stored_has_not_left_the_store(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its build failed, for instance: nobody need enlarge the store. The part is built again all the same."""
    monkeypatch.setattr(shared_builds, "IDLE_S", 0.0)
    _, second = start(2, left=True)
    second.prefill("d", [*PROMPT, *range(400, 418)], 64)
    second.prefill("e", [*PROMPT, *range(500, 518)], 64)
    assert "left the store" not in caplog.text
    assert second.builds.snapshot()["evicted"] == 0
    assert second.builds._hits.evicted == 1


def test_a_part_that_rank_0_took_in_vain_is_left_again_as_soon_as_an_operator_asks(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was full, say, and has room now."""
    first, second = start(2, left=True)
    with monkeypatch.context() as full:
        full.setattr(first.builds._factory, "keep", lambda *_: 1 / 0)
        assert first.decode_until("c", lambda state: state["failed"] == 1)
    assert list((tmp_path / "parts-2").iterdir()) == []
    namespace = next(iter(first.builds._requests.values())).namespace
    for rank in (first, second):
        assert rank.builds.ask_for(namespace, PROMPT) is None
        rank.prefill("d", [*PROMPT, *range(400, 418)], 64)
    assert second.decode_until("d", lambda state: state["left"] == 2)
    assert first.decode_until("d", _built)


def test_a_part_that_is_still_there_is_not_built_again(start: Any) -> None:
    first, second = start(2, left=True)
    second.builds._requests.clear()
    known = next(iter(second.builds._hits._known.values()))
    known.due, known.built_at = False, None  # as if its index had left the store
    second.prefill("d", [*PROMPT, *range(400, 418)], 64)
    (build,) = second.builds._builder.open
    assert second.decode_until("d", lambda state: state["left"] == 2)
    assert build.given == 1
    assert first.decode_until("c", _built)
    known.due, known.built_at = False, None
    second.prefill("e", [*PROMPT, *range(500, 518)], 64)
    (build,) = second.builds._builder.open
    assert second.decode_until("e", lambda state: not state["open"])
    assert build.given == 1, "it is in the store"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("missing", "arrays of layer 0, KV head 1: expected channels, keys_packed, keys_scale, keys_zero, got none"),
        ("foreign", "KV head: expected those of the model, got [('token_index', 0, 2)]"),
        ("content", "channels of layer 0: expected values of 0 to"),
    ],
)
def test_a_part_of_other_heads_or_of_wrong_content_is_not_stored(
    start: Any, tmp_path: Path, wrong: str, why: str
) -> None:
    """A server would refuse to load what such arrays are part of."""
    first, _ = start(2, left=True)
    (path,) = (tmp_path / "parts-2").glob("*.1.npz")
    with np.load(path) as part:
        arrays = dict(part)
    if wrong == "missing":
        arrays = {name: array for name, array in arrays.items() if not name.startswith("0/1/")}
    elif wrong == "foreign":
        arrays["0/2/token_index.channels"] = arrays["0/1/token_index.channels"]
    else:
        arrays["0/1/token_index.channels"] = np.full_like(arrays["0/1/token_index.channels"], 32767)
    np.savez(path, **arrays)
    assert first.decode_until("c", lambda state: state["failed"] == 1)
    assert list(first.store.list()) == []
    assert why in (tmp_path / "report-2.jsonl").read_text()


def test_a_part_that_never_comes_ends_the_build(start: Any, monkeypatch: Any) -> None:
    first, _ = start(2)
    assert first.decode_until("c", lambda state: state["open"] and state["open"][0]["pieces"] == LAYERS)
    monkeypatch.setattr(background_build, "IDLE_S", 0.05)
    assert first.decode_until("x", lambda state: state["failed"] == 1)
    (line,) = Path(first.builds._config.build_report or "").read_text().splitlines()
    assert '"status": "failed"' in line
    assert "rank" in line


@pytest.mark.parametrize("lacks", [None, "queries", "memory"])
def test_ranks_that_build_while_a_request_ends_store_what_one_builds_or_nothing(
    lacks: str | None, make_bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = tmp_path / "report.jsonl"
    fields = {"build": "prefill", "method": "token_index", "build_align": 16, "build_report": str(report)}
    one, two = make_bench(**fields), make_bench(**fields)

    def built(bench: Any, ranks: Any) -> None:
        rank = Rank(bench, ranks.rank, ranks.size, PrefillBuilds, ranks)
        lacking = lacks if ranks.rank else None
        rank.prefill("a", [*PROMPT, 7], 0 if lacking != "queries" else 64)
        if lacking == "memory":
            rank.view.kv = lambda layer: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory"))
        rank.builds.finish("a", 0)
        rank.builds.close()

    built(one, Ranks())
    Meeting(2).run(lambda ranks: built(two, ranks))
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert [line["status"] for line in lines] == ["built", "failed" if lacks else "built"]
    if lacks:
        assert "of all tensor-parallel ranks, some had none" in lines[1]["detail"]
        assert two.store.list() == ()
        assert two.store.lease(two.identity(PROMPT)) is not None, "it was given back"
        return
    assert lines[1]["recall"] == pytest.approx(lines[0]["recall"])
    _check_equal(_arrays(two), _arrays(one))


def test_a_rank_records_no_prompt_whose_index_is_there(
    make_bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 does not either; such samples would keep those of a new prompt away."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bench = make_bench(build="prefill", method="token_index", build_align=16)
    bench.put(PROMPT)

    def admitted(ranks: Any) -> tuple[int, int]:
        rank = Rank(bench, ranks.rank, ranks.size, PrefillBuilds, ranks)
        for rid, prompt in (("old", [*PROMPT, 7]), ("new", list(range(500, 565)))):
            rank.builds.admit(Admission(rid, prompt, NAMESPACE, None))
        found = len(rank.builds), rank.builds.recorder.num_captures
        rank.builds.close()
        return found

    assert Meeting(2).run(admitted) == [(1, 1), (1, 1)]
