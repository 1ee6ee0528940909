"""What is asked of servers: free ports, paired answers and kept tokens against numbers computed by hand."""

from __future__ import annotations

import contextlib
import math
import random
import socket

import pytest

from scripts import servers
from scripts.servers import keep_ratio_between
from tests.server.paired import paired


def test_paired_against_hand_computed_numbers() -> None:
    # 10 questions: 6 right in both, 2 only dense, 1 only sparse, 1 in neither.
    dense = [True] * 6 + [True, True, False, False]
    sparse = [True] * 6 + [False, False, True, False]
    result = paired(dense, sparse)
    assert (result.count, result.dense, result.sparse) == (10, 0.8, 0.7)
    assert result.difference == pytest.approx(-0.1)
    # Agresti and Min: gained 1.5, lost 2.5, n 12: center -1/12, half 1.96 sqrt(4 - 1/12) / 12.
    half = 1.959964 * math.sqrt(4 - 1 / 12) / 12
    assert (result.low, result.high) == pytest.approx((-1 / 12 - half, -1 / 12 + half))
    assert result.high == pytest.approx(0.2399, abs=1e-3)

    equal = paired([True] * 500, [True] * 500)
    assert (equal.difference, equal.low, equal.high) == pytest.approx((0, -1.959964 / 502, 1.959964 / 502))


@pytest.mark.parametrize(("dense", "sparse"), [([], []), ([True], []), ([True], [True, False])])
def test_outcomes_that_do_not_pair_are_refused(dense: list[bool], sparse: list[bool]) -> None:
    with pytest.raises(ValueError, match="two outcomes per question"):
        paired(dense, sparse)


def test_keep_ratio_between_two_states_is_the_mean_over_layers_of_what_came_between() -> None:
    before = {"attended_tokens_per_layer": [100.0, 100.0], "prefix_tokens_per_layer": [100, 1000]}
    after = {"attended_tokens_per_layer": [200.0, 110.0], "prefix_tokens_per_layer": [200, 1100]}
    assert keep_ratio_between(before, after) == pytest.approx((1.0 + 0.1) / 2)
    assert keep_ratio_between(before, before) is None


def test_a_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as taken:
        first = servers.free_port()
        taken.enter_context(socket.socket()).bind(("", first))
        second = servers.free_port()
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [first, second])
        assert servers.free_port() == second
        assert 11000 <= second < 22000
        taken.enter_context(socket.socket()).bind(("", second))
        with pytest.raises(RuntimeError, match="expected 1 free ports in 11000 to 21999, found 0"):
            servers.free_port()
