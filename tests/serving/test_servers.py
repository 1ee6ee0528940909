"""What is asked of servers: free ports, and kept tokens against numbers computed by hand."""

from __future__ import annotations

import contextlib
import random
import socket

import pytest

from scripts import servers
from scripts.servers import keep_ratio_between


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
