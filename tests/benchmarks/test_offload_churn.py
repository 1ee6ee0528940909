"""`benchmarks/offload_churn.py`: what is counted of a decode, and tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.benchmarks.results import RESULTS, rows_of


def wanted_of(steps: list[list[int]], prefix_len: int, unit: int, bench: Any) -> Tensor:
    mask: Tensor = bench.offload_churn.masked(torch.tensor(steps, dtype=torch.int32)[:, None], prefix_len, unit)
    return mask


def test_churn_is_that_of_the_sets_of_units(bench: Any) -> None:
    steps = [[0, 1, 2, 40], [0, 17, 40, 41], [0, 17, 40, 41], [16, 33, 70, 71]]
    # {0, 2}, {0, 1, 2}, {0, 1, 2}, {1, 2, 4} of 5 pages; two cells are too few.
    found = bench.offload_churn.churned(wanted_of(steps, 80, 16, bench), [5, 3, 2])
    assert found["wanted"] == pytest.approx(9 / 15)
    assert found["churn"] == pytest.approx(2 / 9, abs=1e-4)
    assert found["moved"] == [pytest.approx(2 / 9, abs=1e-4)] * 2 + [None]
    tokens = bench.offload_churn.churned(wanted_of(steps, 80, 1, bench), [80, 4])
    assert (tokens["wanted"], tokens["churn"]) == (4 / 80, 0.5)
    assert tokens["moved"] == [0.5, 0.5]


@pytest.mark.parametrize("cells", [4, 6, 9])
def test_residents_are_those_wanted_last(bench: Any, cells: int) -> None:
    """Against a list that is sorted anew each step."""
    gen = torch.Generator().manual_seed(cells)
    wanted = torch.rand(40, 2, 12, generator=gen).argsort(-1) < 4
    recency = bench.offload_churn.Recency(2, 12)
    last, missed = torch.full((2, 12), -1), 0
    for step, now in enumerate(wanted):
        resident = recency.resident(cells)
        for head in range(2):
            held = sorted(last[head][resident[head]].tolist(), reverse=True)
            assert held == sorted((one for one in last[head].tolist() if one >= 0), reverse=True)[:cells]
        lacking = int((now & ~resident).sum())
        assert lacking == 8 - int(recency.want(now)[:, cells].sum())
        missed += lacking if step else 0
        last[now] = step
    (moved,) = bench.offload_churn.churned(wanted, [cells])["moved"]
    assert moved == pytest.approx(missed / (39 * 8), abs=1e-4)


@pytest.fixture
def planted(bench: Any) -> Any:
    """A document of 520 tokens and two answers of 9 steps; layer 1 of step 5 of the first asks for one token."""
    capture, gen = bench.offload_churn, torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 2, 520, 8, generator=gen)
    answers = []
    for name in ("one", "other"):
        queries, own = torch.randn(9, 2, 4, 8, generator=gen), torch.randn(2, 2, 12, 8, generator=gen)
        answers.append(capture.Answered(name, queries, own, own, ""))
    keys[1, 1, 300], answers[0].queries[5, 1, 2] = 9.0, 9.0
    return capture.Captured("name", keys, values, answers)


def test_a_layers_selection_is_that_of_its_true_queries(bench: Any, planted: Any) -> None:
    positions = bench.offload_churn.traced(planted, planted.answers[0], 512, 7, 128)
    assert positions.shape == (1, 2, 7, 128)
    assert 300 in positions[0, 1, 5]
    assert {*range(16), *range(448, 512)} <= set(positions[0, 0, 5].tolist())
    rows = list(bench.offload_churn.churn_rows(planted, 512, [0.25, 100]))
    shared = [(row["task"], row["requests"], row["budget"], row["unit"]) for row in rows]
    single = [(budget, unit) for budget in (128, 100) for unit in bench.offload_churn.UNITS]
    assert shared[:6] == [("one", 1, *one) for one in single]
    assert shared[-1] == ("group", 2, 142, 16)
    # Both requests of the group want it.
    queries = torch.stack([one.queries[5:6, 1] for one in planted.answers], 1)
    assert bench.offload_churn.scored(planted.keys[1, :, :512], queries)[0, 1].argmax() == 300
    assert rows[0]["wanted"] == [0.25]
    one, *_, tenth = rows[0]["moved"][0]
    assert one == rows[0]["churn"][0] > 0
    assert tenth is None


def test_what_lags_attends_what_was_resident(bench: Any, planted: Any) -> None:
    args = bench.offload_churn.sizes(512, 8, 100)
    scores = bench.offload_churn.scored(planted.keys[1, :, :512], planted.answers[0].queries[:, 1, None])
    steps = dict(bench.offload_churn.lagging(scores, args, 1))
    assert list(steps) == list(range(1, 9))
    for step, ways in steps.items():
        before = bench.offload_churn.masked(bench.offload_churn.selected(scores[:step], args), 512)
        exact, _ = ways["exact"]
        assert torch.equal(ways["lagged 1"][0], exact & before[-1])
        for attended, fetched in ways.values():
            assert not (fetched & before[-1]).any()
            assert attended.sum(1).max() <= 100
        assert not (ways["lagged 4"][0] & ~before.any(0)).any()
    rows = {row["way"]: row for row in bench.offload_churn.lagged_rows(planted, planted.answers[0], 512, [100], 1)}
    errors = {way: row["error"][0] for way, row in rows.items()}
    assert 0 < errors["exact"] < errors["lagged 2"]
    assert rows["exact"]["lost"] == [0.0]


def test_the_table_of_measured_rows(bench: Any) -> None:
    rows = rows_of(RESULTS / "offload-cpu-churn.jsonl.xz")
    text = bench.offload_churn.table(rows)
    of = [row for row in rows if row["bench"] == "churn" and row["requests"] == 1 and row["document"] == "prose-8192"]
    (tokens, pages) = ([row for row in of if (row["budget"], row["unit"]) == (512, unit)] for unit in (1, 16))
    moved = np.mean([np.array(row["wanted"]) * [one[4] for one in row["moved"]] for row in tokens]) * 8192 * 8 * 512
    (line,) = (one for one in text.splitlines() if "prose-8192, 1 request, 512 tokens, units of 1 |" in one)
    assert f"| {moved / 1e3:,.0f} ({moved / 51e3:.1f}) |" in line
    assert any(one[4] is None for row in pages for one in row["moved"])
