"""Which requests of a decode batch share which prefix: made on the host, once per step, before any layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from prefix_kernels.types import Selection
from sglang_ext.attention.private_index import PrivateIndex, PrivateRules
from sglang_ext.prefix.requests import Attachment, Search, SharedSlots
from sglang_ext.prefix.residency import ResidentIndex

Index = TypeVar("Index", ResidentIndex, PrivateIndex)


@dataclass(eq=False)
class Group(Generic[Index]):
    """The requests of one batch that sit on the same slots of the same prefix; or one request's own tokens behind it.

    Attributes:
        index: what selects. Of own tokens it makes its arrays in the step itself.
        slots: [prefix_len] int64, position -> KV slot, valid for this step.
        rows: [num_rows] int64 on the device: batch rows.
        num_rows: the same, on the host.
        selections: per anchor layer that ran in this step, for the layers that reuse it.
        queries: per anchor layer that searched in this step, [num_rows, num_qo_heads, head_dim] what it searched by.
        kept: per anchor layer, what an earlier step's search found; empty in a step that searches.
    """

    index: Index
    slots: Tensor
    rows: Tensor
    num_rows: int
    selections: dict[int, Selection] = field(default_factory=dict)
    queries: dict[int, Tensor] = field(default_factory=dict)
    kept: Mapping[int, Selection] = field(default_factory=dict)

    @property
    def prefix_len(self) -> int:
        """Tokens of the prefix."""
        return self.index.prefix_len


@dataclass(eq=False)
class DecodePlan:
    """Everything that the layers of one decode step need. Owned by the step; dropped after it.

    Attributes:
        groups: at least one.
        kv_indptr: [batch_size + 1] int64: bounds of each request's suffix in `kv_indices`.
        kv_indices: slots of [start, seq_len) of every request; start is 0 without a group, else it is where its prefix
            ends, and behind what `private` has of it.
        private: of requests with many tokens of their own: those that are selected from, one request a group.
    """

    groups: list[Group[ResidentIndex]]
    kv_indptr: Tensor
    kv_indices: Tensor
    private: list[Group[PrivateIndex]] = field(default_factory=list)


def make_plan(
    attachments: Sequence[Attachment | None],
    ready: Sequence[ResidentIndex | None],
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Sequence[int],
    shared_by_digest: dict[str, list[SharedSlots]],
    search_period: int = 1,
    private_rules: PrivateRules | None = None,
) -> DecodePlan | None:
    """Group a batch; None when no request has a usable index.

    Two requests form one group only when their slots of the whole prefix were compared and found equal. That
    comparison happens once per request, at its second decode step: by then the prefix cache has replaced
    the slots of a duplicate prefill by the shared ones, and they no longer change while the request lives.
    Until then a request is a group of one that reads its own row.

    Args:
        attachments: per row, None for a request that was never admitted here.
        ready: per row, the index to use in this step, or None for dense.
        req_to_token: [num_rows, max_context_len] SGLang's table; rows are read here, never later.
        req_pool_indices: [batch_size] row of each request.
        seq_lens: [batch_size] tokens of each request, the one being decoded included.
        shared_by_digest: tables known so far per index digest; extended in place.
        search_period: decode steps that use one search; only a group whose members stay the same keeps it.
        private_rules: which requests' tokens behind their prefixes are selected from; None: all are attended in full.
    """
    if not any(ready):
        return None
    rows_of: dict[int, tuple[ResidentIndex, Tensor, list[int]]] = {}
    starts = [0] * len(seq_lens)
    for row, (attachment, index) in enumerate(zip(attachments, ready, strict=True)):
        if attachment is None or index is None:
            continue
        starts[row] = index.prefix_len
        if attachment.shared is not None:
            slots = attachment.shared.slots
        else:
            slots = req_to_token[req_pool_indices[row], : index.prefix_len].to(torch.int64)
            if attachment.steps > 0:
                slots = _settle(attachment, index, slots, shared_by_digest).slots
        attachment.steps += 1
        rows_of.setdefault(id(slots), (index, slots, []))[2].append(row)
    device = req_to_token.device
    groups = []
    for index, slots, rows in rows_of.values():
        group = Group(index, slots, torch.tensor(rows, dtype=torch.int64, device=device), len(rows))
        if search_period > 1:
            _keep_search(group, [attachments[row] for row in rows], search_period)
        groups.append(group)
    private = []
    own = private_rules.renew(attachments, ready, seq_lens, len(starts)) if private_rules is not None else []
    for row, index_of_own in enumerate(own):
        if index_of_own is None:
            continue
        begin, starts[row] = starts[row], starts[row] + index_of_own.prefix_len
        # By a tensor: a number would have to come from the device first.
        slots = req_to_token[req_pool_indices[row : row + 1]][0, begin : starts[row]].to(torch.int64)
        private.append(Group(index_of_own, slots, torch.tensor([row], dtype=torch.int64, device=device), 1))
    kv_indptr, kv_indices = _suffixes(req_to_token, req_pool_indices, starts, seq_lens)
    return DecodePlan(groups, kv_indptr, kv_indices, private)


def _keep_search(group: Group[Any], members: Sequence[Attachment | None], period: int) -> None:
    """Give a group what its last search found, or let this step's layers fill a new one."""
    table = members[0].shared if members[0] is not None else None
    if table is None:
        return  # a request's first step: its slots may yet turn out to be a group's
    serials = frozenset(member.serial for member in members if member is not None)
    search = table.search
    if search is not None and search.members == serials and search.steps < period:
        search.steps += 1
        group.kept = search.selections
    else:
        table.search = Search(serials, group.selections)


def _settle(
    attachment: Attachment,
    index: ResidentIndex,
    own: Tensor,
    shared_by_digest: dict[str, list[SharedSlots]],
) -> SharedSlots:
    tables = shared_by_digest.setdefault(index.entry.digest, [])
    tables[:] = [table for table in tables if table.members > 0]
    for table in tables:
        if torch.equal(table.slots, own):  # waits for the device; once per request
            break
    else:
        table = SharedSlots(own.clone())
        tables.append(table)
    table.members += 1
    attachment.shared = table
    return table


def _suffixes(
    req_to_token: Tensor, req_pool_indices: Tensor, starts: Sequence[int], seq_lens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    device = req_to_token.device
    start = torch.tensor(starts, dtype=torch.int64)
    length = torch.tensor(seq_lens, dtype=torch.int64) - start
    indptr = torch.zeros(len(starts) + 1, dtype=torch.int64)
    indptr[1:] = length.cumsum(0)
    total = int(indptr[-1])
    row = torch.repeat_interleave(torch.arange(len(starts)), length)
    column = torch.arange(total) - indptr[row] + start[row]
    slots = req_to_token[req_pool_indices.to(torch.int64)[row.to(device)], column.to(device)]
    return indptr.to(device), slots.to(torch.int64)
