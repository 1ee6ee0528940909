"""What passes between the planner, its backends and the layers of one decode step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from torch import Tensor

from sglang_ext.prefix.residency import ResidentIndex
from sglang_ext.prefix.suffix_index import SuffixIndex

Index: TypeAlias = ResidentIndex | SuffixIndex
"""What a group selects with: the index of a prefix, or of one request's suffix behind it."""


class StepPath(str, Enum):
    """How a step is attended here; the names of the decode graphs."""

    CASCADE = "cascade"
    """Exactly; the slots that a group has in common are read once."""
    SPARSE = "sparse"
    KEPT = "kept"
    """Sparsely, by what an earlier step selected (`search_period`)."""

    @property
    def counted(self) -> str:
        """The path that a step counts for."""
        return "cascade" if self is StepPath.CASCADE else "sparse"


@dataclass(frozen=True, eq=False)
class HostPrefix:
    """A prefix whose KV lies in host memory: the first entries of its rows of the table name no slots of it.

    Attributes:
        pages: [prefix_len / PAGE_TOKENS] int64 on the host, pages of the host's pool; whoever decodes holds them.
        dense_slots: [prefix_len] int32 on the device, where layers that attend all have it in their pools; None: in
            none.
    """

    pages: Tensor
    dense_slots: Tensor | None = None


@dataclass(frozen=True)
class DecodeBatch:
    """One decode step, as SGLang describes it, and which indexes its rows may use.

    Attributes:
        serials: per batch row, of its request; None for one that shares nothing.
        seq_lens: tokens of each request, the one being decoded included, on the host.
        req_to_token: [num_rows, max_context_len] int32, SGLang's table of slots.
        req_pool_indices: [batch_size], row of the table of each request, on the device.
        device_seq_lens: [batch_size], `seq_lens` on the device.
        indexes: per row, the ready index to use, shorter than its sequence; None: the row attends all of it. Empty
            where no row has one.
        suffix: per row, the index of its suffix tokens behind that, with the arrays of all layers; None: these are
            attended in full. Empty where no row has one.
        hosts: per row, its prefix in host memory, as long as its index says; None: all its slots are real. Empty where
            no row has one.
    """

    serials: Sequence[int | None]
    seq_lens: Sequence[int]
    req_to_token: Tensor
    req_pool_indices: Tensor
    device_seq_lens: Tensor
    indexes: Sequence[ResidentIndex | None] = ()
    suffix: Sequence[SuffixIndex | None] = ()
    hosts: Sequence[HostPrefix | None] = ()

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """What operations on lists of slots read."""
        return self.req_to_token, self.req_pool_indices, self.device_seq_lens


class PrefixGroup(NamedTuple):
    """A prefix and the requests of a batch that sit on its slots; or one request's suffix behind it.

    Attributes:
        key: what makes two of them the same in two steps.
        rows: batch rows, ascending.
        length: tokens.
        begin: position of the first one.
        host: where its KV lies; None: at its slots.
    """

    key: Hashable
    rows: tuple[int, ...]
    length: int
    begin: int = 0
    host: HostPrefix | None = None

    @property
    def saved(self) -> int:
        """Tokens that need not be read a second time where all rows attend them together."""
        return (len(self.rows) - 1) * self.length


class GroupRead(NamedTuple):
    """What a step reads of one prefix.

    Attributes:
        rows: requests.
        prefix_len: tokens.
        budget: tokens that layers which select attend.
    """

    rows: int
    prefix_len: int
    budget: int
