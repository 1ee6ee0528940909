"""A cache rank beside decode steps: a process of its own, on a CPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sglang_ext.cache_rank import client
from sglang_ext.cache_rank.client import CacheRank
from sglang_ext.decode.select_op import AheadOp, OpContext
from sglang_ext.decode.types import StepPath
from sglang_ext.methods.base import parse_spec
from tests.sparse_server import LAYERS, Server, join_four, searches, walk_ahead

CPU = torch.device("cpu")
SPEC = parse_spec({"method": "two_level"})


def within(seconds: float, holds: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


class Ranked(Server):
    """A server whose candidates another process names."""

    def __init__(self) -> None:
        super().__init__(CPU, kernels=False, spec=SPEC, select_ahead=True, cache_device="cpu")
        op = self.sparse.op
        assert isinstance(op, AheadOp)
        context = OpContext(self.shape, self.config, LAYERS, self.sparse.sizes, CPU)
        self.rank = self.sparse.cache_rank = CacheRank(SPEC, context, op, "cpu", captured=False)
        within(60, lambda: self.state["state"] == "serving")

    @property
    def state(self) -> dict[str, Any]:
        return self.rank.snapshot()

    def settled(self, serials: list[int]) -> None:
        """Steps until the rank answers them."""
        served = self.state["served"]
        within(30, lambda: (self.step(serials), self.state["served"] > served + 2)[1])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranked]:
    monkeypatch.setattr(client, "_AGAIN_S", 0.2)
    made = Ranked()
    yield made
    made.rank.close()


def test_candidates_are_those_that_a_step_would_name_itself(server: Ranked) -> None:
    """Each step is compared with one whose candidates the queries of the step before name."""
    join_four(server)
    server.settled([1, 2, 3, 4])
    before = server.state
    assert searches(server, [1, 2, 3, 4], 6) == [False] * 6
    after = server.state
    assert (after["served"] - before["served"], after["missed"]) == (6, 0)
