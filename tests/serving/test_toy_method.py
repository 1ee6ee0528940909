"""A method is added by one file and one entry in the registry, decode graphs included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefix_kernels.types import SelectionGroup, pack_lists
from sglang_ext.decode.select_op import Selecting
from sglang_ext.methods.base import METHODS, Method
from tests.serving.admitting import PROMPT, Model, ours
from tests.sparse_server import KV_HEADS, Server
from tests.toy_method import EveryNthBuilder, EveryNthOp, EveryNthSelector, EveryNthSpec


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    toy: Any = Method(EveryNthSpec, EveryNthBuilder, EveryNthSelector, "tests.toy_method:EveryNthOp")
    monkeypatch.setitem(METHODS, "every_nth", toy)


@pytest.mark.parametrize("kernels", [True, False], ids=["its own operation", "the reference"])
def test_it_selects_for_groups_and_single_requests(kernels: bool) -> None:
    server = Server(torch.device("cpu"), kernels=kernels, spec=EveryNthSpec())
    assert isinstance(server.sparse.op, EveryNthOp) == kernels
    first, second = server.prefix(300), server.prefix(210)
    for serial in (1, 2):
        server.join(serial, *first, 5 + serial)
    server.join(3, *second, 9)
    for _ in range(4):
        server.step([1, 2, 3], padded=1)
    if kernels:  # a start measures it
        probe = pack_lists([SelectionGroup(server.lens[1] - 20, 64)], KV_HEADS)
        server.sparse.op.plan_probe(Selecting(3, [(0, 1, 2)], probe))
        lists = server.sparse._lists.of(0)
        server.sparse.op.run(3, torch.zeros(3, 1), 0.1, server.sparse._buffers.arena, None, lists)
        assert lists.counts[0].tolist() == [64] * KV_HEADS


@pytest.mark.parametrize("graphs", [True, False])
def test_a_server_builds_stores_and_decodes_by_it(start: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "decode_graphs", graphs)
    runtime = start([PROMPT], method="every_nth", share_prefixes=graphs)
    assert isinstance(runtime.planner.sparse.op, EveryNthOp) == graphs
    if not graphs:
        runtime.came("a")
        assert ours(runtime, ["a"], [66])
        assert runtime.snapshot()["sparse_steps"] == 1
