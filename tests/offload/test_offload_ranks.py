"""Tensor-parallel ranks that keep KV in host memory: whatever each of them knows alone, they decide alike."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefix_kernels.residents import to_pages
from sglang_ext.offload.kv_files import Move
from sglang_ext.ranks import Ranks
from tests.offload.test_offloading import DIM, PAGE, PREFIX, SLOTS, Request, Served, attachment
from tests.serving.meeting import Meeting

DIGESTS, ROWS, STEPS = "abcd", 4, 300
EVENTS = {"copied", "loaded", "load_failed", "saved", "save_failed", "evicted", "failed"}
CLOCK = threading.local()


class Rank:
    """A scheduler's loop on one rank. What `common` says is said on all ranks, what `own` says on this one.

    Its clock jumps, files of it are damaged, go and cannot be written, moves of it end late and in any order, look-ups
    find something else, copies fail.
    """

    def __init__(self, ranks: Ranks, folder: Path, seed: int) -> None:
        self.common, self.own = random.Random(seed), random.Random(f"{seed} {ranks.rank}")
        CLOCK.skew = lambda: self.own.choice((0, 0, 0, 50, 100))
        self.served = Served(folder=str(folder), num_pages=2 * PREFIX // 16, ranks=ranks)
        self.offloading, self.pools = self.served.offloading, self.served.pools
        self.content = {one: torch.randn(2, 2, PREFIX, 2, DIM) for one in DIGESTS}  # by layer, K and V
        self.waiting: list[tuple[Request, Any]] = []
        self.rows: dict[int, tuple[Request, Any]] = {}
        folder_of: Any = self.offloading._agreed._files
        self.files = [folder_of.path(one) for one in DIGESTS]
        self._write, folder_of.write, self._disk = folder_of.write, self.write, random.Random(f"{seed} {ranks.rank}")
        self.trace: list[Any] = []
        self.hosted = 0
        self._late: list[Move] = []
        self._ended, self.offloading._agreed._mover.ended = self.offloading._agreed._mover.ended, self.ended
        self._backup, self.pools.backup = self.pools.backup, self.backup
        self.offloading.loading = lambda digest: self.own.random() < 0.2

    def ended(self) -> Iterator[Move]:
        self._late += self._ended()
        self.own.shuffle(self._late)
        while self._late and self.own.random() < 0.6:
            yield self._late.pop()

    def write(self, *args: Any) -> None:
        if self._disk.random() < 0.1:
            raise OSError("no space is left")
        self._write(*args)

    def backup(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        if self.own.random() < 0.03:
            raise RuntimeError("the link is down")
        self._backup(slots, pages)

    def run(self) -> list[Any]:
        for number in count():
            if number >= STEPS and self.hosted > 10 and self.offloading.directory.events.keys() >= EVENTS:
                break
            assert number < 50 * STEPS, (self.hosted, self.offloading.directory.events)
            self.step()
            time.sleep(0.001 * self.own.random())
        self.waiting.clear()
        for row in list(self.rows):
            self.end(row)
        deadline = time.monotonic() + 30
        while self.offloading._agreed.moves:
            self.offloading.before_batch([], SLOTS)
            assert time.monotonic() < deadline
        self.offloading.drop()
        state = self.offloading.snapshot()
        assert (state["problem"], state["users"], state["free_pages"]) == (None, 0, self.pools.num_pages)
        assert not self.offloading._agreed._ended
        return self.trace

    def step(self) -> None:
        for _ in range(self.common.choice((0, 0, 1, 2))):
            self.arrive()
        if self.waiting and self.common.random() < 0.1:
            self.waiting.pop(self.common.randrange(len(self.waiting)))
        if self.common.random() < 0.03:
            self.offloading.drop()
        file = self.own.choice(self.files)
        if file.is_file() and self.own.random() < 0.1:
            damage = self.own.choice((file.unlink, lambda: file.write_bytes(file.read_bytes()[:-1] + b"?")))
            with suppress(FileNotFoundError):  # the thread that reads files removes a damaged one meanwhile
                damage()
        held = self.offloading.before_batch(self.waiting, SLOTS)
        self.trace.append(["held", *(place for place, (one, _) in enumerate(self.waiting) if one in held)])
        for request, one in list(self.waiting):
            if request not in held:
                self.match(request, one)
        self.decode()
        for row in list(self.rows):
            if self.common.random() < 0.25:
                self.end(row)
        state = self.offloading.snapshot()
        self.trace += [state, dict(self.offloading.refused)]

    def arrive(self) -> None:
        digest, long = self.common.choice(DIGESTS), self.common.random() < 0.3
        one = attachment(digest)
        one.prompt_len = SLOTS if long else PREFIX + 5
        everywhere = self.common.random() < 0.8
        if not everywhere and self.own.random() < 0.5:
            one.entry = self.own.choice((None, attachment(self.own.choice(DIGESTS)).entry, one.entry, one.entry))
            one.reason = self.own.choice((None, "index_memory"))
        one.index = one.index if everywhere else None  # `Agreement` has told what ranks do not have in common
        self.waiting.append((Request(), one))
        if long:
            self.trace.append(("front", self.offloading.front(one, PREFIX)))

    def match(self, request: Request, one: Any) -> None:
        if one.prompt_len == SLOTS:
            tokens, ready = self.offloading.front(one, PREFIX)
            why = self.offloading.overdue(one) if tokens else "nowhere"
            self.trace.append((tokens, ready, why))
            if why:
                self.waiting.remove((request, one))
            if why or not ready:
                return
        found = self.offloading.wanted(request, one, PREFIX)
        self.trace.append(None if found is None else (found.digest, found.users, found.copied))
        row = next((row for row in range(ROWS) if row not in self.rows), None)
        if row is None:
            return
        self.waiting.remove((request, one))
        self.rows[row] = request, one
        assert self.offloading.slot_taken(request, row) == (found is not None)
        slots = torch.arange(PREFIX) + PAGE + row * PREFIX
        self.served.table[row, :PREFIX] = slots
        if found is not None:
            self.hosted += 1
            for layer, kv in enumerate(self.content[found.digest]):
                assert torch.equal(self.pools.layer(layer)[found.pages], to_pages(*kv)), "what it does not say"
        elif one.entry is not None:
            for layer, kv in zip(self.pools.device, self.content[one.entry.digest], strict=True):
                layer[:, slots] = kv

    def decode(self) -> None:
        rows, ones = list(self.rows), [one for _, one in self.rows.values()]
        self.served.runs[:] = ones
        if rows:
            lens = torch.full((len(rows),), 1000)
            batch = SimpleNamespace(req_pool_indices=torch.tensor(rows), batch_size=len(rows), seq_lens_cpu=lens)
            self.offloading.decoding(batch, [one if one.index else None for one in ones])

    def end(self, row: int) -> None:
        self.offloading.slot_freed(row)
        del self.rows[row]
        self.served.runs[:] = [one for _, one in self.rows.values()]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_decide_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, seed: int) -> None:
    monkeypatch.setattr("sglang_ext.offload.offloading.COPY_BYTES", 40 * 2 * 2 * 2 * DIM * 4)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + CLOCK.skew())
    monkeypatch.setattr("sglang_ext.offload.agreement.time", clock)
    one, *others = Meeting(size).run(lambda ranks: Rank(ranks, tmp_path / "kv", seed).run())
    for other in others:
        assert other == one


def test_plain_decode_steps_do_without_a_collective(tmp_path: Path) -> None:
    asked = []

    class Counted(Ranks):
        def least(self, values: Any) -> list[int]:
            asked.append(len(values))
            return super().least(values)

    served = Served(folder=str(tmp_path / "kv"), ranks=Counted())
    served.slots(0, 0, PREFIX)
    one = attachment()
    served.decode(0, one)
    assert len(asked) == 2, "of the request, and of the copy"
    while served.offloading._agreed.moves:
        served.offloading.before_batch([], SLOTS)
    asked.clear()
    for _ in range(100):
        served.offloading.before_batch([], SLOTS)
        served.decode(0, one)
    assert not asked
