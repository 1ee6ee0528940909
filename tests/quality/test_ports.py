"""Free ports for servers."""

from __future__ import annotations

import contextlib
import random
import socket

import pytest

from sglang_ext.quality import ports


def test_a_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as taken:
        first = ports.free_port()
        taken.enter_context(socket.socket()).bind(("", first))
        second = ports.free_port()
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [first, second])
        assert ports.free_port() == second
        assert 11000 <= second < 22000
        taken.enter_context(socket.socket()).bind(("", second))
        with pytest.raises(RuntimeError, match="expected 1 free ports in 11000 to 21999, found 0"):
            ports.free_port()
