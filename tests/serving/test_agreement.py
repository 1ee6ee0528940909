"""Ranks of a tensor-parallel group: each knows something else, and all must come to the same, without a deadlock."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sglang_ext.decode.grouping import SlotTracker
from sglang_ext.decode.quality import QualityRecords, Standing
from sglang_ext.decode.types import DecodeBatch
from sglang_ext.metrics import REASONS, Counters
from sglang_ext.options import SparseAttnConfig
from sglang_ext.prefix.requests import Attachment, Readiness, RequestTable
from sglang_ext.prefix.residency import State
from sglang_ext.ranks import EVERY, KEPT, LOADING, READY, Agreement, ProcessRanks, Ranks, Word, check_alike, ranks_of
from tests.serving.admitting import LAYERS, PROMPT, Request, entered, planned
from tests.serving.meeting import Meeting
from tests.serving.test_administration import of_rank

A, B = "a" * 64, "b" * 64
MISMATCH = -REASONS.index("index_mismatch")


@pytest.mark.parametrize("shares", [(True, True), (True, False)])
def test_a_request_shares_slots_where_it_does_on_all_ranks(shares: tuple[bool, bool]) -> None:
    def work(ranks: Ranks) -> bool:
        votes = Agreement(ranks, MISMATCH)
        votes.settle(["r"], lambda _: Word(READY, shares[ranks.rank], A), refused=False)
        return votes._agreed["r"].shares

    assert Meeting(2).run(work) == [all(shares)] * 2


def test_ranks_that_went_different_ways_or_refuse_say_so_on_all() -> None:
    def work(ranks: Ranks) -> list[str | None]:
        votes, problems = Agreement(ranks, MISMATCH), []
        for step, rid in enumerate("abc"):
            refused = step == 1 and ranks.rank == 0
            problems.append(votes.settle([rid], lambda _: Word(READY, True, A), refused=refused)[1])
            votes.took("sparse" if step < 1 or ranks.rank else "cascade", 1)
        return problems

    one, two = Meeting(2).run(work)
    assert one == two
    assert one[0] is None
    assert "does not attend" in one[1]
    assert "different decode paths" in one[2]


def test_what_is_remembered_is_bounded() -> None:
    votes = Agreement(Ranks(), MISMATCH)
    for number in range(KEPT + 50):
        votes.settle(["stays", f"r{number}"], lambda _: Word(READY, True, A), refused=False)
        assert votes.ready("stays")
    assert len(votes._agreed) < KEPT
    assert votes.votes == KEPT + 50, "none for one that stayed"


def _index(state: State, digest: str = A) -> Any:
    return SimpleNamespace(
        state=state, reason="index_memory", detail="", loaded=None, begun=0.0, prefix_len=64,
        entry=SimpleNamespace(digest=digest, created=1.0),
    )  # fmt: skip


class _Unreadable:
    """An index of which nothing can be learned."""

    entry = SimpleNamespace(digest=A)

    @property
    def state(self) -> State:
        raise OSError("gone")


class _Requests:
    """Requests of one rank, and what it may use."""

    def __init__(self, ranks: Ranks, guarded: QualityRecords | None = None) -> None:
        self.table, self.counters, self.held = RequestTable(), Counters(1), list[Request]()
        self.ready = Readiness(SparseAttnConfig(), self.table, self.counters, ranks, self._release, guarded)

    @staticmethod
    def _release(attachment: Attachment) -> None:
        attachment.index = None

    def came(self, attachment: Attachment) -> None:
        self.held.append(entered(self.table, attachment))


def _held(case: str) -> Attachment:
    """What the second rank holds of a request; all others an index that is ready."""
    state = {"loading": State.LOADING, "another loads": State.LOADING, "failed": State.FAILED}.get(case, State.READY)
    index = _Unreadable() if case == "raises" else _index(state, B if "another" in case else A)
    reason = {"absent": "no_index", "unlike": "unsupported_mode"}.get(case)
    return Attachment("r", reason, index=None if reason else index)


@pytest.mark.parametrize(
    ("case", "size", "reason"),
    [
        ("ready", 2, None),
        ("loading", 2, "index_loading"),
        ("failed", 3, "index_memory"),
        ("another", 2, "index_mismatch"),
        ("another loads", 2, "index_mismatch"),
        ("absent", 2, "no_index"),
        ("unlike", 2, "unsupported_mode"),
        ("raises", 2, "unsupported_mode"),
    ],
)
def test_a_rank_gives_up_what_another_one_lacks(case: str, size: int, reason: str | None) -> None:
    """Of three, the last one still loads."""

    def work(ranks: Ranks) -> Any:
        attachment = _held(("ready", case, "loading")[ranks.rank])
        requests = _Requests(ranks)
        requests.came(attachment)
        problem = requests.ready.settle(["r"], refused=False)
        used = requests.ready.usable(attachment) is not None
        return problem, used, dict(requests.counters.fallbacks), attachment.index is None

    released = case not in ("ready", "loading")  # nobody keeps an index that it may not use
    assert Meeting(size).run(work) == [(None, case == "ready", {reason: 1} if reason else {}, released)] * size


@pytest.mark.parametrize("late", [0, 1])
def test_runtimes_of_two_ranks_use_an_index_that_is_late_on_one_from_the_same_step_on(
    late: int, make_bench: Any
) -> None:
    bench = make_bench(layer_plan=["anchor"] * LAYERS, prefetch_policy="best_effort", keep_ratio=1.0)
    bench.put(PROMPT)

    def work(ranks: Ranks) -> Any:
        runtime = of_rank(bench, ranks)
        gate, real = threading.Event(), runtime.store.get
        if ranks.rank == late:
            runtime.store.get = lambda key: (gate.wait(60), real(key))[1]
        index = runtime.requests.of(runtime.came("a")).index
        used = []
        for step in range(3 * EVERY):
            if step == (EVERY + 2 if ranks.rank == late else 0):
                gate.set()
                index.loaded.result(60)
            used.append(planned(runtime, ["a"], [66 + step]))
        state = runtime.snapshot()
        runtime.close()
        own = bench.keys(PROMPT, 0).transpose(0, 1)[ranks.rank : ranks.rank + 1]
        assert torch.equal(index.layers[0]["keys"], own), "of its own KV head"
        return used, state["fallbacks"], [(one["history"], one["votes"]) for one in state["ranks"]]

    one, two = Meeting(2).run(work)
    assert one == two
    used, fallbacks, (mine, theirs) = one
    assert used == sorted(used)
    assert EVERY + 2 < used.count(False) < 3 * EVERY
    assert (fallbacks, mine) == ({"index_loading": 1}, theirs)
    assert mine[1] == 3, "one vote when it came, then one in so many steps, and none once it is settled"


def test_ranks_that_are_not_alike_stop_on_all() -> None:
    def work(ranks: Ranks) -> str:
        check_alike(ranks, {"device": "x", "slots": 7})
        with pytest.raises(RuntimeError) as error:
            check_alike(ranks, {"device": "x", "slots": 7 + ranks.rank})
        return str(error.value)

    one, two = Meeting(2).run(work)
    assert one == two
    assert "expected the same slots on all 2 tensor-parallel ranks, got [7, 8]" in one


def test_in_lockstep_a_comparison_is_known_in_the_same_step_whenever_the_device_has_it() -> None:
    table = torch.arange(40, dtype=torch.int32).reshape(2, 20)
    table[1, :9] = table[0, :9]
    slots, lens = SlotTracker(4, 1, torch.device("cpu"), lockstep=True), torch.tensor([20, 20])
    batch = DecodeBatch([1, 2], [20, 20], table, torch.tensor([0, 1]), lens)
    slots.learn(batch)
    slots.learn(batch)
    done = Mock(query=lambda: pytest.fail("asked for the time"))
    for one in slots._pending:
        one.done = done
    slots.learn(batch)
    assert 1 not in slots.prefixes
    slots.learn(batch)
    [found] = slots.prefixes.groups([1, 2])
    assert (found.length, done.synchronize.call_count) == (9, 2)


def test_an_index_that_the_guard_blocks_while_indexes_are_off_is_given_up_on_all_ranks() -> None:
    """Its time is over on one rank a moment before it is on the other, and a new request asks in between."""

    def work(ranks: Ranks) -> list[bool]:
        now = 0.0
        budget, clock = (lambda length, factor: length), lambda: now
        records = QualityRecords(0.3, 60.0, trial=False, selecting=[0], budget=budget, clock=clock)
        requests = _Requests(ranks, records)
        ready, old, new = requests.ready, Attachment("old", index=_index(State.READY)), Attachment("new")
        new.index = _index(State.READY)
        requests.came(old)
        used = []
        for step in range(4):
            ready.off = step in (1, 2)
            if step == 2:  # figures of a step before
                records.of(A, 64).become(Standing.DENSE)
                records.of(A, 64).until = 60.0
            if step == 3:
                now = 60.0 + ranks.rank - 0.5
                requests.came(new)
            ready.settle(["old", "new"][: 1 + (step == 3)], refused=False)
            used += [ready.usable(one) is not None for one in (old, new)]
        return used

    one, two = Meeting(2).run(work)
    assert one == two
    assert one == [True] + [False] * 7


def _process(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ranks = ranks_of(rank, 2)
    assert isinstance(ranks, ProcessRanks)
    assert (ranks.rank, ranks.size) == (rank, 2)
    with torch.inference_mode():
        assert ranks.least([rank, -rank, (1 << 60) - 1 + rank]) == [0, -1, (1 << 60) - 1]
        assert ranks.most([0.5 - rank, 1.25 + rank]) == [0.5, 2.25]
        assert ranks.gathered({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    votes = Agreement(ranks, MISMATCH)
    states = [READY if rank else LOADING] * EVERY + [READY]
    used = []
    for step in range(2 * EVERY):
        state = states[min(step, EVERY)]
        votes.settle(["r"], lambda _, state=state: Word(state, True, A), refused=False)
        used.append(votes.ready("r"))
    assert used == [False] * (2 * EVERY - 1) + [True], used
    with pytest.raises(RuntimeError, match="expected 3 processes"):
        ranks_of(rank, 3)
    Path(folder, f"done-{rank}").touch()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.full  # by day a server of two ranks does
def test_processes_agree_through_gloo(tmp_path: Path) -> None:
    mp.spawn(_process, (str(tmp_path),), nprocs=2)
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1"]


def test_an_id_that_is_used_again_is_asked_for_again() -> None:
    """SGLang does not tell of every slot that a session gives back; the word of the request before must not count."""

    def work(ranks: Ranks) -> tuple[list[bool], int]:
        requests = _Requests(ranks)
        ready = requests.ready
        requests.came(Attachment("r", "unsupported_mode"))  # of a streaming session
        ready.settle(["r"], refused=False)
        requests.held.clear()
        assert len(requests.table.take_forgotten()) == 1
        index = _index(State.READY if ranks.rank == 0 else State.LOADING)
        attachment = Attachment("r", index=index)
        requests.came(attachment)
        ready.settle(["r"], refused=False)
        used = [ready.usable(attachment) is not None]  # nobody was asked: nobody may
        ready.forget("r")  # as the runtime does when a request comes in
        index.state = State.READY
        ready.settle(["r"], refused=False)
        return [*used, ready.usable(attachment) is not None], ready.snapshot()["votes"]

    assert Meeting(2).run(work) == [([False, True], 2)] * 2
