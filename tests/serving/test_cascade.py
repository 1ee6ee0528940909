"""Exact decode of shared slots against dense attention: requests join, grow, leave and come back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.types import PagedKV
from sglang_ext.decode.cascade import CascadeDecode
from sglang_ext.decode.grouping import SlotTracker
from sglang_ext.decode.types import DecodeBatch, StepPath
from tests.planted import dense_attention

KV_HEADS, GQA, DIM = 2, 2, 16
WIDTH, SLOTS = 900, 8192


class Server:
    """Requests, their slots and their KV, as a prefix cache leaves them."""

    def __init__(self, **options: Any) -> None:
        gen = torch.Generator().manual_seed(1)
        self.kv = PagedKV(*(torch.randn(SLOTS, KV_HEADS, DIM, generator=gen) for _ in "kv"))
        self.table = torch.zeros(16, WIDTH, dtype=torch.int32)
        self.order = torch.randperm(SLOTS, generator=gen).to(torch.int32).tolist()
        self.rows: dict[int, int] = {}
        self.lens: dict[int, int] = {}
        fields: dict[str, Any] = {"max_batch": 8, "arena_size": 8192, **options}
        cpu, dtype = torch.device("cpu"), torch.float32
        self.tracker = SlotTracker(fields["max_batch"], 2, cpu)
        shape = AttentionShape(KV_HEADS * GQA, KV_HEADS, DIM, DIM, dtype, dtype)
        self.decode = CascadeDecode(shape, self.tracker, fields["arena_size"], cpu)

    def slots(self, count: int) -> torch.Tensor:
        taken, self.order = self.order[:count], self.order[count:]
        return torch.tensor(taken, dtype=torch.int32)

    def join(self, serial: int, shared: torch.Tensor, own: int) -> None:
        row = min(set(range(1, 16)) - set(self.rows.values()))
        self.rows[serial], self.lens[serial] = row, len(shared) + own
        self.table[row] = -1  # another request's slots are never read
        self.table[row, : len(shared)] = shared
        self.table[row, len(shared) : len(shared) + own] = self.slots(own)

    def leave(self, serial: int) -> None:
        self.tracker.ended(serial)
        del self.rows[serial], self.lens[serial]

    def prepare(self, batch: DecodeBatch) -> bool:
        if len(batch.serials) > self.tracker.max_batch:
            return False
        self.tracker.learn(batch)
        plan = self.decode.plan(batch)
        return plan is not None and plan.saved > 0 and self.decode.begin(plan, batch) is StepPath.CASCADE

    def step(self, serials: list[int], padded: int = 0) -> bool:
        """One decode step of all layers; the output of a prepared one is compared with dense attention."""
        for serial in serials:
            self.table[self.rows[serial], self.lens[serial]] = self.slots(1)
            self.lens[serial] += 1
        lens = [self.lens[serial] for serial in serials]
        rows = torch.tensor([self.rows[serial] for serial in serials])
        used = self.prepare(DecodeBatch(serials, lens, self.table, rows, torch.tensor(lens)))
        return self.attended(used, rows, lens, padded)

    def verify(self, serials: list[int], drafts: int) -> bool:
        """One exact step of a round: a row for each request, and for each of its drafts."""
        for serial in serials:
            begin = self.lens[serial]
            self.table[self.rows[serial], begin : begin + drafts + 1] = self.slots(drafts + 1)
        several = [serial for serial in serials for _ in range(drafts + 1)]
        lens = [self.lens[serial] + 1 + draft for serial in serials for draft in range(drafts + 1)]
        rows = torch.tensor([self.rows[serial] for serial in several])
        batch = DecodeBatch(several, lens, self.table, rows, torch.tensor(lens))
        plan = self.decode.plan(batch)
        used = plan is not None and plan.saved > 0 and self.decode.begin(plan, batch) is StepPath.CASCADE
        return self.attended(used, rows, lens)

    def attended(self, used: bool, rows: torch.Tensor, lens: list[int], padded: int = 0) -> bool:
        if used:
            q = torch.randn(len(lens) + padded, KV_HEADS * GQA, DIM)
            out = self.decode.run(q, self.kv, 0, 0.3)
            assert out.shape == q.shape
            assert not out[len(lens) :].any()
            for i, (row, length) in enumerate(zip(rows.tolist(), lens, strict=True)):
                listed = self.table[row, :length].long()
                wanted = dense_attention(q[i : i + 1], self.kv.k_cache[listed], self.kv.v_cache[listed], 0.3).out
                torch.testing.assert_close(out[i : i + 1].double(), wanted, atol=2e-5, rtol=0)
        return used


def test_a_plan_serves_until_a_list_is_full() -> None:
    """And then all lists are given room: requests of other lengths do not each ask for a plan of their own."""
    server = Server()
    prefix = server.slots(300)
    for serial, own in ((1, 3), (2, 40), (3, 62), (4, 100)):
        server.join(serial, prefix, own)
    assert sum(server.step([1, 2, 3, 4]) for _ in range(150)) == 148
    assert server.decode.plans == 2


def test_drafts_share_the_slots_of_their_request() -> None:
    """Of one request, then of two that share some, and as other drafts than those of the round before."""
    server = Server()
    prefix = server.slots(300)
    server.join(1, prefix, 5)
    assert not server.verify([1], 3), "nothing is known of its slots"
    assert not any(server.step([1]) for _ in range(3))
    assert server.verify([1], 3)
    server.lens[1] += 2
    assert server.verify([1], 5)
    server.join(2, prefix, 9)
    assert [server.step([1, 2]) for _ in range(3)] == [False, False, True]
    assert server.verify([1, 2], 3)
    assert [group.length for group in server.tracker.prefixes.groups([1, 1, 2])] == [300]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3))])
def test_any_traffic_stays_exact(seed: int) -> None:
    """Prefixes with branches, members that leave (the founder, too), rows that are taken again at once."""
    rng = random.Random(seed)
    server = Server()
    trunk = server.slots(200)
    branches = [torch.cat([trunk, server.slots(rng.randint(1, 150))]) for _ in range(2)] + [server.slots(260)]
    serial, shared = 0, 0
    for _ in range(60):
        while len(server.rows) < rng.randint(2, 8):
            serial += 1
            server.join(serial, rng.choice(branches)[: rng.randint(150, 400)], rng.randint(1, 40))
        if len(server.rows) > 2 and rng.random() < 0.25:
            server.leave(min(server.rows) if rng.random() < 0.5 else rng.choice(list(server.rows)))
        batch = list(server.rows)
        rng.shuffle(batch)
        shared += server.step(batch, padded=rng.randint(0, 3))
    assert shared > 30


def test_what_does_not_fit_is_left_to_the_backend() -> None:
    server = Server(max_batch=2, arena_size=700)
    prefix = server.slots(300)
    for serial in (1, 2, 3):
        server.join(serial, prefix, 5)
    assert not any(server.step([1, 2, 3]) for _ in range(4))  # too many requests
    assert [server.step([1, 2]) for _ in range(3)] == [False, False, True]
    for _ in range(120):
        server.step([1, 2])
    assert not server.step([1, 2])  # 300 + 2 x 256 slots


def test_a_request_that_must_stay_alone_shares_nothing() -> None:
    server = Server()
    prefix = server.slots(300)
    for serial in (1, 2):
        server.join(serial, prefix, 5)
    lens = [305, 305]
    for _ in range(4):
        batch = DecodeBatch([1, None], lens, server.table, torch.tensor([1, 2]), torch.tensor(lens))
        assert not server.prepare(batch)
