"""What is counted for export, and the exporter with prometheus_client's own registry. A server's: tests/server."""

from __future__ import annotations

import time
import timeit
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import prefix_index
from prefix_index import IndexStoreError
from sglang_ext.decode.costs import Line, Lines
from sglang_ext.metrics import PATHS, PREFIX, Counters, Exporter, Figures
from sglang_ext.prefix.residency import _KINDS
from tests.serving.admitting import eventually
from tests.serving.test_step_paths import COSTS, Batches, settled


class Exported:
    """What an exporter makes of figures that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, period_s: float = 60.0) -> None:
        monkeypatch.setattr("sglang_ext.metrics.PERIOD_S", period_s)
        self.figures: Figures = {}
        self._registry = CollectorRegistry()
        self.exporter = Exporter(lambda: self.figures, self._registry)

    def __call__(self, name: str, **labels: str) -> float | None:
        value: float | None = self._registry.get_sample_value(PREFIX + name, labels)
        return value


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exported]:
    one = Exported(monkeypatch)
    yield one
    one.exporter.close()


def test_counters_grow_to_their_totals_and_never_fall_and_gauges_do(exported: Exported) -> None:
    assert exported("decode_tokens_total", path="cascade") == 0, "known before there are any"
    for rows, nbytes in ((5, 100), (3, 40), (9, 0)):
        exported.figures = {"decode_tokens": {"sparse": rows}, "device_bytes": nbytes}
        exported.exporter.export()
        assert exported("device_bytes") == nbytes
        assert exported("decode_tokens_total", path="sparse") == max(5, rows)
    exported.figures = {}
    exported.exporter.export()
    assert exported("decode_tokens_total", path="sparse") == 9, "what is not told stays"


def test_what_alerts_count_by_word_is_0_before_its_first_time(exported: Exported) -> None:
    """Prometheus sees no increase in a series that begins at 1: the alert on one damaged index would never fire."""
    kinds = {"bytes", "content", "error", *_KINDS.values()}
    assert {kind: exported("corrupt_total", kind=kind) for kind in kinds} == dict.fromkeys(kinds, 0)
    errors = [one for one in vars(prefix_index).values() if isinstance(one, type) and issubclass(one, IndexStoreError)]
    reasons = {"index_mismatch", "index_memory", *(error.reason for error in errors)}
    assert len(reasons) > 3
    assert {why: exported("load_failures_total", reason=why) for why in reasons} == dict.fromkeys(reasons, 0)


def test_an_error_while_exporting_is_logged_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exported = Exported(monkeypatch, period_s=0.01)
    exported.figures = {"no such metric": 1}
    time.sleep(0.2)
    assert caplog.text.count("metrics could not be exported") == 1
    exported.figures = {"hit": 2}
    assert eventually(lambda: exported("hit_total") == 2)
    exported.exporter.close()


def test_time_is_taken_between_steps_of_one_path_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("sglang_ext.metrics.time.perf_counter", lambda: 2.0 ** next(clock))
    counters = Counters(1)
    for path in ("sparse", "sparse", "dense", "sparse", None, "sparse", "sparse", "dense", "dense"):
        counters.begin_step(path)
    found = counters.figures()
    assert found["steps"] == {"sparse": 5, "cascade": 0, "dense": 3}
    assert found["timed_steps"] == {"sparse": 2, "cascade": 0, "dense": 1}
    assert found["step_seconds"] == {"sparse": (2 - 1) + (64 - 32), "cascade": 0, "dense": 256 - 128}


def test_what_steps_save_is_told_against_each_row_attending_its_own_tokens() -> None:
    """By COSTS: 3 layers of 1 us a token; a search of 2 * 200 us, of which a step in four has its part."""
    batches = Batches(["dense", "anchor", "anchor"], decode_path="sparse", min_shared_tokens=64)
    settled(batches, 0, 1)
    figures = batches.steps.account.counters.figures()
    cascade = figures["groups"]["cascade"]
    assert cascade >= 1
    assert figures["saved_seconds"]["cascade"] == pytest.approx(cascade * 3 * 128 / 1e6)
    batches.step(0, 1)
    figures = batches.steps.account.counters.figures()
    assert figures["groups"] == {"sparse": 1, "cascade": cascade}
    selecting = (128 + 2) + 2 * (32 + 2) + 400
    assert figures["saved_seconds"]["sparse"] == pytest.approx((3 * 2 * 129 - selecting) / 1e6)
    (of_index,) = batches.steps.account.saved_us.values()
    assert of_index == pytest.approx(3 * 2 * 129 - selecting)


def test_what_a_step_loses_takes_nothing_from_what_others_save(exported: Exported) -> None:
    """A counter that others take from would stand still where a server saves: its rate is told as what is saved."""
    counters = Counters(1)
    for us in (3e6, -2e6, 1e6, -5e6):
        counters.count_groups("sparse", 1, us)
        exported.figures = counters.figures()
        exported.exporter.export()
    assert [exported(f"{name}_seconds_total", path="sparse") for name in ("saved", "lost")] == [4, 7]


@pytest.mark.parametrize("rows", [1, 128])
def test_a_step_pays_some_microseconds_for_what_is_exported(rows: int) -> None:
    """The counting of a step and what it saves, which needs costs; the quickest of some rounds of them."""
    batches = Batches(["dense", "anchor", "anchor"], decode_path="sparse")
    planner, counters = batches.steps, batches.steps.account.counters
    lines = Lines({groups: Line(5.0, 0.01) for groups in (1, 4, 16, 64, 128)})
    for size in (4, 128):
        planner.cascade._costs[size] = COSTS.__class__(lines, lines, 1, 2, 0)
    batch: Any = type("Batch", (), {"seq_lens": [8192] * rows})

    def step() -> None:
        counters.count_groups("cascade", 1, planner._saved_us(batch, 1.0))
        counters.begin_step("cascade")

    assert min(timeit.repeat(step, repeat=10, number=1000)) < 1000 * 30e-6
    assert PATHS[0] in counters.figures()["steps"]
