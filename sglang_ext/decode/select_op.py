"""A method's part of a decode step: from queries to lists of slots. The reference, which every method has."""

from __future__ import annotations

import itertools
import pkgutil
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import ALIGNED, SelectedLists, Selection, SelectionGroup
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.decode.types import Index
from sglang_ext.methods import METHODS, make_selector
from sglang_ext.methods.base import IndexSpec, LeveledSelector, SelectArgs, Selector, summed_every
from sglang_ext.options import SparseAttnConfig

if TYPE_CHECKING:
    from prefix_kernels.anchor_selection import ScoredTokens


@dataclass(frozen=True)
class ListSizes:
    """What a `SelectOp` must hold.

    Attributes:
        max_groups: of a step, at most.
        list_entries: of the lists that it writes, together.
        max_batch: requests of a batch, at most.
        max_prefix_len: tokens of a prefix, at most.
        room: tokens of all prefixes of a batch, at most.
        groups_of_a_row: that a request may stand in, each with other tokens.
        ahead: anchor layers, ascending, whose candidates a step names for the next one; none: each names its own.
        entry_tokens: of the lists that it writes, see `pooled_scores.ScoreShape`.
    """

    max_groups: int
    list_entries: int
    max_batch: int
    max_prefix_len: int
    room: int
    groups_of_a_row: int
    ahead: tuple[int, ...] = ()
    entry_tokens: int = 1

    def hold(self, lengths: Sequence[int]) -> bool:
        """Whether groups of so many tokens can be scored in one step."""
        return max(lengths) <= self.max_prefix_len and sum(n + ALIGNED for n in lengths) <= self.room


@dataclass(frozen=True)
class OpContext:
    """What an operation is made for.

    Attributes:
        shape: of a layer.
        config: pooling, how many tokens enter its sums, budgets.
        num_layers: of the model.
        sizes: what it must hold.
        device: of the KV pool.
    """

    shape: AttentionShape
    config: SparseAttnConfig
    num_layers: int
    sizes: ListSizes
    device: torch.device


class Selecting(NamedTuple):
    """What a step selects for.

    Attributes:
        size: of the batch, as captured.
        rows: batch rows of each group; no groups: nothing is selected.
        groups: lengths, windows, budgets, where each group's table of slots begins in the arena, and where its lists
            are written.
    """

    size: int
    rows: Sequence[tuple[int, ...]] = ()
    groups: Sequence[SelectionGroup] = ()


class SelectOp(ABC):
    """Selects for all groups of a step at one layer. `plan` is called once a step, `run` once for each anchor layer.

    What a captured `run` reads lies in buffers of fixed place, which `plan` writes.

    Attributes:
        ends_in_lists: the last launch of every run is what `after_lists` of `GroupedAttention.run` wants before it.
    """

    ends_in_lists: ClassVar[bool] = False

    @abstractmethod
    def number_of(self, index: Index) -> int:
        """A number that no other index has.

        Raises:
            ValueError: arrays that the operation cannot read; what residency has loaded it can.
        """

    @abstractmethod
    def fits(self, lengths: Sequence[int], budgets: Sequence[int]) -> bool:
        """Whether so much can be selected in one step of groups of so many tokens."""

    @abstractmethod
    def tile(self, size: int) -> Hashable:
        """What serves batches of that size, with tables of its own; equal where the same serves both."""

    @abstractmethod
    def plan(self, step: Selecting, indexes: Sequence[Index]) -> None:
        """Write the tables of the next runs, without a wait.

        Args:
            step: what is selected.
            indexes: of its groups, that `number_of` was asked for.
        """

    @abstractmethod
    def run(
        self, size: int, q: Tensor, sm_scale: float, slot_table: Tensor | None, layer: int | None, lists: SelectedLists
    ) -> None:
        """Select as planned.

        Args:
            size: of the batch, as captured.
            q: [size or more, num_qo_heads, head_dim].
            sm_scale: attention scale.
            slot_table: arena in which the groups' tables of slots lie; None: `lists` has positions only.
            layer: whose arrays; None: those of `plan_probe`.
            lists: where the selection goes.
        """

    @abstractmethod
    def plan_probe(self, step: Selecting) -> None:
        """Write the tables of groups on made-up arrays, so that `run` without a layer can be timed."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Device memory of the buffers of fixed place."""


FIRST_PART = "first."
"""What arrays of an index that name candidates begin with."""


