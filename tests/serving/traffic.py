"""Requests on a runtime without a server, for tests of what is built beside serving."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from sglang_ext.prefill.background_build import Build
from sglang_ext.runtime import SparseRuntime
from tests.serving.test_runtime import DIM, GQA, KV_HEADS, LAYERS, NAMESPACE, Request, _decode_batch, _mode


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


class Traffic:
    """Requests on one runtime, each on the slots that the prefix cache would give it."""

    def __init__(self, runtime: SparseRuntime) -> None:
        self.runtime = runtime
        self.requests: dict[str, tuple[Request, int]] = {}
        self.gen = torch.Generator().manual_seed(3)

    def prefill(self, rid: str, tokens: list[int], cached: int, chunk: int = 1000) -> None:
        """Admit and prefill; the first `cached` tokens lie on the slots of row 0."""
        runtime, request, row = self.runtime, Request(), len(self.requests)
        self.requests[rid] = (request, row)
        runtime.view.req_to_token[row, :cached] = runtime.view.req_to_token[0, :cached]
        runtime.admit(request, rid, tokens, NAMESPACE)
        for first in range(cached, len(tokens), chunk):
            count = min(chunk, len(tokens) - first)
            batch = SimpleNamespace(
                forward_mode=_mode("extend"), rids=[rid], extend_seq_lens_cpu=[count], extend_prefix_lens_cpu=[first]
            )
            with runtime.step(batch):
                for number in range(LAYERS):
                    q = torch.randn(count, KV_HEADS * GQA * DIM, generator=self.gen)
                    layer = SimpleNamespace(layer_id=number, scaling=DIM**-0.5)
                    assert runtime.attend(q, None, None, layer, batch, True, None) is None
                runtime.prefilled(in_graph=False)

    def decode(self, rid: str, length: int) -> bool:
        """One step; whether an index served it."""
        _, row = self.requests[rid]
        batch = _decode_batch(self.runtime, [rid], [length], [row])
        with self.runtime.step(batch):
            return self.runtime.planned

    def end(self, rid: str, finished: bool = True) -> None:
        request, row = self.requests[rid]
        self.runtime.slot_freed(request, row, finished=finished)

    def retract(self, rid: str) -> None:
        """It loses its slot, and gets another one."""
        self.end(rid, finished=False)
        self.runtime.slot_taken(self.requests[rid][0])

    def decode_until(self, rid: str, length: int, done: Callable[[], bool], seconds: float = 60.0) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.decode(rid, length)
            if done():
                return True
            time.sleep(0.002)
        return False

    def hand_over(self, rid: str, length: int, build: Build) -> None:
        """Decode until one more piece of the build is given, then no more until it is done."""
        given = build.given + 1
        assert self.decode_until(rid, length, lambda: build.given == given)
        assert eventually(lambda: build.built == given)
