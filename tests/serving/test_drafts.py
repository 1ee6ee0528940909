"""Lossless decode: how many tokens are drafted behind a prefix, and which way the steps of a round go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from prefix_kernels.launching import block_of
from sglang_ext.config import config_from_dict
from sglang_ext.decode.drafts import AGAIN, LEARNT, OTHERWISE, TRIES, Drafting, DraftLengths, RoundTimes
from sglang_ext.decode.types import StepPath
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import Attachment, RequestTable
from sglang_ext.prefix.residency import State
from tests.serving.admitting import Clock, entered
from tests.serving.planning import PREFIX, blank_index, capture_all, forward_of, path_of, planner
from tests.serving.test_step_paths import COSTS

ROUNDS = 400


def after(lengths: DraftLengths, accepted: int, drafted: int = 4) -> DraftLengths:
    for _ in range(ROUNDS):
        lengths.verified("one", drafted, accepted)
    return lengths


@pytest.mark.parametrize(
    ("accepted", "share", "wanted"), [(4, 1.0, 8), (3, 3 / 4, 2), (2, 2 / 3, 1), (1, 1 / 2, 1), (0, 0.0, 0)]
)
def test_the_last_draft_is_likelier_kept_than_dropped(accepted: int, share: float, wanted: int) -> None:
    lengths = DraftLengths(8)
    assert (lengths.wanted("one"), lengths.acceptance("one")) == (8, 1.0)
    after(lengths, accepted)
    assert lengths.acceptance("one") == pytest.approx(share, abs=0.01)
    assert lengths.wanted("one") == wanted
    assert lengths.wanted("another") == 8


def test_an_index_that_drafts_badly_is_tried_again_and_trusted_when_it_drafts_well() -> None:
    lengths = after(DraftLengths(4), 0)
    tried = [lengths.wanted("one") for _ in range(3 * AGAIN)]
    assert sum(tried) == 3
    assert max(tried) == 1
    after(lengths, 1, drafted=1)
    assert lengths.wanted("one") == 4


def test_a_round_without_drafts_says_nothing() -> None:
    lengths = DraftLengths(4)
    lengths.verified("one", 0, 0)
    assert lengths.acceptance("one") == 1.0


def test_the_indexes_that_drafted_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.decode.drafts.KNOWN", 2)
    lengths = after(DraftLengths(4), 0)
    lengths.verified("two", 4, 4)
    lengths.verified("one", 1, 0)
    lengths.verified("three", 4, 0)
    assert lengths.acceptance("one") < 0.01
    assert lengths.acceptance("three") < 1.0
    lengths.verified("four", 4, 0)
    assert [lengths.acceptance(name) == 1.0 for name in ("one", "two", "three", "four")] == [True, True, False, False]
    assert lengths.wanted("one") == 4


class Drafted:
    """Lossless decode of two requests on one prefix, the first of which has its index."""

    def __init__(self, **fields: Any) -> None:
        roles = ["dense", "anchor"]
        config = config_from_dict({
            "exactness": "verify", "layer_plan": roles, "share_prefixes": True, "min_top_k": 32,
            "min_shared_tokens": 64, "guard_every": 2, **fields,
        })  # fmt: skip
        self.requests, self.index = RequestTable(), blank_index(2)
        self.index.state = State.READY
        plan = LayerPlan.from_dict({"layers": roles}, num_layers=2, num_kv_heads=1)
        self.steps = planner(config, self.requests, Counters(2), plan, 8, 1)
        assert self.steps.sparse is not None
        self.steps.sparse._costs[block_of(8)] = COSTS
        capture_all(self.steps, 8)
        self._held = [entered(self.requests, Attachment(f"r{row}", index=self.index)) for row in range(2)]

    def usable(self, attachment: Attachment | None, *, waits: bool = True) -> Any:
        return self.index if attachment is self.requests.get("r0") else None

    def path(self, rids: list[str], rows: list[int], lens: list[int]) -> StepPath | None:
        return path_of(self.steps, forward_of(rids, rows, lens), self.usable)

    def round(self, drafts: int) -> list[StepPath | None]:
        """Ways of the drafting steps."""
        assert self.steps.drafters(forward_of(["r0", "r1"], [0, 1], [PREFIX + 2] * 2), self.usable) == ["d", None]
        with self.steps.drafting():
            found = [self.path(["r0"], [0], [PREFIX + 2 + n]) for n in range(drafts)]
        self.path(["r0"] * (drafts + 1) + ["r1"], [0] * (drafts + 1) + [1], [PREFIX + 2] * (drafts + 2))
        return found


def test_drafts_of_several_rounds_use_one_search() -> None:
    drafted, each = Drafted(search_period=4), Drafted()
    for one in (drafted, each):
        assert [one.round(2) for _ in range(2)] == [[StepPath.SPARSE] * 2] * 2, (
            "slots are known from the third round on"
        )
    kept, searched = [StepPath.KEPT] * 2, [StepPath.SPARSE, StepPath.KEPT]
    assert [drafted.round(2) for _ in range(4)] == [searched, kept, searched, kept]
    assert drafted.round(0) == []
    assert [drafted.round(2) for _ in range(2)] == [searched, kept], "what was found is too old behind such a round"
    assert [each.round(2) for _ in range(3)] == [searched] * 3, "without a period each round has one search"


def test_no_attention_time_counts_as_saved_by_rounds() -> None:
    """Drafts may all be dropped, and rows of one request are no requests that would have attended alone."""
    drafted = Drafted()
    assert [drafted.round(2) for _ in range(4)][-1] == [StepPath.SPARSE, StepPath.KEPT]
    figures = drafted.steps.account.counters.figures()
    assert figures["groups"]["cascade"] > 0
    nothing = {"sparse": 0.0, "cascade": 0.0}
    assert (figures["saved_seconds"], figures["lost_seconds"]) == (nothing, nothing)
    assert drafted.steps.account.saved_us == {}


def test_only_drafting_steps_select_and_rows_of_drafts_are_no_beams() -> None:
    """By costs selecting never pays here: that a round drafts was decided before."""
    drafted = Drafted()
    steps, usable, path = drafted.steps, drafted.usable, drafted.path
    assert steps.guard is None, "every draft is compared"
    exact = ["r0", "r0", "r0", "r1"], [0, 0, 0, 1], [PREFIX + 2, PREFIX + 3, PREFIX + 4, PREFIX + 2]
    for number in range(4):
        whole = forward_of(["r0", "r1"], [0, 1], [PREFIX + 2] * 2)
        assert steps.drafters(whole, usable) == ["d", None]
        steps.drafts = True
        assert path(["r0"], [0], [PREFIX + 2]) is StepPath.SPARSE
        steps.drafts = False
        assert path(*exact) is (StepPath.CASCADE if number >= 2 else None), "slots are known from the third round on"
    for ahead, wanted in ((False, StepPath.CASCADE), (True, None)):
        counted = steps.account.counters.figures()
        with steps.drafting(ahead=ahead):
            assert path(["r0", "r1"], [0, 1], [PREFIX + 2] * 2) is StepPath.SPARSE
            with_index = steps.account.counters.figures()
            assert path_of(steps, whole, lambda _one, **_: None) is wanted, "with lengths that are bounds only indexes"
        assert (steps.account.counters.figures() == with_index) == ahead, "what is not run is not counted"
        assert with_index != counted
    steps.paused = True
    assert steps.drafters(whole, usable) == [None, None]


MS = 1e-3


def rounds(
    times: RoundTimes, clock: Clock, count: int, costs: Callable[[int], float], *drafting: Drafting
) -> list[int]:
    """Run so many rounds of 4 requests, that take as long as `costs` says of the tokens that each drafts."""
    found = []
    for _ in range(count):
        times.begin(8192)
        found.append(times.choose(4, drafting))
        clock.now += costs(found[-1])
        times.ended(found[-1])
        clock.now += 1000 * MS  # whatever runs between
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("sglang_ext.decode.costs.time.perf_counter", clock)
    return clock


@pytest.mark.parametrize(
    ("kept", "draft", "best", "beside"),
    [(0.9, 6 * MS, 7, 1), (0.9, 20 * MS, 2, 2), (0.3, 14 * MS, 0, 1)],
)
def test_rounds_draft_what_gives_most_tokens_a_second(
    clock: Clock, kept: float, draft: float, best: int, beside: int
) -> None:
    """An exact step takes 30 ms. Few rounds do other than what is best, also when that changes: the most, none, and so
    many numbers `beside` the best are tried first.
    """
    times, drafting = RoundTimes(torch.device("cpu")), [Drafting(8, kept)] * 4
    found = rounds(times, clock, 400, lambda count: 30 * MS + count * draft, *drafting)
    tokens = {count: sum(kept**n for n in range(count + 1)) / (30 * MS + count * draft) for count in range(9)}
    assert max(tokens, key=tokens.__getitem__) == best
    assert found.count(best) > 400 * (1 - 2 / OTHERWISE) - (2 + beside) * LEARNT
    assert set(rounds(times, clock, 20 * OTHERWISE, lambda count: 30 * MS + count * draft, *drafting)) == set(range(9))
    rounds(times, clock, 40 * OTHERWISE, lambda count: 30 * MS + count * 90 * MS, *drafting)
    found = rounds(times, clock, 400, lambda count: 30 * MS + count * 90 * MS, *drafting)
    assert found.count(0) > 400 * (1 - 2 / OTHERWISE)


def test_what_is_known_of_more_drafts_serves_for_fewer(clock: Clock) -> None:
    """Near its end a request may draft less and less: nothing is tried for that."""
    times = RoundTimes(torch.device("cpu"))
    assert (
        rounds(times, clock, 4 * LEARNT, lambda count: (30 + 60 * count) * MS, Drafting(7, 0.9))[2 * LEARNT :]
        == [1] * LEARNT + [0] * LEARNT
    )
    for most in range(6, 0, -1):
        assert rounds(times, clock, 5, lambda count: (30 + 60 * count) * MS, Drafting(most, 0.9)) == [0] * 5


def test_one_round_that_stalls_changes_little(clock: Clock) -> None:
    times = RoundTimes(torch.device("cpu"))
    rounds(times, clock, 20, lambda count: (12 + 20 * count) * MS, Drafting(7, 0.9))
    rounds(times, clock, 1, lambda _: 60.0, Drafting(7, 0.9))
    assert rounds(times, clock, 20, lambda count: (12 + 20 * count) * MS, Drafting(7, 0.9)) == [0] * 20


def test_slow_first_rounds_hide_no_number(clock: Clock) -> None:
    """The first round has room for one draft only, and compares slots; so do all of its first drafts."""
    times, drafting = RoundTimes(torch.device("cpu")), [Drafting(4, 0.909)] * 8
    found = []
    for number in range(400):
        times.begin(8 * 131072)
        found.append(times.choose(8, drafting))
        count = 1 if number == 0 else found[-1]
        slow = 30 * count * (number <= LEARNT)
        clock.now += ((8.7, 15.0, 20.9, 26.1, 35.4)[count] + slow) * MS  # an H200's behind 131,072 tokens
        times.ended(count)
    assert found[: 2 * LEARNT + 1] == [4] * (LEARNT + 1) + [0] * LEARNT
    assert found.count(3) > 400 * (1 - 2 / OTHERWISE) - 6 * LEARNT


def test_a_round_counts_for_what_it_drafted(clock: Clock) -> None:
    """There is never room to draft more than one: those rounds end, and no more than that is chosen behind them."""
    times, found = RoundTimes(torch.device("cpu")), []
    for _ in range(80):
        times.begin(8192)
        found.append(times.choose(1, [Drafting(7, 1.0)]))
        clock.now += (12 + 12 * min(found[-1], 1)) * MS
        times.ended(min(found[-1], 1))
    assert found[: TRIES + LEARNT] == [7] * TRIES + [0] * LEARNT
    assert max(found[2 * TRIES + LEARNT :]) <= 1


def test_requests_that_may_not_draft_are_counted_and_make_none(clock: Clock) -> None:
    times = RoundTimes(torch.device("cpu"))
    assert rounds(times, clock, 5, lambda _: MS) == [0] * 5
    few, many = ([Drafting(3, 0.95)] * number for number in (1, 4))
    assert set(rounds(times, clock, 50, lambda count: (30 + 9 * count) * MS, *few)[3 * LEARNT :]) == {0}
    assert set(rounds(times, clock, 50, lambda count: (30 + 9 * count) * MS, *many)[3 * LEARNT :]) == {3}


def test_what_was_launched_for_another_batch_counts_for_the_round_that_drafts_anew(clock: Clock) -> None:
    times, drafting = RoundTimes(torch.device("cpu")), [Drafting(3, 0.9)]
    for requests, anew in ((2, True), (1, False)):
        times.begin(8192, anew=anew)
        count = times.choose(requests, drafting * requests)
        clock.now += 5 * MS
    times.ended(count)
    times.begin(8192)
    first, second = times._known.values()
    assert (first.seconds, second.seconds) == ({}, {3: pytest.approx(10 * MS)})
    assert (sum(first.tried.values()), sum(second.tried.values())) == (0, 1)
