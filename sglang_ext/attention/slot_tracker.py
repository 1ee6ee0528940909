"""What is known of the slots of live requests: learnt in the steps that they run in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_ext.attention.comparisons import SlotComparisons
from sglang_ext.attention.sharing import SharedPrefixes


@dataclass(frozen=True)
class DecodeBatch:
    """One decode step, as SGLang describes it.

    Attributes:
        serials: per batch row, of its request; None for one that shares nothing.
        seq_lens: tokens of each request, the one being decoded included, on the host.
        req_to_token: [num_rows, max_context_len] int32, SGLang's table of slots.
        req_pool_indices: [batch_size], row of the table of each request, on the device.
        device_seq_lens: [batch_size], `seq_lens` on the device.
    """

    serials: Sequence[int | None]
    seq_lens: Sequence[int]
    req_to_token: Tensor
    req_pool_indices: Tensor
    device_seq_lens: Tensor

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """What operations on lists of slots read."""
        return self.req_to_token, self.req_pool_indices, self.device_seq_lens


class SlotTracker:
    """Compares each request once with the others of its batch, and keeps the groups that this makes.

    In its first step a request may still stand on slots of its own that the prefix cache is about to replace, so it is
    compared in the second one; what it shares is known a step or two later, when the device has answered.

    Args:
        max_batch: requests of a batch, at most.
        min_length: leading slots that are worth a group.
        device: where SGLang's table lies.
        implementation: of `common_slots`.
        lockstep: see `SlotComparisons`.
    """

    def __init__(
        self, max_batch: int, min_length: int, device: torch.device, implementation: str, *, lockstep: bool = False
    ) -> None:
        self.max_batch = max_batch
        self.prefixes = SharedPrefixes(min_length)
        self._comparisons = SlotComparisons(max_batch, device, implementation, lockstep=lockstep)
        self._steps: dict[int, int] = {}

    def learn(self, batch: DecodeBatch) -> None:
        """One step of a batch of at most `max_batch` requests. Never waits for the device."""
        for result in self._comparisons.finished():
            if result.serial in self._steps and result.serial not in self.prefixes:
                self.prefixes.add(result.serial, result.length, result.common)
        settled = [serial if serial is not None and serial in self._steps else None for serial in batch.serials]
        for row, serial in enumerate(batch.serials):
            if serial is None:
                continue
            steps = self._steps.get(serial, 0)
            self._steps[serial] = steps + 1
            if steps == 1:
                self._comparisons.start(serial, row, settled, *batch.tables, batch.seq_lens[row])

    def warm(self, batch: DecodeBatch) -> None:
        """Compare the first row with all, to no purpose but that the kernel is compiled."""
        self._comparisons.start(-1, 0, [None] * len(batch.serials), *batch.tables, batch.seq_lens[0])
        self._comparisons.drop(-1)

    def ended(self, serial: int) -> None:
        """A request gave its slots back: finished, aborted or retracted."""
        self._steps.pop(serial, None)
        self._comparisons.drop(serial)
        self.prefixes.remove(serial)

    def __len__(self) -> int:
        return len(self._steps)
