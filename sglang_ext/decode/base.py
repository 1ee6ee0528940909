"""The one interface of a decode step's attention: a backend plans a batch, begins the step, and runs its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from torch import Tensor

from prefix_kernels.types import PagedKV
from sglang_ext.decode.types import DecodeBatch, StepPath

PlanT = TypeVar("PlanT")


class DecodeBackend(ABC, Generic[PlanT]):
    """One way to attend decode steps in groups.

    Of each step: `plan` says how, `cost_us` what that takes, `begin` writes the tables. Then every layer calls `run`,
    or a graph that was captured with these calls is replayed. Whatever a captured launch reads lies in buffers of fixed
    place, and `begin` is the only one that writes them.

    Attributes:
        lse: [max_batch, num_qo_heads] fp32, natural: log-sum-exp of what the last `run` attended, by batch row.
    """

    lse: Tensor

    @abstractmethod
    def plan(self, batch: DecodeBatch) -> PlanT | None:
        """How a batch would be attended; None: not by this backend. Writes nothing that a kernel reads."""

    @abstractmethod
    def cost_us(self, plan: PlanT) -> float | None:
        """Microseconds of all layers' attention, by what was measured at the start; None: nothing was."""

    @abstractmethod
    def begin(self, plan: PlanT, batch: DecodeBatch) -> StepPath | None:
        """Write the tables of a planned step, on the current stream. Never waits for the device.

        Returns:
            The path of the step: which graph is replayed. None: its lists do not fit, and nothing was written.
        """

    @abstractmethod
    def run(self, q: Tensor, kv: PagedKV, layer: int, sm_scale: float) -> Tensor:
        """One layer of the step that has begun, or of the one being captured.

        Args:
            q: [batch_size or more, num_qo_heads, head_dim]; rows beyond the batch come out as 0.
            kv: the layer's pool buffers; the new tokens' K and V are already written.
            layer: its number.
            sm_scale: attention scale.

        Returns:
            [rows of q, num_qo_heads, v_head_dim] in q's dtype, new memory.
        """

    @abstractmethod
    @contextmanager
    def capturing(self, size: int, path: StepPath) -> Iterator[None]:
        """Within the block `run` may be captured, for batches of at most `size` requests, on one of `paths`."""

    @property
    @abstractmethod
    def paths(self) -> tuple[StepPath, ...]:
        """Paths that have graphs of their own."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Device memory of the buffers of fixed place."""
