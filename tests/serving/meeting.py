"""Ranks of a tensor-parallel group as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from sglang_ext.ranks import Ranks

SECONDS = 60.0


class Meeting:
    """A rank that stays away, or comes with another number of values, breaks it for all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=SECONDS)

    def rank(self, number: int) -> Ranks:
        def gathered(value: Any) -> list[Any]:
            self._given[number] = value
            self._barrier.wait()
            found = list(self._given)
            self._barrier.wait()
            return found

        def least(values: Sequence[int]) -> list[int]:
            return [min(column) for column in zip(*gathered(list(values)), strict=True)]

        def most(values: Sequence[float]) -> list[float]:
            return [max(column) for column in zip(*gathered(list(values)), strict=True)]

        group = {"gathered": gathered, "least": least, "most": most}
        return SimpleNamespace(rank=number, size=self.size, **group)

    def run(self, work: Callable[[Ranks], Any]) -> list[Any]:
        def one(number: int) -> Any:
            try:
                return work(self.rank(number))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(one, number) for number in range(self.size)]
            return [future.result(SECONDS) for future in futures]
