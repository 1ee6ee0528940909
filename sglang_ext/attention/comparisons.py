"""Comparing the slots of live requests without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prefix_kernels.slot_lists import common_slots

_LOCKSTEP = 2
"""Steps after which a result is taken in lockstep. With the overlap schedule the host prepares a step when the one
before the last has run, so the result is there: the wait for it is none."""


@dataclass(eq=False)
class _Comparison:
    serial: int
    length: int
    others: Sequence[int | None]
    lengths: Tensor
    done: Any
    begun: int


@dataclass(frozen=True)
class Compared:
    """The result for one request.

    Attributes:
        serial: of the request.
        length: its tokens when it was compared.
        common: leading slots in common with each other one, by serial.
    """

    serial: int
    length: int
    common: dict[int, int]


class SlotComparisons:
    """Comparisons on their way. Results come a step or two later, in the order of their starts.

    Args:
        max_batch: requests of a batch, at most.
        device: where SGLang's table lies.
        implementation: of `common_slots`.
        lockstep: take each result so many steps after its start, not when this device has it: with tensor parallelism
            all ranks must know of it in the same step.
    """

    def __init__(self, max_batch: int, device: torch.device, implementation: str, *, lockstep: bool = False) -> None:
        self._lockstep = lockstep
        self._step = 0
        self._implementation = implementation
        self._out = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._pending: list[_Comparison] = []

    def __contains__(self, serial: int) -> bool:
        return any(one.serial == serial for one in self._pending)

    def start(
        self,
        serial: int,
        row: int,
        serials: Sequence[int | None],
        table: Tensor,
        rows: Tensor,
        seq_lens: Tensor,
        length: int,
    ) -> None:
        """Compare one request of a batch with all others, on the current stream.

        Args:
            serial, row: the request, and its batch row.
            serials: of the whole batch.
            table, rows, seq_lens: as in `common_slots`.
            length: the request's tokens, on the host.
        """
        out = self._out[: len(serials)]
        common_slots(table, rows, seq_lens, row, out, implementation=self._implementation)
        done = None
        if out.device.type == "cuda":
            lengths = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
            lengths.copy_(out, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        else:
            lengths = out.clone()
        self._pending.append(_Comparison(serial, length, tuple(serials), lengths, done, self._step))

    def finished(self) -> list[Compared]:
        """A step begins: take what has come back, without a wait."""
        found = []
        self._step += 1
        while self._pending and self._is_back(self._pending[0]):
            one = self._pending.pop(0)
            pairs = zip(one.others, one.lengths.tolist(), strict=True)
            common = {other: n for other, n in pairs if other is not None and other != one.serial}
            found.append(Compared(one.serial, one.length, common))
        return found

    def _is_back(self, one: _Comparison) -> bool:
        if not self._lockstep:
            return one.done is None or bool(one.done.query())
        if self._step - one.begun < _LOCKSTEP:
            return False
        if one.done is not None:
            one.done.synchronize()
        return True

    def drop(self, serial: int) -> None:
        """A request ended: its own comparison is of no use any more."""
        self._pending = [one for one in self._pending if one.serial != serial]
