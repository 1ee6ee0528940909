"""`SelectOp` of CSAttention: one kernel for batches of all sizes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from prefix_kernels.anchor_selection import Form, ScoredTokens
from prefix_kernels.csa_scores import encode_positions
from prefix_kernels.csa_selection import (
    CsaArrays,
    CsaGroup,
    CsaSelection,
    CsaShape,
    array_addresses,
    default_config,
)
from prefix_kernels.launching import send
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import SelectedLists, place_scores
from sglang_ext.decode.select_op import OpContext, ScoringOp, Selecting
from sglang_ext.decode.types import Index
from sglang_ext.methods.csattention.spec import CSAttentionSpec
from sglang_ext.prefix.residency import LayerArrays

_numbers = itertools.count()


class CSAttentionOp(ScoringOp):
    """What anchor layers select with: in three launches on a GPU.

    Raises:
        ValueError: heads do not divide into subspaces.
    """

    ends_in_lists = True

    def __init__(self, spec: CSAttentionSpec, context: OpContext) -> None:
        shape, sizes, device = context.shape, context.sizes, context.device
        spec.subspace_dim(shape.head_dim)
        self._spec, self._sizes, self._device = spec, sizes, device
        self.shape = CsaShape(
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            spec.num_subspaces,
            spec.num_centroids,
            spec.score_bits,
            Pooling(context.config.pooling),
        )
        on_gpu = device.type == "cuda"
        self._selection = CsaSelection(
            self.shape,
            sizes.max_batch,
            sizes.max_groups,
            sizes.max_prefix_len,
            sizes.list_entries,
            default_config(self.shape),
            device,
            groups_of_a_row=sizes.groups_of_a_row,
            form=Form.FUSED if on_gpu else Form.UNFUSED,
            num_programs=None if on_gpu else 2 * shape.num_kv_heads,
        )
        self._scores = torch.zeros(shape.num_kv_heads * sizes.room, dtype=torch.float32, device=device)
        tables = (context.num_layers, sizes.max_groups, len(CsaArrays._fields))
        self._addresses = torch.zeros(tables, dtype=torch.int64, device=device)
        self._probed: list[CsaArrays] = []
        self._known: WeakKeyDictionary[Index, tuple[int, Tensor]] = WeakKeyDictionary()

    def number_of(self, index: Index) -> int:
        if index not in self._known:
            # Arrays themselves are not kept: residency may let them go.
            found = [array_addresses(self.shape, _arrays_of(layer), index.prefix_len) for layer in index.layers]
            self._known[index] = (next(_numbers), torch.tensor(found, dtype=torch.int64))
        return self._known[index][0]

    def fits(self, lengths: Sequence[int], budgets: Sequence[int]) -> bool:
        return self._sizes.hold(lengths)

    def tile(self, size: int) -> Hashable:
        """See the base: the same serves all."""
        return None

    def plan(self, step: Selecting, indexes: Sequence[Index]) -> None:
        if not step.groups:
            self._probed = []
        addresses = torch.zeros(self._addresses.shape, dtype=torch.int64)
        for number, index in enumerate(indexes):
            _, addresses[:, number] = self._known[index]
        self._plan(step, [_arrays_of(index.layers[0]) for index in indexes])
        send(addresses, self._addresses)

    def plan_probe(self, step: Selecting) -> None:
        self._probed = [self._made_up(group.prefix_len) for group in step.groups]
        self._plan(step, self._probed)

    def _plan(self, step: Selecting, arrays: Sequence[CsaArrays]) -> None:
        begins = place_scores([group.prefix_len for group in step.groups], self.shape.num_kv_heads)
        scored = [CsaGroup(*one) for one in zip(step.rows, begins, arrays, strict=True)]
        self._selection.plan(scored, step.groups)

    def _made_up(self, prefix_len: int) -> CsaArrays:
        """Lists whose entries are spread over all of a prefix, each one's otherwise."""
        device, lead, bits = self._device, self.shape.lead, self.shape.bits
        entries = self._spec.list_len(prefix_len)
        first = torch.arange(entries, device=device) * prefix_len // entries
        # The same for all KV heads: positions take more memory than what is made of them.
        moved = torch.randint(prefix_len // entries, (*lead[1:], entries), dtype=torch.int32, device=device)
        places, counts = encode_positions(moved + first, prefix_len)
        centroids = torch.randn(*lead, self.shape.head_dim // lead[1], dtype=torch.float32, device=device)
        return CsaArrays(
            (centroids / centroids.norm(dim=-1, keepdim=True)).half(),
            places.repeat(lead[0], 1, 1, 1),
            counts.repeat(lead[0], 1, 1, 1),
            torch.randint(256, (*lead, -(-entries * bits // 8)), dtype=torch.uint8, device=device),
            torch.ones(lead, dtype=torch.float16, device=device),
            torch.zeros(lead, dtype=torch.float16, device=device),
        )

    def run(
        self, size: int, q: Tensor, sm_scale: float, slot_table: Tensor | None, layer: int | None, lists: SelectedLists
    ) -> None:
        """See the base; how many launches that are, `CsaSelection.run` says."""
        arrays = None if layer is None else self._addresses[layer]
        self._selection.run(q[:size], sm_scale, self._scores, lists, arrays=arrays, slot_table=slot_table)

    def stretches(self, size: int) -> dict[int, tuple[int, int]]:
        return self._selection.programs.stretches

    def score(self, size: int, q: Tensor, sm_scale: float, layer: int | None) -> ScoredTokens:
        arrays = None if layer is None else self._addresses[layer]
        return self._selection.score(q[:size], sm_scale, self._scores, arrays=arrays)

    @property
    def nbytes(self) -> int:
        """See the base; scratch of the kernels apart."""
        return self._scores.nbytes + self._addresses.nbytes


def _arrays_of(layer: LayerArrays) -> CsaArrays:
    return CsaArrays(*(layer[name] for name in CsaArrays._fields))