class AheadOp(SelectOp):
    """One that names candidates first, and may name those of the next step with the queries of this one."""

    @abstractmethod
    def plan_ahead(self, step: Selecting, indexes: Sequence[Index]) -> None:
        """As `plan`, of `look_ahead` alone: of the indexes the arrays that name candidates suffice."""

    @abstractmethod
    def first_groups(self, groups: Sequence[SelectionGroup]) -> list[SelectionGroup]:
        """What is named of groups, and where it is listed in each layer's part of what is named."""

    @abstractmethod
    def named_ahead(self) -> list[Tensor]:
        """What the last `look_ahead` of this plan named, of all anchor layers; written by the next one."""

    @abstractmethod
    def look_ahead(self, size: int, queries: Sequence[Tensor], sm_scale: float) -> None:
        """Name the candidates of the next step, for all anchor layers at once.

        Args:
            size: of the batch, as captured.
            queries: of each anchor layer (`ListSizes.ahead`) in this step, as of `run`.
            sm_scale: attention scale of all.
        """

    @abstractmethod
    def run_behind(
        self, size: int, q: Tensor, sm_scale: float, slot_table: Tensor | None, layer: int | None, lists: SelectedLists
    ) -> None:
        """As `run`, among the candidates that the last `look_ahead` of this plan named; without a layer the first's."""


class ScoringOp(SelectOp):
    """One that can also score alone, for methods made of others."""

    @abstractmethod
    def stretches(self, size: int) -> dict[int, tuple[int, int]]:
        """Of each group that is planned, the number of its first item, and of its items."""

    @abstractmethod
    def score(self, size: int, q: Tensor, sm_scale: float, layer: int | None) -> ScoredTokens:
        """Score as planned; arguments as of `run`."""


class ReferenceOp(AheadOp):
    """Any method's selector, in torch, group by group. It waits and allocates as it likes: not for decode graphs.

    Args:
        selector: of the method.
        pooling: over the rows and query heads of a group.
        ahead: see `ListSizes`; of a `LeveledSelector` only.
    """

    nbytes = 0

    def __init__(self, selector: Selector[Any], pooling: Pooling, ahead: tuple[int, ...] = ()) -> None:
        self._selector, self._pooling, self._layers = selector, pooling, ahead
        self._candidates: dict[tuple[int, int], Tensor] = {}
        self._numbers = itertools.count()
        self._known: weakref.WeakKeyDictionary[Index, int] = weakref.WeakKeyDictionary()
        self._planned: list[tuple[tuple[int, ...], SelectionGroup, weakref.ref[Index]]] = []

    def number_of(self, index: Index) -> int:
        return self._known.setdefault(index, next(self._numbers))

    def fits(self, lengths: Sequence[int], budgets: Sequence[int]) -> bool:
        """See the base: whatever there are lists for."""
        return True

    def tile(self, size: int) -> Hashable:
        return size if self._layers else None  # queries of several layers lie as many apart as a batch has

    def plan(self, step: Selecting, indexes: Sequence[Index]) -> None:
        self._candidates = {}
        # Whoever decodes holds its index. Held here, too, an evicted one would keep its memory until the next step.
        self._planned = list(zip(step.rows, step.groups, map(weakref.ref, indexes), strict=True))

    def run(
        self, size: int, q: Tensor, sm_scale: float, slot_table: Tensor | None, layer: int | None, lists: SelectedLists
    ) -> None:
        self._run(q, sm_scale, slot_table, layer, lists, {})

    def run_behind(
        self, size: int, q: Tensor, sm_scale: float, slot_table: Tensor | None, layer: int | None, lists: SelectedLists
    ) -> None:
        self._run(q, sm_scale, slot_table, layer, lists, self._candidates)

    def _run(
        self,
        q: Tensor,
        sm_scale: float,
        slot_table: Tensor | None,
        layer: int | None,
        lists: SelectedLists,
        candidates: Mapping[tuple[int, int], Tensor],
    ) -> None:
        assert layer is not None
        for number, (rows, group, index) in enumerate(self._groups()):
            named = candidates.get((layer, number))
            if named is None:
                found = self.select(q[rows], group, index, layer, sm_scale, lists.counts.shape[1])
            else:
                args = self._args(group, sm_scale)
                found = self._leveled.select_among(index.layers[layer], q[rows], args, named)
            lists.counts[number] = found.counts
            written = [(lists.positions, found.positions)]
            if slot_table is not None:
                assert lists.slots is not None
                table = slot_table[group.slot_start : group.slot_start + group.prefix_len]
                written.append((lists.slots, table[found.positions.clamp(min=0).long()]))
            for arena, entries in written:
                group.lists_in(arena, len(entries))[:, : entries.shape[1]] = entries

    def look_ahead(self, size: int, queries: Sequence[Tensor], sm_scale: float) -> None:
        self._candidates = {
            (layer, number): self._leveled.candidates(index.layers[layer], q[rows], self._args(group, sm_scale))
            for layer, q in zip(self._layers, queries, strict=True)
            for number, (rows, group, index) in enumerate(self._groups())
            if group.budget < group.prefix_len
        }

    def plan_ahead(self, step: Selecting, indexes: Sequence[Index]) -> None:
        self.plan(step, indexes)

    def first_groups(self, groups: Sequence[SelectionGroup]) -> list[SelectionGroup]:
        return list(groups)

    def named_ahead(self) -> list[Tensor]:
        return list(self._candidates.values())

    @property
    def _leveled(self) -> LeveledSelector[Any]:
        assert isinstance(self._selector, LeveledSelector)
        return self._selector

    def _groups(self) -> Iterator[tuple[list[int], SelectionGroup, Index]]:
        for rows, group, held in self._planned:
            index = held()
            assert index is not None, "an index that this step uses was let go"
            yield list(rows), group, index

    def select(
        self, q: Tensor, group: SelectionGroup, index: Index, layer: int, sm_scale: float, num_kv_heads: int
    ) -> Selection:
        """The positions of one group at one layer; all where the budget covers them."""
        if group.budget >= group.prefix_len:
            return Selection.all(group.prefix_len, num_kv_heads, q.device)
        return self._selector.select(index.layers[layer], q, self._args(group, sm_scale))

    def _args(self, group: SelectionGroup, sm_scale: float) -> SelectArgs:
        return SelectArgs(
            prefix_len=group.prefix_len,
            budget=group.budget,
            num_sink=group.num_sink,
            num_recent=group.num_recent,
            sm_scale=sm_scale,
            pooling=self._pooling,
        )

    def plan_probe(self, step: Selecting) -> None:
        """See the base.

        Raises:
            TypeError: costs are measured for decode graphs only.
        """
        raise TypeError("expected an operation of decode graphs to time, got the reference")


