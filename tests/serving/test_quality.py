"""What becomes of an index by what guarded steps measured, and how many steps may be guarded."""

from __future__ import annotations

import logging

import pytest

from sglang_ext.decode.quality import (
    DEFAULT_SLO,
    EARLY,
    LEAST_SAMPLES,
    QualityRecords,
    Record,
    Sample,
    Schedule,
    Standing,
)
from tests.serving.admitting import Clock

GOOD, BAD = [0.0, 0.1, 0.2], [0.0, 0.7, 0.8]
"""Output errors of a dense layer and of two that select."""


def records(
    slo: float | None = 0.3, *, trial: bool = False, most: int = 1 << 20, clock: Clock | None = None
) -> QualityRecords:
    found = QualityRecords(
        slo, 60.0, trial=trial, selecting=[1, 2], budget=lambda length, factor: min(100 * factor, most, length),
        clock=clock or Clock(),
    )  # fmt: skip
    found.of("d", 1000)
    return found


def add(found: QualityRecords, errors: list[float], times: int = 1) -> Standing:
    for _ in range(times):
        epoch = found.of("d", 1000).epoch
        found.add("d", Sample(epoch, [1 - error for error in errors], errors, tokens=2, agreed=1))
    return found.of("d", 1000).standing


def test_an_index_beyond_the_bound_gets_more_budget_on_trial_then_is_dense_and_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    found = records(clock=clock)
    assert add(found, BAD, LEAST_SAMPLES - 1) is Standing.SERVING
    assert add(found, BAD) is Standing.TRIAL
    assert found.factor("d") == 2
    found.add("d", Sample(0, BAD, BAD))  # of a step that had begun before
    assert add(found, BAD, LEAST_SAMPLES) is Standing.TRIAL
    assert found.factor("d") == 4
    assert not found.blocks("d", 0.0)
    assert add(found, BAD, LEAST_SAMPLES) is Standing.DENSE
    assert found.blocks("d", 0.0)
    clock.now = 59.9
    assert found.blocks("d", 0.0)
    clock.now = 60.0
    assert not found.blocks("d", 0.0)
    assert add(found, GOOD, LEAST_SAMPLES) is Standing.SERVING
    assert found.factor("d") == 4, "tried again from the raised budget"
    assert found.events == {"raised": 2, "dense": 1, "tried_again": 1, "accepted": 1}
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "index d dense: output error 0.750 in 3 guarded steps, at most 0.3 is wanted; budget 400 of 1000" in said[2]


def test_a_budget_that_cannot_grow_ends_dense_until_one_asks_who_may_end_that() -> None:
    assert add(records(most=100), BAD, LEAST_SAMPLES) is Standing.DENSE
    found = records(clock=(clock := Clock()))
    found.of("short", 399)
    for _ in range(LEAST_SAMPLES):
        found.add("short", Sample(0, GOOD, BAD))
    assert (found.of("short", 399).standing, found.factor("short")) == (Standing.DENSE, 1), "never more than a half"
    clock.now = 60.0
    assert found.blocks("short", 0.0, may_end=False)
    assert not found.blocks("short", 0.0)


def test_without_a_bound_it_is_measured_only() -> None:
    found = records(None)
    assert add(found, BAD, 40) is Standing.SERVING
    shown = found.snapshot()["indexes"]["d"]
    assert shown["output_error"] == pytest.approx(BAD)
    assert shown["mean_recall"] == pytest.approx(0.25)
    assert (shown["tokens"], shown["agreed"], found.events) == (80, 40, {})


@pytest.mark.parametrize(("slo", "error", "standing"), [
    (None, DEFAULT_SLO - 0.01, Standing.SERVING), (None, DEFAULT_SLO + 0.01, Standing.TRIAL),
    (0.9, 0.89, Standing.SERVING), (0.1, 0.11, Standing.TRIAL),
])  # fmt: skip
def test_on_trial_an_index_serves_once_its_mean_is_within_the_bound(
    slo: float | None, error: float, standing: Standing
) -> None:
    found = records(slo, trial=True)
    assert add(found, [0.0, error, error], LEAST_SAMPLES - 1) is Standing.TRIAL
    assert add(found, [0.0, error, error]) is standing


def test_one_bad_step_among_good_ones_is_no_reason() -> None:
    found = records(0.3)
    add(found, GOOD, 8)
    assert add(found, [0.0, 3.0, 3.0]) is Standing.SERVING


@pytest.mark.parametrize(("share", "cost"), [(0.005, 3.0), (0.05, 1.0), (0.5, 10.0)])
def test_the_share_of_time_is_kept(share: float, cost: float) -> None:
    schedule = Schedule(share)
    schedule.cost = cost
    guarded = 0
    for _ in range(20_000):
        now = schedule.allows()
        guarded += now
        schedule.took(guarded=now)
    extra = cost * guarded
    assert extra / (20_000 + extra) < share + 20 * cost / 20_000
    assert extra / (20_000 + extra) > 0.9 * share


def test_the_least_recent_of_too_many_indexes_is_forgotten_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_ext.decode.quality._KEPT", 2)
    found = records(most=100)
    add(found, BAD, LEAST_SAMPLES)
    for name in ("e", "f", "g"):
        assert found.blocks("d", 0.0)
        found.of(name, 1000)
    assert found.of("g", 0).prefix_len == 1000
    assert found.of("e", 5).prefix_len == 5, "new"
    assert not found.blocks("d", 0.0), "dense ones are, too"


def test_a_burst_is_as_long_whatever_a_guarded_step_turns_out_to_cost() -> None:
    for cost in (0.2, 4.0, 30.0):
        schedule, guarded = Schedule(1e-6), 0
        for number in range(100):
            guarded += (now := schedule.allows())
            schedule.took(guarded=now)
            if number == 8:
                schedule.cost = cost
        assert guarded in (16, 17)


def test_another_budget_and_another_build_begin_anew() -> None:
    found = records()
    add(found, GOOD, 16)
    assert add(found, BAD, 2) is Standing.SERVING, "the sound steps before hide it"
    found.budget_changed()
    assert add(found, BAD, LEAST_SAMPLES) is Standing.TRIAL
    found.budget_changed()
    assert (found.of("d", 1000).standing, found.factor("d")) == (Standing.TRIAL, 1), "it did not serve"
    found.made("d", 5.0)
    assert found.of("d", 1000).standing is Standing.TRIAL, "the first build that is known"
    found.made("d", 6.0)
    assert (found.of("d", 1000).standing, found.of("d", 1000).steps) == (Standing.SERVING, 0)
    assert found.snapshot()["indexes"] == {}, "nothing is said of it by what another build did"
    assert add(found, BAD, LEAST_SAMPLES) is Standing.TRIAL
    found.made("d", 5.0)
    assert found.of("d", 1000).standing is Standing.TRIAL, "an old build that requests still hold"
    add(found, BAD, 3 * LEAST_SAMPLES)
    for created, dense in ((0.0, True), (5.0, True), (6.0, True), (7.0, False)):
        assert found.blocks("d", created) is dense
        assert found.standing("d", created) is (Standing.DENSE if dense else Standing.SERVING)
    assert found.of("d", 1000).standing is Standing.DENSE, "it is not there yet"
    add(unknown := records(most=100), BAD, LEAST_SAMPLES)
    assert unknown.blocks("d", 5.0), "several ranks do not know which build was measured"


def test_an_early_step_that_may_not_be_guarded_is_owed() -> None:
    record = Record(1000, Standing.SERVING)
    for _ in range(EARLY[0] + 1):
        record.serve()
    assert record.owed
