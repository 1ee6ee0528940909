"""`SelectOp` of methods that score tokens or blocks of them by products: one kernel for each height of a tile."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorConfig, AnchorSelection, Form, ScoredTokens, default_config
from prefix_kernels.launching import send
from prefix_kernels.pooled_scores import (
    ARRAYS,
    HEAD_FIELDS,
    LEAST_BLOCK,
    ScoredGroup,
    ScoreInputs,
    ScoreShape,
    array_addresses,
    check_group,
)
from prefix_kernels.types import CandidateForm, SelectedLists, SelectionGroup, list_stride, place_scores
from sglang_ext.decode.select_op import OpContext, ScoringOp, Selecting
from sglang_ext.decode.types import Index
from sglang_ext.methods.arrays import ROW_INDPTR, IndexSize
from sglang_ext.methods.base import IndexSpec
from sglang_ext.prefix.residency import LayerArrays

_numbers = itertools.count()


class LayerRows(NamedTuple):
    """Where a layer's codes lie.

    Attributes:
        first_rows: per KV head, first of its rows among the codes.
        block_sizes: per KV head, tokens of a block; none: a row is a token.
        row_tokens: per KV head, as `ScoredGroup.row_tokens`.
    """

    first_rows: tuple[int, ...]
    block_sizes: tuple[int, ...] = ()
    row_tokens: tuple[int, ...] = ()

    def group(
        self,
        rows: tuple[int, ...],
        count: int,
        score_begins: tuple[int, ...],
        list_begins: tuple[int, ...] = (),
        arrays: tuple[Tensor | None, ...] = (),
    ) -> ScoredGroup:
        """What `rows` of a batch choose from."""
        return ScoredGroup(
            rows, count, self.first_rows, score_begins, arrays, self.block_sizes, list_begins, self.row_tokens
        )


class KnownIndex(NamedTuple):
    """What is known of an index, on the host.

    Attributes:
        number: its own.
        first: of layer 0.
        addresses: int64 [num_layers, ARRAYS], of each layer's arrays.
        heads: int64 [num_layers, num_kv_heads, HEAD_FIELDS], or of layer 0 alone where all are alike.
    """

    number: int
    first: LayerRows
    addresses: Tensor
    heads: Tensor


class ScoredOp(ScoringOp):
    """What anchor layers select with: in two launches on a GPU.

    A method's own operation says what a layer's arrays are (`arrays`, `rows`).

    Args:
        spec: of the method.
        shape: what is scored.
        context: see `decode.select_op.OpContext`. Hopper's own kernel, which multiplies in halves, scores no queries of
            fp32.
        alike: whether all layers have blocks of the same sizes.

    Attributes:
        candidates: int32, of listed candidates: where `plan` says that lists are. Not owned.
        known: of the indexes that `number_of` was asked for.

    Raises:
        ValueError: rows of the index are too wide for the kernels.
    """

    ends_in_lists = True
    candidates: Tensor | None = None

    def __init__(self, spec: IndexSpec, shape: ScoreShape, context: OpContext, *, alike: bool = True) -> None:
        layer, num_layers, sizes, device = context.shape, context.num_layers, context.sizes, context.device
        self.shape = shape
        self._spec, self._head_dim, self._sizes, self._device = spec, layer.head_dim, sizes, device
        self._specialized = device.type == "cuda" and layer.dtype is not torch.float32
        self.tile_of(sizes.max_batch)
        self._scores = torch.zeros(shape.num_kv_heads * sizes.room, dtype=torch.float32, device=device)
        tables = (num_layers, sizes.max_groups)
        self._addresses = torch.zeros(*tables, ARRAYS, dtype=torch.int64, device=device)
        heads = (0 if alike else num_layers, sizes.max_groups, shape.num_kv_heads, HEAD_FIELDS)
        self._heads = torch.zeros(heads, dtype=torch.int64, device=device)
        self._probed: list[LayerArrays] = []
        self._found: dict[int, AnchorSelection] = {}
        self.known: WeakKeyDictionary[Index, KnownIndex] = WeakKeyDictionary()

    @abstractmethod
    def arrays(self, layer: LayerArrays) -> tuple[Tensor | None, ...]:
        """A layer's arrays, as `ScoredGroup.arrays` names them."""

    @abstractmethod
    def rows(self, layers: Sequence[LayerArrays], prefix_len: int) -> list[LayerRows]:
        """Where layers' arrays have what; may wait for the device."""

    def number_of(self, index: Index) -> int:
        if index not in self.known:
            none = (0,) * self.shape.num_kv_heads
            # Arrays themselves are not kept: residency may let them go.
            arrays = [self.arrays(layer) for layer in index.layers]
            addresses = [array_addresses(self.shape, of) for of in arrays]
            layers = list(index.layers) if len(self._heads) else [index.layers[0]]
            rows = self.placed(layers, index.prefix_len)
            length = -(-index.prefix_len // self.entry_tokens)
            lists = none if self.shape.form is CandidateForm.LISTED else ()
            groups = [one.group((0,), length, none, lists) for one in rows]
            for group, of in zip(groups * (len(arrays) // len(groups)), arrays, strict=True):
                check_group(self.shape, replace(group, arrays=of))
            heads = [group.heads for group in groups]
            found = (torch.tensor(table, dtype=torch.int64) for table in (addresses, heads))
            self.known[index] = KnownIndex(next(_numbers), rows[0], *found)
        return self.known[index].number

    def placed(self, layers: Sequence[LayerArrays], prefix_len: int) -> list[LayerRows]:
        """As `rows`, with sizes of blocks in entries of the lists that are made. Where entries are what is scored, they
        share a block's row."""
        found = []
        for one in self.rows(layers, prefix_len):
            sizes = tuple(size // self.entry_tokens for size in one.block_sizes)
            blocks = self.shape.form.is_block
            found.append(LayerRows(one.first_rows, sizes if blocks else (), () if blocks else sizes))
        return found

    @property
    def entry_tokens(self) -> int:
        """Tokens of an entry of the lists that are made."""
        return self._sizes.entry_tokens

    def fits(self, lengths: Sequence[int], budgets: Sequence[int]) -> bool:
        return self._sizes.hold(lengths)

    def tile(self, size: int) -> Hashable:
        """See the base: one for each height of the tile."""
        return self._of(size)

    def tile_of(self, size: int) -> tuple[AnchorConfig, int]:
        """What serves batches of that size, and the requests of its batches, at most."""
        on_gpu, most = self._device.type == "cuda", self._sizes.max_batch
        capability = torch.cuda.get_device_capability(self._device) if on_gpu else (9, 0)

        def serves(requests: int) -> AnchorConfig:
            return default_config(self.shape, requests, capability, specialized=self._specialized)

        config, highest = serves(size), serves(most)
        # A lower tile than the highest holds all rows of its batches.
        return config, most if config.block_m == highest.block_m else config.block_m // self.shape.gqa

    def selection(
        self, config: AnchorConfig, max_batch: int, max_groups: int, list_entries: int, **options: int
    ) -> AnchorSelection:
        """What selects for this shape and device; arguments as of `AnchorSelection`."""
        on_gpu = self._device.type == "cuda"
        return AnchorSelection(
            self.shape,
            max_batch,
            max_groups,
            self._sizes.max_prefix_len,
            list_entries,
            config,
            self._device,
            form=Form.FUSED if on_gpu else Form.UNFUSED,
            num_programs=None if on_gpu else 2 * self.shape.num_kv_heads,
            **options,
        )

    def _of(self, size: int) -> AnchorSelection:
        config, requests = self.tile_of(size)
        if config.block_m not in self._found:
            rows = requests * self._sizes.groups_of_a_row
            groups = min(rows, self._sizes.max_groups)
            self._found[config.block_m] = self.selection(config, rows, groups, self._sizes.list_entries)
        return self._found[config.block_m]

    def plan(self, step: Selecting, indexes: Sequence[Index], listed: Sequence[SelectionGroup] = ()) -> None:
        """See the base.

        Args:
            step, indexes: as there.
            listed: of listed candidates, where each group's lists are.
        """
        selection = self._of(step.size)
        if not step.groups:
            self._probed = []
            selection.plan((), ())
            return
        known = [self.known[index] for index in indexes]
        scored = self._scored(step, [one.first for one in known], listed)
        selection.plan(scored, step.groups)
        addresses = torch.zeros(self._addresses.shape, dtype=torch.int64)
        torch.stack([one.addresses for one in known], 1, out=addresses[:, : len(known)])
        send(addresses, self._addresses)
        if len(self._heads):
            heads = torch.zeros(self._heads.shape, dtype=torch.int64)
            torch.stack([one.heads for one in known], 1, out=heads[:, : len(known)])
            heads[:, : len(known), :, -1] = torch.tensor([group.score_begins for group in scored])
            send(heads, self._heads)

    def plan_probe(self, step: Selecting, listed: Sequence[SelectionGroup] = (), lengths: Sequence[int] = ()) -> None:
        """See the base.

        Args:
            step: as there.
            listed, lengths: of listed candidates, where each group's lists are, and tokens of its prefix.
        """
        lengths = lengths or [group.prefix_len * self.entry_tokens for group in step.groups]
        self._probed = [self.made_up(length) for length in lengths]
        arrays = [self.arrays(layer) for layer in self._probed]
        places = [self.placed([layer], length)[0] for layer, length in zip(self._probed, lengths, strict=True)]
        self._of(step.size).plan(self._scored(step, places, listed, arrays), step.groups)

    def made_up(self, prefix_len: int) -> LayerArrays:
        """Arrays of any values; heads that may have blocks of their own sizes have the smallest, which cost most."""
        heads, rows = self.shape.num_kv_heads, -(-prefix_len // LEAST_BLOCK)
        found = {ROW_INDPTR: rows * torch.arange(heads + 1, dtype=torch.int32, device=self._device)}
        for name, form in self._spec.forms(IndexSize(prefix_len, self._head_dim)).items():
            # The length that forms leave open is that of ragged rows.
            lengths = [length for length in form.shape if length is not None]
            shape = (heads, *lengths) if len(lengths) == len(form.shape) else (heads * rows, *lengths)
            least = max(0, int(form.least or 0))
            found[name] = torch.full(shape, least, dtype=getattr(torch, form.dtype), device=self._device)
        return found

    def _scored(
        self,
        step: Selecting,
        places: Sequence[LayerRows],
        listed: Sequence[SelectionGroup],
        arrays: Sequence[tuple[Tensor | None, ...]] = (),
    ) -> list[ScoredGroup]:
        scored, heads = [], range(self.shape.num_kv_heads)
        begins = place_scores([group.prefix_len for group in step.groups], len(heads))
        lists = [tuple(one.list_begin + head * one.head_stride for head in heads) for one in listed]
        for number, (group, place) in enumerate(zip(step.groups, places, strict=True)):
            of_list, own = lists[number] if lists else (), arrays[number] if arrays else ()
            scored.append(place.group(step.rows[number], group.prefix_len, begins[number], of_list, own))
        return scored

    def run(
        self, size: int, q: Tensor, sm_scale: float, slot_table: Tensor | None, layer: int | None, lists: SelectedLists
    ) -> None:
        """See the base; how many launches that are, `AnchorSelection.run` says."""
        self._of(size).run(self._inputs(size, q, sm_scale, layer), self._scores, lists, slot_table=slot_table)

    def stretches(self, size: int) -> dict[int, tuple[int, int]]:
        return self._of(size).programs.stretches

    def score(self, size: int, q: Tensor, sm_scale: float, layer: int | None) -> ScoredTokens:
        return self._of(size).score(self._inputs(size, q, sm_scale, layer), self._scores)

    def _inputs(self, size: int, q: Tensor, sm_scale: float, layer: int | None) -> ScoreInputs:
        most = self._of(size).max_groups
        arrays = None if layer is None else self._addresses[layer, :most]
        heads = None if layer is None or not len(self._heads) else self._heads[layer, :most]
        return ScoreInputs(q[:size], sm_scale, arrays, heads, self.candidates)

    def score_entries(self, size: int) -> int:
        """Of scores of a batch of that size, at most."""
        groups = min(size * self._sizes.groups_of_a_row, self._sizes.max_groups)
        longest = -(-self._sizes.max_prefix_len // self.candidate_tokens)
        return groups * self.shape.num_kv_heads * list_stride(longest)

    @property
    def candidate_tokens(self) -> int:
        """Tokens that a score is of, at least."""
        return LEAST_BLOCK if self.shape.form.is_block else self.entry_tokens

    @property
    def nbytes(self) -> int:
        """See the base; scratch of the kernels apart."""
        return sum(one.nbytes for one in (self._scores, self._addresses, self._heads))
