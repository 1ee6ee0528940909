"""Decode steps of two ranks with decode graphs: batches as a server has them, indexes by each rank's own luck."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from sglang_ext.config import config_from_dict
from sglang_ext.decode import sparse
from sglang_ext.decode.types import StepPath
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import Attachment, Readiness, RequestTable
from sglang_ext.prefix.residency import ResidentIndex, State
from sglang_ext.ranks import Ranks
from tests.serving.admitting import Request, entered
from tests.serving.meeting import Meeting
from tests.serving.planning import LONGEST, PREFIX, blank_index, capture_all, forward_of, path_of, planner

ROWS, LAYERS = 8, 4


def _script(seed: int, joins: float) -> list[tuple[list[tuple[str, int, int]], list[str]]]:
    """Per step the batch, as (request, row of the table, tokens), and the requests that end behind it."""
    rng, live, steps = random.Random(seed), {}, []
    for step in range(120):
        free = sorted(set(range(ROWS)) - {row for row, _ in live.values()})
        for row in free:
            if rng.random() < joins:
                live[f"{step}-{row}"] = [row, rng.randint(PREFIX + 1, PREFIX + 20)]
        batch = [(rid, row, length) for rid, (row, length) in live.items()]
        gone = [rid for rid, (_, length) in live.items() if length >= LONGEST - 1 or rng.random() < 0.04]
        for rid in live:
            live[rid][1] += 1
        steps.append((batch, gone))
        live = {rid: place for rid, place in live.items() if rid not in gone}
    return steps


def _run(ranks: Ranks, seed: int, joins: float = 0.2, **fields: Any) -> list[Any]:
    own = random.Random(1000 * seed + ranks.rank)
    requests, counters = RequestTable(), Counters(LAYERS)
    config = config_from_dict({"share_prefixes": True, "min_shared_tokens": PREFIX, "min_top_k": 16, **fields})
    steps = planner(config, requests, counters, LayerPlan.default(LAYERS, 1), ROWS, 2, ranks)
    for size in (8, 4, 2, 1):
        capture_all(steps, size)

    def release(attachment: Attachment) -> None:
        attachment.index = None

    guard = steps.guard
    ready = Readiness(config, requests, counters, ranks, release, guard.records)
    held: dict[str, Request] = {}
    seen: list[Any] = []
    taken_by: list[Any] = []
    begin = steps.sparse.begin
    steps.sparse.begin = lambda plan, batch: (taken_by.append(plan), begin(plan, batch))[1]
    for batch, gone in _script(seed, joins):
        for rid, row, _ in batch:
            if rid not in held:
                found = own.random() < 0.98
                index = blank_index(LAYERS, f"{row % 2:064x}") if found else None
                held[rid] = entered(requests, Attachment(rid, None if found else "no_index", index=index))
            index = requests.of(held[rid]).index
            if index is not None and index.state is State.LOADING and own.random() < 0.5:
                index.state, index.reason = (State.READY, "") if own.random() < 0.9 else (State.FAILED, "index_memory")
        forward = forward_of(*([part[at] for part in batch] for at in range(3)))
        problem = ready.settle(forward.rids, refused=False)
        path = path_of(steps, forward, ready.usable) if batch else None
        guard.runs()
        guard._figures.output_error.fill_(own.random())  # each rank's heads have their own
        guard.ran()
        ready.took(str(path), len(batch))
        taken = taken_by[-1] if path in (StepPath.SPARSE, StepPath.KEPT) else None
        kept = None if taken is None else [*taken.reads, "own", *taken.suffix_reads]
        shown = {name: guard.records.snapshot()[name] for name in ("steps", "events", "indexes")}
        seen.append((path, kept, problem, {**ready.snapshot(), **shown}))
        for rid in gone:
            ready.forget(rid)
            steps.ended(requests.of(held[rid]).serial)
            requests.leave(held.pop(rid), finished=True)
    return seen


def _alike(seed: int, **fields: Any) -> list[Any]:
    """What two ranks saw in each step, which is the same."""
    one, two = Meeting(2).run(lambda ranks: _run(ranks, seed, **fields))
    for step, (mine, theirs) in enumerate(zip(one, two, strict=True)):
        assert mine == theirs, f"step {step}"
    return list(one)


@pytest.fixture
def selecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse step is as good as free."""
    monkeypatch.setattr(sparse, "measure_us", lambda *_: 1.0)
    monkeypatch.setattr(sparse.StepCosts, "sparse_us", lambda *_: 0.0)


class _Clock:
    """Of attention and of a selection, behind few tokens and behind more; another time for each rank and size."""

    RANGES = ((2.0, 6.0), (0.5, 3.0), (20.0, 60.0), (10.0, 60.0))

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._calls = threading.local()

    def __call__(self, *_: object) -> float:
        number = self._calls.number = getattr(self._calls, "number", -1) + 1
        return self._random.uniform(*self.RANGES[number % len(self.RANGES)])


@pytest.mark.usefixtures("selecting")
@pytest.mark.parametrize("seed", range(2))
def test_two_ranks_have_indexes_of_the_same_own_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are too few bytes for all, and requests leave while theirs grow."""
    monkeypatch.setattr(ResidentIndex, "nbytes", PREFIX * 100, raising=False)
    one = _alike(seed, suffix_dense_tokens=32, suffix_index_bytes=150 * 100)
    own = [kept[kept.index("own") + 1 :] for _, kept, _, _ in one if kept is not None]
    assert {len(of_step) for of_step in own} >= {0, 1, 2}
    assert all(sum(one.prefix_len for one in of_step) <= 150 for of_step in own)
    assert max(one.prefix_len for of_step in own for one in of_step) >= 48


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_two_ranks_take_one_path_in_every_step(seed: int, period: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's measured costs, loads and failures are its own; paths, groups and votes are the same."""
    monkeypatch.setattr(sparse, "measure_us", _Clock(seed))
    joins = 0.2 if period == 1 else 0.05  # a batch that changes is searched
    one = _alike(seed, joins=joins, search_period=period)
    assert (StepPath.KEPT in {path for path, _, _, _ in one}) == (period > 1)
    assert all(problem is None for _, _, problem, _ in one)
    assert {path for path, _, _, _ in one} >= {StepPath.CASCADE, StepPath.SPARSE}
    assert one[-1][3]["votes"] < len(one)


@pytest.mark.usefixtures("selecting")
def test_two_ranks_judge_an_index_alike() -> None:
    """Each measures the error of its own heads, in its own time."""
    one = _alike(0, quality_slo=0.4, guard_every=3, guard_share=1.0, quality_recovery_s=3600.0)
    assert one[-1][3]["steps"] >= 8
    assert one[-1][3]["events"]["raised"] > 0
