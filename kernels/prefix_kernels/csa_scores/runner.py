"""CSA scores of a batch's groups on compact lists: planned on the host, then run without a wait or an allocation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_kernels.csa_scores.compact import BLOCK_POSITIONS, CompactLists, check_lists
from prefix_kernels.csa_scores.kernels import FIELDS, pick_lists_kernel, score_tiles_kernel
from prefix_kernels.launching import block_of, check_power_of_2, launch, send

_BITMAP_RATIO = 0.117
"""From here on lists of long prefixes are bitmaps, see `compact`."""
_ROW_FIELDS = 4
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CsaShape:
    """What all groups and all layers of a model share.

    Attributes:
        num_qo_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: KV heads.
        head_dim: channels of a query.
        num_subspaces: m, divides head_dim.
        num_centroids: C per subspace.
        bits: of a list's scores, 4 or 8.
        weighted: whether groups bring subspace weights.
        centroid_dtype: fp32, fp16 or bf16.

    Raises:
        ValueError: sizes that do not divide, other bits, another dtype.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    num_subspaces: int
    num_centroids: int
    bits: int
    weighted: bool = False
    centroid_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        for whole, part in (("num_qo_heads", "num_kv_heads"), ("head_dim", "num_subspaces")):
            if getattr(self, part) < 1 or getattr(self, whole) < 1 or getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"expected {whole} as a multiple of {part}, got {getattr(self, whole)} and {getattr(self, part)}"
                )
        if self.bits not in (4, 8) or self.num_centroids < 1 or self.centroid_dtype not in _DTYPES:
            raise ValueError(
                "expected 4 or 8 bits, num_centroids >= 1 and centroids in fp32, fp16 or bf16, got "
                f"{self.bits}, {self.num_centroids} and {self.centroid_dtype}"
            )

    @property
    def gqa(self) -> int:
        """Query heads of a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def lead(self) -> tuple[int, int, int]:
        """Leading dims of the tables."""
        return self.num_kv_heads, self.num_subspaces, self.num_centroids


@dataclass(frozen=True)
class CsaConfig:
    """How the positions are cut. A matter of speed; the result's bits are the same.

    Attributes:
        tile: positions of a program, a power of 2 of at least 256.
        step: entries of a list that a program adds at a time, a power of 2 of at least 16.
        num_warps: of a program.

    Raises:
        ValueError: no such power of 2.
    """

    tile: int
    step: int
    num_warps: int

    def __post_init__(self) -> None:
        for name, least in (("tile", BLOCK_POSITIONS), ("step", 16), ("num_warps", 1)):
            check_power_of_2(name, getattr(self, name), least)


def default_config(list_ratio: float) -> CsaConfig:
    """What runs where nothing was tuned, by alpha: entries of a list per position of the prefix.

    With offsets one warp takes most of a list's share of a tile in one step; with bitmaps a thread has a byte of each.
    """
    if list_ratio >= _BITMAP_RATIO:
        return CsaConfig(1024, 128, 4)
    tile = 2048
    step = 1 << (max(1, math.ceil(list_ratio * tile)) - 1).bit_length()
    return CsaConfig(tile, min(128, max(32, step)), 1)


@dataclass(frozen=True)
class CsaTables:
    """The index of one prefix in one layer. `CsaScores` reads it in place: it must stay where it is.

    Attributes:
        centroids: [num_kv_heads, num_subspaces, num_centroids, head_dim / num_subspaces].
        lists: with those leading dims.
        list_len: entries of a list.
        prefix_len: tokens of the prefix.
        subspace_weights: fp32 [num_kv_heads, num_subspaces] where the shape is `weighted`, else None.
    """

    centroids: Tensor
    lists: CompactLists
    list_len: int
    prefix_len: int
    subspace_weights: Tensor | None = None

    def check(self, shape: CsaShape) -> None:
        """Raise ValueError unless these are contiguous tables of that shape."""
        wanted = (*shape.lead, shape.head_dim // shape.num_subspaces)
        if tuple(self.centroids.shape) != wanted or self.centroids.dtype is not shape.centroid_dtype:
            raise ValueError(
                f"expected centroids {wanted} {shape.centroid_dtype}, got {tuple(self.centroids.shape)} "
                f"{self.centroids.dtype}; is the index of another spec?"
            )
        check_lists(self.lists, shape.lead, self.list_len, self.prefix_len, shape.bits)
        weights = self.subspace_weights
        if (weights is not None) != shape.weighted or (
            weights is not None and (tuple(weights.shape) != shape.lead[:2] or weights.dtype is not torch.float32)
        ):
            came = None if weights is None else (tuple(weights.shape), weights.dtype)
            raise ValueError(
                f"expected subspace_weights {(shape.lead[:2], torch.float32) if shape.weighted else None}, got {came}"
            )
        dtypes = (torch.uint8, torch.int16, torch.uint8, torch.float16, torch.float16)
        for name, part, dtype in zip(CompactLists._fields, self.lists, dtypes, strict=True):
            if part is not None and part.dtype is not dtype:
                raise ValueError(f"expected {name} of compact lists in {dtype}, got {part.dtype}")
        if any(part is not None and not part.is_contiguous() for part in (self.centroids, weights, *self.lists)):
            raise ValueError("expected contiguous tables, got strided ones; call .contiguous() where they are loaded")

    def fields(self, num_rows: int, out_begin: int) -> list[int]:
        """This group's row of the table that the kernels read, see `kernels.FIELDS`."""
        places, counts, codes, scale, zero = self.lists
        parts = (places, counts, codes, scale, zero, self.centroids, self.subspace_weights)
        addresses = [0 if part is None else part.data_ptr() for part in parts]
        return [*addresses, self.prefix_len, self.list_len, num_rows, out_begin, 0]


