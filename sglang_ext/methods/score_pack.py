"""All anchor layers' selections of a `ScoredOp` as one: the queries of a whole step, one chain of launches.

A layer's group is a group of its own, with its own queries, arrays, scores and list. So the waits of a selection are
paid once a step, and the programs of all layers fill the GPU, however small one layer is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorSelection
from prefix_kernels.kernels import COARSE, NUM_BINS
from prefix_kernels.pooled_scores import Layers, ScoreInputs, array_addresses
from prefix_kernels.types import ALIGNED, SelectedLists, list_stride, place_scores
from sglang_ext.decode.select_op import OpContext, Selecting
from sglang_ext.decode.types import Index
from sglang_ext.methods.scored_op import LayerRows, ScoredOp
from sglang_ext.prefix.residency import LayerArrays

SCORE_BYTES = 160 << 20
"""Of the scores of all layers, at most."""
GROUP_BYTES = 96 << 20
"""Of what kernels of one height of a tile keep of each layer's groups, at most: sums of rows, and counts of keys."""
_LIST_WARPS = 8
"""A program lists a whole prefix, or half of one."""
_COLD_BYTES = 128 << 20
"""Of made-up arrays: more than any L2 cache holds, as those of all layers are."""


class ScorePack:
    """What `ScoredOp.run` selects at each of some layers, in one run.

    Args:
        op: whose arrays are scored.
        context: of the operation; `sizes.ahead` has the layers.
        list_entries: from the lists of one layer to those of the next.
    """

    def __init__(self, op: ScoredOp, context: OpContext, list_entries: int) -> None:
        shape, sizes, device = context.shape, context.sizes, context.device
        self._op, self._sizes, self._list_entries = op, sizes, list_entries
        self._layers, self._heads = list(sizes.ahead), shape.num_kv_heads
        count = len(self._layers)
        wanted = self._heads * (-(-sizes.room // op.candidate_tokens) + ALIGNED * sizes.max_groups)
        self._stride = min(wanted, SCORE_BYTES // (4 * count)) // ALIGNED * ALIGNED
        self._scores = torch.zeros(count * self._stride, dtype=torch.float32, device=device)
        queries = (count * sizes.max_batch, shape.num_qo_heads, shape.head_dim)
        self._queries = torch.zeros(queries, dtype=shape.dtype, device=device)
        self._most_groups = self._groups_of(sizes.max_batch)
        self._found: dict[int, AnchorSelection] = {}
        self._probed: list[list[LayerArrays]] = []

    def _groups_of(self, requests: int) -> int:
        """Groups of a batch, that a kernel for so many requests has room for; one at least."""
        bytes_of_one = 4 * self._heads * (COARSE.value + NUM_BINS.value + 2 * requests * self._op.shape.gqa)
        room = GROUP_BYTES // bytes_of_one // len(self._layers)
        return int(max(1, min(requests, self._sizes.max_groups, room)))

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether groups of so many tokens can be scored at all layers at once."""
        entries = self._heads * sum(list_stride(-(-length // self._op.candidate_tokens)) for length in lengths)
        return len(lengths) <= self._most_groups and entries <= self._stride

    def _of(self, size: int) -> AnchorSelection:
        config, requests = self._op.tile_of(size)
        if config.block_m not in self._found:
            count = len(self._layers)
            sizes = count * requests, count * self._groups_of(requests), count * self._list_entries
            self._found[config.block_m] = self._op.selection(config, *sizes, max_group=requests, list_warps=_LIST_WARPS)
        return self._found[config.block_m]

    def plan(self, step: Selecting, indexes: Sequence[Index]) -> None:
        """Write the tables of the next runs, without a wait; arguments as of `SelectOp.plan`, lists of the first layer.

        Groups and sizes: as many as `fits` says.
        """
        self._probed = []
        known = [self._op.known[index] for index in indexes]
        addresses = [one.addresses[self._layers] for one in known]
        heads = [one.heads[self._layers if len(one.heads) > 1 else [0] * len(self._layers)] for one in known]
        self._plan(step, [one.first for one in known], addresses, heads)

    def plan_probe(self, step: Selecting) -> None:
        """As `plan`, on made-up arrays: others for each layer, up to `_COLD_BYTES`."""
        self._probed, layers = [], range(len(self._layers))
        firsts, addresses, heads = [], [], []
        for group in step.groups:
            length = group.prefix_len * self._op.entry_tokens
            made = [self._op.made_up(length)]
            bytes_of_one = len(step.groups) * sum(array.nbytes for array in made[0].values())
            distinct = min(len(layers), -(-_COLD_BYTES // bytes_of_one))
            made += [{name: array.clone() for name, array in made[0].items()} for _ in range(1, distinct)]
            own = torch.tensor([array_addresses(self._op.shape, self._op.arrays(one)) for one in made])
            first = self._op.placed(made[:1], length)[0]
            nowhere = (0,) * self._heads
            of_heads = first.group((0,), group.prefix_len, nowhere).heads
            firsts.append(first)
            addresses.append(own[[layer % distinct for layer in layers]])
            heads.append(torch.tensor([of_heads] * len(layers)))
            self._probed.append(made)
        self._plan(step, firsts, addresses, heads)

    def _plan(
        self, step: Selecting, firsts: Sequence[LayerRows], addresses: Sequence[Tensor], heads: Sequence[Tensor]
    ) -> None:
        selection = self._of(step.size)
        if not step.groups:
            selection.plan((), ())
            return
        lengths = [group.prefix_len * self._op.entry_tokens for group in step.groups]
        begins = place_scores([-(-length // self._op.candidate_tokens) for length in lengths], self._heads)
        scored = [
            first.group(own, group.prefix_len, begin)
            for own, group, first, begin in zip(step.rows, step.groups, firsts, begins, strict=True)
        ]
        tables = torch.stack(list(addresses), dim=1), torch.stack(list(heads), dim=1)
        # From the scores of one layer to those of the next: as many as a batch of that size may have.
        stride = min(self._stride, self._op.score_entries(step.size))
        layers = Layers(*tables, step.size, stride, self._list_entries)
        selection.plan(scored, step.groups, layers)

    def run(self, size: int, queries: Sequence[Tensor], sm_scale: float, lists: SelectedLists) -> None:
        """Select as planned, by the queries [size or more, num_qo_heads, head_dim] of each layer.

        Args:
            size, queries, sm_scale: as of `AheadOp.look_ahead`; fewer rows where a step runs without its graph, which
                would be padded.
            lists: of all layers, written at `list_entries` times the layer's place; their counts are in the order of
                the launch: groups of one layer, then of the next.
        """
        packed = self._queries[: len(self._layers) * size]
        # One launch, whatever the strides: queries lie beside keys and values.
        of_layers = packed.view(len(self._layers), size, *packed.shape[1:])
        torch.stack([q[:size] for q in queries], out=of_layers[:, : len(queries[0])])
        self._of(size).run(ScoreInputs(packed, sm_scale), self._scores, lists)

    @property
    def nbytes(self) -> int:
        """Device memory of the buffers of fixed place; scratch of the kernels apart."""
        return sum(one.nbytes for one in (self._scores, self._queries))
