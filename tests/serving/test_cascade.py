"""Exact decode of shared slots against dense attention: requests join, grow, leave and come back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from sglang_ext.decode.cascade import CascadeDecode
from sglang_ext.decode.types import DecodeBatch, StepPath
from tests import sparse_server
from tests.planted import dense_attention


class Server(sparse_server.Server):
    """Exact decode steps of requests that share slots, as a prefix cache leaves them."""

    def __init__(self, max_batch: int = 8, arena_size: int = 8192) -> None:
        super().__init__(torch.device("cpu"), max_batch, size=2, kernels=False)
        self.decode = CascadeDecode(self.shape, self.tracker, arena_size, self.device)

    def enter(self, serial: int, shared: torch.Tensor, own: int) -> None:
        self.join(serial, shared, None, own)
        self.table[self.rows[serial], len(shared) + own :] = -1  # another request's slots are never read

    def step(self, serials: list[int], padded: int = 0) -> bool:
        """One decode step of all layers; whether it is attended here."""
        for serial in serials:
            self.table[self.rows[serial], self.lens[serial]] = self.slots(1)[0]
            self.lens[serial] += 1
        if len(serials) > self.tracker.max_batch:
            return False
        batch = self.batch(serials, [self.lens[serial] for serial in serials])
        self.tracker.learn(batch)
        return self.attended(batch, padded)

    def verify(self, serials: list[int], drafts: int) -> bool:
        """One exact step of a round: a row for each request, and for each of its drafts."""
        for serial in serials:
            begin = self.lens[serial]
            self.table[self.rows[serial], begin : begin + drafts + 1] = self.slots(drafts + 1)
        several = [serial for serial in serials for _ in range(drafts + 1)]
        lens = [self.lens[serial] + 1 + draft for serial in serials for draft in range(drafts + 1)]
        return self.attended(self.batch(several, lens))

    def attended(self, batch: DecodeBatch, padded: int = 0) -> bool:
        """If so, the output is compared with dense attention."""
        plan = self.decode.plan(batch)
        if plan is None or plan.saved <= 0 or self.decode.begin(plan, batch) is not StepPath.CASCADE:
            return False
        q, kv, rows = torch.randn(len(batch.seq_lens) + padded, 4, self.dim), self.caches[0], batch.req_pool_indices
        out = self.decode.run(q, kv, 0, 0.1)
        assert out.shape == q.shape
        assert not out[len(rows) :].any()
        for i, (row, length) in enumerate(zip(rows.tolist(), batch.seq_lens, strict=True)):
            listed = self.table[row, :length].long()
            wanted = dense_attention(q[i : i + 1], kv.k_cache[listed], kv.v_cache[listed], 0.1).out
            torch.testing.assert_close(out[i : i + 1].double(), wanted, atol=2e-5, rtol=0)
        return True


def test_a_plan_serves_until_a_list_is_full() -> None:
    """And then all lists are given room: requests of other lengths do not each ask for a plan of their own."""
    server = Server()
    prefix = server.slots(300)
    for serial, own in ((1, 3), (2, 40), (3, 62), (4, 100)):
        server.enter(serial, prefix, own)
    assert sum(server.step([1, 2, 3, 4]) for _ in range(150)) == 148
    assert server.decode.plans == 2


def test_drafts_share_the_slots_of_their_request() -> None:
    """Of one request, then of two that share some, and as other drafts than those of the round before."""
    server = Server()
    prefix = server.slots(300)
    server.enter(1, prefix, 5)
    assert not server.verify([1], 3), "nothing is known of its slots"
    assert not any(server.step([1]) for _ in range(3))
    assert server.verify([1], 3)
    server.lens[1] += 2
    assert server.verify([1], 5)
    server.enter(2, prefix, 9)
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
            server.enter(serial, rng.choice(branches)[: rng.randint(150, 400)], rng.randint(1, 40))
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
        server.enter(serial, prefix, 5)
    assert not any(server.step([1, 2, 3]) for _ in range(4))  # too many requests
    assert [server.step([1, 2]) for _ in range(3)] == [False, False, True]
    for _ in range(120):
        server.step([1, 2])
    assert not server.step([1, 2])  # 300 + 2 x 256 slots


def test_a_request_that_must_stay_alone_shares_nothing() -> None:
    server = Server()
    prefix = server.slots(300)
    for serial in (1, 2):
        server.enter(serial, prefix, 5)
    for _ in range(4):
        batch = replace(server.batch([1, 2], [305, 305]), serials=[1, None])
        server.tracker.learn(batch)
        assert not server.attended(batch)