@dataclass(frozen=True)
class CsaGroup:
    """Requests on one prefix.

    Attributes:
        tables: of the prefix.
        rows: batch rows of the requests.
    """

    tables: CsaTables
    rows: tuple[int, ...]


class CsaScores:
    """Raw scores of every position for every query row of the batch's groups. Source: CSAttention, 3.3 (1)-(3).

    Two launches: the lists that each row fetches, and their sums. The same bits in every run. The device buffers are
    made once: `run()` can be captured in a CUDA graph and replayed after another `plan()`. The scratch is shared by the
    layers, which run one after the other.

    Args:
        shape: of the model and its index.
        subspace_dims: [num_subspaces, head_dim / num_subspaces] integer, channels of each subspace.
        max_rows: requests of a batch, at most.
        max_prefix_len: tokens of a prefix, at most.
        config: how the positions are cut.
        max_groups: groups of a batch, at most.
        num_layers: layers that are planned apart, each with tables of its own.
        bitmap: whether lists are bitmaps (True) or have offsets (False); None where groups may differ, which costs
            registers.

    Raises:
        ValueError: a size below 1, or subspace_dims of another shape.
    """

    def __init__(
        self,
        shape: CsaShape,
        subspace_dims: Tensor,
        max_rows: int,
        max_prefix_len: int,
        config: CsaConfig,
        *,
        max_groups: int = 1,
        num_layers: int = 1,
        bitmap: bool | None = None,
    ) -> None:
        if min(max_rows, max_prefix_len, max_groups, num_layers) < 1:
            raise ValueError(
                "expected max_rows, max_prefix_len, max_groups and num_layers of at least 1, got "
                f"{max_rows}, {max_prefix_len}, {max_groups} and {num_layers}"
            )
        dims = (shape.num_subspaces, shape.head_dim // shape.num_subspaces)
        if tuple(subspace_dims.shape) != dims or subspace_dims.dtype.is_floating_point:
            raise ValueError(
                f"expected integer subspace_dims {dims}, got {tuple(subspace_dims.shape)} {subspace_dims.dtype}"
            )
        self.shape, self.config, self.bitmap = shape, config, bitmap
        self.max_rows, self.max_prefix_len, self.num_layers = max_rows, max_prefix_len, num_layers
        device = subspace_dims.device
        self._dims = subspace_dims.long().contiguous()
        self._rows = torch.full((num_layers, max_rows, _ROW_FIELDS), -1, dtype=torch.int32, device=device)
        self._groups = torch.zeros(num_layers, max_groups, FIELDS.value, dtype=torch.int64, device=device)
        picks = (max_rows * shape.gqa, shape.num_kv_heads, shape.num_subspaces)
        self._lists = torch.zeros(picks, dtype=torch.int32, device=device)
        self._factors = torch.zeros(*picks, 2, dtype=torch.float32, device=device)
        # To the end of the last tile.
        num_blocks = -(-max_prefix_len // config.tile) * (config.tile // BLOCK_POSITIONS)
        self._starts = torch.zeros(*picks, num_blocks + 1, dtype=torch.int32, device=device)
        self._centroid_type = torch.zeros(1, dtype=shape.centroid_dtype, device=device)
        self._planned: list[tuple[CsaGroup, ...]] = [()] * num_layers

    def out_elements(self, layer: int = 0) -> int:
        """Scores that the layer's `run()` writes."""
        return sum(self._scores_of(group) for group in self._planned[layer])

    def views(self, out: Tensor, layer: int = 0) -> list[Tensor]:
        """The planned groups' parts of `out`: [num_kv_heads, num_rows * gqa, prefix_len] each, no copies.

        Rows are requests in the group's order, each with its query heads.
        """
        found, begin = [], 0
        for group in self._planned[layer]:
            part = out.view(-1)[begin : begin + self._scores_of(group)]
            found.append(part.view(self.shape.num_kv_heads, len(group.rows) * self.shape.gqa, group.tables.prefix_len))
            begin += self._scores_of(group)
        return found

    def plan(self, groups: Sequence[CsaGroup], layer: int = 0) -> None:
        """Write a layer's table. Copies to the device, without a wait.

        Args:
            groups: of the batch; a batch row is in at most one of them. Their scores follow each other in `out`.
            layer: whose tables these are.

        Raises:
            ValueError: more groups, rows or positions than there is room for, a batch row twice, or tables of another
                shape or form.
        """
        rows = [row for group in groups for row in group.rows]
        once = len(set(rows)) == len(rows) <= self.max_rows and min(rows, default=0) >= 0
        if len(groups) > self._groups.shape[1] or not once:
            raise ValueError(
                f"expected at most {self._groups.shape[1]} groups and {self.max_rows} rows, each once, got "
                f"{len(groups)} groups with rows {rows}"
            )
        table = torch.zeros(self._groups.shape[1:], dtype=torch.int64)
        listed = torch.full(self._rows.shape[1:], -1, dtype=torch.int32)
        slot = begin = 0
        for number, group in enumerate(groups):
            self._check_tables(group.tables)
            table[number] = torch.tensor(group.tables.fields(len(group.rows), begin), dtype=torch.int64)
            for within, row in enumerate(group.rows):
                listed[slot] = torch.tensor([number, row, within, 0], dtype=torch.int32)
                slot += 1
            begin += self._scores_of(group)
        send(table, self._groups[layer])
        send(listed, self._rows[layer])
        self._planned[layer] = tuple(groups)

    def run(self, q: Tensor, out: Tensor, layer: int = 0) -> None:
        """Score as planned.

        Args:
            q: [batch, num_qo_heads, head_dim] post-RoPE queries, fp32, fp16 or bf16.
            out: fp32, contiguous, of at least `out_elements(layer)` elements, written: see `views`. Before sm_scale
                and softmax; -inf for a position that none of the fetched lists holds.
            layer: whose tables are read.

        Raises:
            ValueError: tensors of another shape than planned for.
        """
        self._check_run(q, out, layer)
        shape, config = self.shape, self.config
        sub = shape.head_dim // shape.num_subspaces
        num_blocks = self._starts.shape[-1] - 1
        tile_blocks = config.tile // BLOCK_POSITIONS
        common = {
            "rows_ptr": self._rows[layer],
            "groups_ptr": self._groups[layer],
            "lists_ptr": self._lists,
            "factors_ptr": self._factors,
            "starts_ptr": self._starts,
            "starts_stride": self._starts.shape[-1],
            "GQA": shape.gqa,
            "NUM_SUBSPACES": shape.num_subspaces,
            "BITMAP": self.bitmap is not False,
            "OFFSETS": self.bitmap is not True,
        }
        tile_rows = self.max_rows * shape.gqa
        launch(
            pick_lists_kernel,
            (shape.num_subspaces, shape.num_kv_heads, tile_rows),
            {
                **common,
                "q_ptr": q,
                "dims_ptr": self._dims,
                "centroids_ptr": self._centroid_type,
                "q_stride_row": q.stride(0),
                "q_stride_head": q.stride(1),
                "HEAD_DIM": shape.head_dim,
                "BLOCK_D": block_of(shape.head_dim),
                "SUB": sub,
                "BLOCK_SUB": block_of(sub),
                "NUM_CENTROIDS": shape.num_centroids,
                "BLOCK_C": block_of(shape.num_centroids),
                "WEIGHTED": shape.weighted,
                "BLOCK_N": max(tile_blocks, min(512, block_of(num_blocks))),
                "BITMAP_N": max(tile_blocks, min(64, block_of(num_blocks))),
            },
            num_warps=4,
            num_stages=1,
            # A product that is rounded only with the sum differs between threads that add the same two in turns.
            enable_fp_fusion=False,
        )
        launch(
            score_tiles_kernel,
            (-(-self.max_prefix_len // config.tile), shape.num_kv_heads, tile_rows),
            {**common, "out_ptr": out, "BITS": shape.bits, "TILE": config.tile, "STEP": config.step},
            num_warps=config.num_warps,
            # No loop may be pipelined: a tile is read, added to and written back.
            num_stages=1,
        )

    def _scores_of(self, group: CsaGroup) -> int:
        return self.shape.num_qo_heads * len(group.rows) * group.tables.prefix_len

    def _check_tables(self, tables: CsaTables) -> None:
        tables.check(self.shape)
        if tables.prefix_len > self.max_prefix_len:
            raise ValueError(f"expected a prefix of at most {self.max_prefix_len} tokens, got {tables.prefix_len}")
        form = tables.lists.counts is None
        if self.bitmap is not None and form != self.bitmap:
            raise ValueError(f"expected lists with bitmap={self.bitmap}, got bitmap={form}; pass bitmap=None for both")

    def _check_run(self, q: Tensor, out: Tensor, layer: int) -> None:
        wanted = (self.shape.num_qo_heads, self.shape.head_dim)
        most = max((row for group in self._planned[layer] for row in group.rows), default=-1)
        if q.dim() != 3 or tuple(q.shape[1:]) != wanted or q.shape[0] <= most or q.dtype not in _DTYPES:
            raise ValueError(
                f"expected q [more than {most}, {wanted[0]}, {wanted[1]}] in fp32, fp16 or bf16, got {tuple(q.shape)} "
                f"{q.dtype}"
            )
        if q.stride(2) != 1:
            raise ValueError(f"expected q with adjacent channels, got strides {q.stride()}")
        if out.dtype is not torch.float32 or not out.is_contiguous() or out.numel() < self.out_elements(layer):
            raise ValueError(
                f"expected out contiguous in float32 with at least {self.out_elements(layer)} elements, got "
                f"{tuple(out.shape)} {out.dtype}"
            )