def selection_group(config: SparseAttnConfig, prefix_len: int, budget: int, slot_start: int = 0) -> SelectionGroup:
    """A group as an operation selects for it: sink and recent window count towards the budget.

    Args:
        config: of the windows.
        prefix_len: tokens of the prefix.
        budget: from `SparseAttnConfig.group_budget`.
        slot_start: where its table of slots begins in the arena.
    """
    num_sink = min(config.num_sink_tokens, budget)
    recent = min(config.num_recent_pages * PAGE_TOKENS, max(budget - num_sink, 0))
    return SelectionGroup(prefix_len, budget, num_sink=num_sink, num_recent=recent, slot_start=slot_start)


def graph_refusal(method: str) -> str | None:
    """Why a method's indexes cannot be used inside decode graphs; None if they can."""
    if METHODS[method].decode_op is not None:
        return None
    others = ", ".join(name for name, one in METHODS.items() if one.decode_op is not None)
    return f"method {method} has no kernels for decode graphs, as {others} have"


def graph_op(spec: IndexSpec, context: OpContext) -> SelectOp:
    """A method's operation for decode graphs: `METHODS[...].decode_op`, called with these.

    Args:
        spec: of the method.
        context: what it is made for.

    Raises:
        ValueError: it has none, or none for this spec.
    """
    refusal, named = graph_refusal(spec.method), METHODS[spec.method].decode_op
    if named is None:
        raise ValueError(f"{refusal}; name one of these")
    op: SelectOp = pkgutil.resolve_name(named)(spec, context)
    return op


def make_op(spec: IndexSpec, context: OpContext, *, captured: bool) -> SelectOp:
    """The operation of a method. What `graph_refusal` names has the reference only.

    Args:
        spec: of the method.
        context: what it is made for.
        captured: whether decode steps replay graphs.
    """
    if captured and graph_refusal(spec.method) is None:
        return graph_op(spec, context)
    selector = make_selector(spec, summed_every(context.config))
    return ReferenceOp(selector, Pooling(context.config.pooling), context.sizes.ahead)
