"""Pooled scores of the groups of a batch: planned on the host, then run in two launches without a wait.

The tables of what groups choose from, and the arguments that every scoring kernel takes, serve `anchor_selection`, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from prefix_kernels.launching import block_of, launch, send
from prefix_kernels.pooled_scores.kernels import pooled_scores_kernel
from prefix_kernels.pooling import MOST_APART, Pooling

POOL = {Pooling.MAX: 1, Pooling.MEAN: 2}
"""What the kernels call them."""
_COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
HEAD_FIELDS = 4
ARRAYS = 5


class Source(IntEnum):
    """Where raw scores come from."""

    RAW = 0
    """Scores that are there already: fp32, -inf for none."""
    KEYS = 1
    """Keys in the pool, by lists of slots: exact q.k."""
    LOW_BIT = 2
    """Rows of codes (tokens, or mean keys of blocks)."""
    MINMAX = 3
    """Minimum and maximum of blocks in codes: upper bounds of q.k."""


@dataclass(frozen=True)
class ScoreShape:
    """What stays the same from step to step.

    Attributes:
        num_qo_heads, num_kv_heads: heads.
        source: of raw scores.
        channels: of a key that are multiplied: head_dim with KEYS, those that the codes keep otherwise.
        bits: of a code: 2, 4 or 8.
        listed_channels: whether codes keep some channels only, which an array names.
        pooling: over the rows and query heads of a group.
        sum_every: how few candidates enter the sums of the softmax, see `pooling.pool_scores`.
    """

    num_qo_heads: int
    num_kv_heads: int
    source: Source
    channels: int = 16
    bits: int = 4
    listed_channels: bool = False
    pooling: Pooling = Pooling.MAX
    sum_every: int = 1

    @property
    def gqa(self) -> int:
        """Query heads of a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def row_units(self) -> int:
        """Words (4 bits) or bytes (2 and 8 bits) of one row of codes; channels of a key with KEYS."""
        if self.source in (Source.KEYS, Source.RAW):
            return self.channels
        return self.channels // (1 if self.bits == 8 else 4)


@dataclass(frozen=True)
class ScoredGroup:
    """A group and what it chooses from.

    Attributes:
        rows: batch rows.
        counts: per KV head, candidates.
        first_rows: per KV head, first of its rows among the codes; with RAW and KEYS all 0.
        list_begins: per KV head, where its list begins in the arena of `run`: slots with KEYS, rows of codes where
            candidates are listed; with RAW, where its raw scores begin; else all 0.
        score_begins: per KV head, where its scores go in the arena of scores.
        arrays: tensors of the index on the device: channels (int16 [num_kv_heads, channels]) or None, codes (uint8),
            scale (fp32 [num_kv_heads, channels]), with MINMAX codes and scale of the maximum first, of the minimum
            second. Kept alive by the caller while runs may read them.
        raw_stride: with RAW, from one row's raw scores to the next one's. A KV head's rows are the requests in the
            order of `rows`, each with its query heads.
    """

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    first_rows: tuple[int, ...]
    list_begins: tuple[int, ...]
    score_begins: tuple[int, ...]
    arrays: tuple[Tensor | None, ...] = ()
    raw_stride: int = 0

    def raw_end(self, gqa: int) -> int:
        """Raw scores that an arena with this group's must have."""
        last_row = max(len(self.rows) * gqa - 1, 0) * self.raw_stride
        return max(begin + last_row + count for begin, count in zip(self.list_begins, self.counts, strict=True))


@dataclass(frozen=True, eq=False)
class ScoreInputs:
    """What a run scores.

    Attributes:
        q: [batch, num_qo_heads, head_dim] post-RoPE queries.
        sm_scale: multiplies q.k before the softmax.
        k_cache, lists, raw, arrays: as `PooledScores.run` names them.
    """

    q: Tensor
    sm_scale: float
    k_cache: Tensor | None = None
    lists: Tensor | None = None
    raw: Tensor | None = None
    arrays: Tensor | None = None


class ScoreTables:
    """The tables of a plan in fixed device buffers; arguments are those of `PooledScores`.

    Raises:
        ValueError: query heads that do not divide, bits that are no code's, or sums of nothing.
    """

    def __init__(
        self, shape: ScoreShape, max_batch: int, max_groups: int, device: torch.device, *, listed: bool = False
    ) -> None:
        coded = shape.source in (Source.LOW_BIT, Source.MINMAX) and shape.bits < 8
        if shape.num_qo_heads % shape.num_kv_heads or shape.bits not in (2, 4, 8) or (coded and shape.channels % 4):
            raise ValueError(
                "expected num_qo_heads as a multiple of num_kv_heads, bits of 2, 4 or 8, and with codes of 2 and 4 "
                f"bits channels as a multiple of 4, got {shape}"
            )
        if not 1 <= shape.sum_every <= MOST_APART:
            raise ValueError(f"expected sum_every of 1 to {MOST_APART}, got {shape.sum_every}; 1 sums all candidates")
        self.shape = shape
        self.max_batch, self.max_groups = max_batch, max_groups
        self.listed = listed or shape.source is Source.KEYS
        self.max_rows = max_batch * shape.gqa
        heads = (max_groups, shape.num_kv_heads)
        self._rows = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._groups = torch.zeros(max_groups, 4, dtype=torch.int32, device=device)
        self._heads = torch.zeros(*heads, HEAD_FIELDS, dtype=torch.int64, device=device)
        self._arrays = torch.zeros(max_groups, ARRAYS, dtype=torch.int64, device=device)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)
        self._no_scores = torch.zeros(1, dtype=torch.float32, device=device)
        self._most_rows = self._raw_end = self._lists_end = self._scores_end = 0
        self._raw_shape = (0, 0, 0, 0)

    def plan(self, groups: Sequence[ScoredGroup]) -> None:
        """Write the tables of the next runs. Copies to the device, without a wait, on the stream of the runs.

        Raises:
            ValueError: more groups or rows than the buffers hold, a row out of range, a group without rows or of
                another number of KV heads, or arrays that the kernel cannot read. The plan before stays in force.
        """
        rows = [row for group in groups for row in group.rows]
        in_range = all(0 <= row < self.max_batch for row in rows)
        if len(groups) > self.max_groups or len(rows) > self.max_batch or not in_range:
            raise ValueError(
                f"expected at most {self.max_groups} groups of {self.max_batch} rows together, got {len(groups)} of "
                f"rows {rows}"
            )
        if not all(group.rows for group in groups):
            raise ValueError(f"expected a row or more in each group, got {groups}; leave a group without rows out")
        tables = torch.zeros(self._groups.shape, dtype=torch.int32)
        heads = torch.zeros(self._heads.shape, dtype=torch.int64)
        arrays = torch.zeros(self._arrays.shape, dtype=torch.int64)
        first = 0
        for number, group in enumerate(groups):
            fields = (group.counts, group.first_rows, group.list_begins, group.score_begins)
            if {len(field) for field in fields} != {self.shape.num_kv_heads}:
                raise ValueError(
                    f"expected counts and begins for each of {self.shape.num_kv_heads} KV heads, got {group}"
                )
            addresses = array_addresses(self.shape, group.arrays)
            self._check_codes(group)
            tables[number] = torch.tensor([first, len(group.rows), max(group.counts), group.raw_stride])
            heads[number] = torch.tensor(fields).T
            arrays[number] = torch.tensor(addresses, dtype=torch.int64)
            first += len(group.rows)
        for source, buffer in (
            (torch.tensor(rows, dtype=torch.int32), self._rows),
            (tables, self._groups),
            (heads, self._heads),
            (arrays, self._arrays),
        ):
            send(source, buffer)
        self._most_rows = max(rows, default=-1) + 1
        self._raw_end = max((group.raw_end(self.shape.gqa) for group in groups), default=0)
        self._lists_end = max((_end(group.list_begins, group.counts) for group in groups), default=0)
        self._scores_end = max((_end(group.score_begins, group.counts) for group in groups), default=0)
        most_rows = max((len(group.rows) for group in groups), default=0) * self.shape.gqa
        most = max((max(group.counts) for group in groups), default=0)
        self._raw_shape = (len(groups), self.shape.num_kv_heads, most_rows, most)

    def _check_codes(self, group: ScoredGroup) -> None:
        """Where all rows of codes are scored, they must be there."""
        if self.listed or self.shape.source not in (Source.LOW_BIT, Source.MINMAX):
            return
        wanted = _end(group.first_rows, group.counts)
        for array in group.arrays:
            if array is not None and array.dtype is torch.uint8 and array[..., 0].numel() < wanted:
                raise ValueError(
                    f"expected {wanted} rows of codes, got {tuple(array.shape)}; are they of all KV heads?"
                )

    def arguments(self, inputs: ScoreInputs, scores: Tensor) -> dict[str, Any]:
        """What kernels are told of the plan, the queries and the index, by parameter name.

        Raises:
            ValueError: a tensor that the source needs is missing, or of another shape.
        """
        self._check_queries(inputs, scores)
        self._check_pool(inputs)
        shape, q = self.shape, inputs.q
        k_cache, lists, raw, arrays = inputs.k_cache, inputs.lists, inputs.raw, inputs.arrays
        raw_strides = (0, 0, 0, 1) if raw is None or raw.dim() == 1 else raw.stride()
        half = shape.source in (Source.LOW_BIT, Source.MINMAX) and q.dtype is not torch.float32
        return {
            "q_ptr": q,
            "rows_ptr": self._rows,
            "groups_ptr": self._groups,
            "heads_ptr": self._heads,
            "arrays_ptr": self._arrays if arrays is None else arrays,
            "k_ptr": self._no_scores if k_cache is None else k_cache,
            "lists_ptr": self._nothing if lists is None else lists,
            "raw_ptr": self._no_scores if raw is None else raw,
            "scores_ptr": scores,
            "sm_scale": float(inputs.sm_scale),
            "q_stride_row": q.stride(0),
            "q_stride_head": q.stride(1),
            "k_stride_slot": 0 if k_cache is None else k_cache.stride(0),
            "k_stride_head": 0 if k_cache is None else k_cache.stride(1),
            "raw_stride_group": raw_strides[0],
            "raw_stride_head": raw_strides[1],
            "raw_stride_row": raw_strides[2],
            "raw_stride_candidate": raw_strides[3],
            "max_rows": self.max_rows,
            "GQA": shape.gqa,
            "CHANNELS": shape.channels,
            "ROW_UNITS": shape.row_units,
            "BITS": shape.bits,
            "LISTED_ROWS": self.listed,
            "LISTED_CHANNELS": shape.listed_channels,
            "SUM_EVERY": shape.sum_every,
            # Codes are exact in fp16, and a query's channel keeps 11 bits there.
            "COMPUTE": tl.float16 if half else _COMPUTE[q.dtype],
            "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
            # The interpreter knows no assembly.
            "ASSEMBLY": half and not knobs.runtime.interpret,
        }

    def _check_queries(self, inputs: ScoreInputs, scores: Tensor) -> None:
        source, q = self.shape.source, inputs.q
        missing = [
            name
            for name, tensor, needed in (
                ("k_cache", inputs.k_cache, source is Source.KEYS),
                ("lists", inputs.lists, self.listed),
                ("raw", inputs.raw, source is Source.RAW),
            )
            if needed and tensor is None
        ]
        if missing:
            raise ValueError(f"expected {' and '.join(missing)} for scores from {source.name}, got none; hand them in")
        wide = source is Source.RAW or self.shape.listed_channels or q.shape[-1] == self.shape.channels
        good = q.dim() == 3 and q.shape[1] == self.shape.num_qo_heads and q.shape[0] <= self.max_batch and wide
        if not good or q.stride(2) != 1 or q.dtype not in _COMPUTE:
            width = "head_dim" if self.shape.listed_channels else self.shape.channels
            raise ValueError(
                f"expected q [at most {self.max_batch}, {self.shape.num_qo_heads}, {width}] in fp32, fp16 or bf16 with "
                f"adjacent channels, got {tuple(q.shape)} {q.dtype} of strides {q.stride()}"
            )
        if scores.dtype is not torch.float32 or not scores.is_contiguous() or scores.numel() < self._scores_end:
            raise ValueError(
                f"expected scores as a contiguous float32 arena of {self._scores_end} entries or more, got "
                f"{tuple(scores.shape)} {scores.dtype}; was it planned so?"
            )

    def _check_pool(self, inputs: ScoreInputs) -> None:
        q, k_cache, lists = inputs.q, inputs.k_cache, inputs.lists
        raw, arrays = inputs.raw, inputs.arrays
        if q.shape[0] < self._most_rows:
            raise ValueError(
                f"expected q of {self._most_rows} rows or more, as planned, got {q.shape[0]}; plan for this batch"
            )
        wanted = (self.shape.num_kv_heads, self.shape.channels)
        if k_cache is not None and (
            tuple(k_cache.shape[1:]) != wanted or k_cache.stride(2) != 1 or k_cache.dtype is not q.dtype
        ):
            raise ValueError(
                f"expected k_cache [num_slots, {wanted[0]}, {wanted[1]}] in {q.dtype} with adjacent channels, got "
                f"{tuple(k_cache.shape)} {k_cache.dtype} of strides {k_cache.stride()}"
            )
        if lists is not None and not (lists.is_contiguous() and lists.dtype in (torch.int32, torch.int64)):
            raise ValueError(f"expected lists int32 or int64 contiguous, got {lists.dtype} of stride {lists.stride()}")
        if lists is not None and self.listed and lists.numel() < self._lists_end:
            raise ValueError(
                f"expected lists of {self._lists_end} entries or more, as planned, got {tuple(lists.shape)}"
            )
        arena = self.shape.source is Source.RAW
        if raw is not None and (raw.dim() != (1 if arena else 4) or raw.dtype is not torch.float32):
            wanted_raw = "[arena]" if arena else "[max_groups, num_kv_heads, rows, candidates]"
            raise ValueError(f"expected raw {wanted_raw} fp32, got {tuple(raw.shape)} {raw.dtype}")
        if raw is not None and not arena and any(a < b for a, b in zip(raw.shape, self._raw_shape, strict=True)):
            raise ValueError(
                f"expected raw [max_groups, num_kv_heads, rows, candidates] of {self._raw_shape} or more, as planned, "
                f"got {tuple(raw.shape)}"
            )
        if raw is not None and not arena and self.shape.sum_every > 1:
            raise ValueError(
                f"expected no room for raw scores with sum_every {self.shape.sum_every}: the first pass has not all of "
                "them; leave it out"
            )
        if raw is not None and arena and (raw.shape[0] < self._raw_end or not raw.is_contiguous()):
            raise ValueError(
                f"expected a contiguous arena of {self._raw_end} raw scores, got {raw.shape[0]} of stride "
                f"{raw.stride(0)}; was it planned so?"
            )
        like = self._arrays
        if arrays is not None and (
            arrays.shape != like.shape or arrays.dtype is not like.dtype or not arrays.is_contiguous()
        ):
            raise ValueError(
                f"expected arrays {tuple(like.shape)} int64 contiguous, got {tuple(arrays.shape)} {arrays.dtype}"
            )


def _end(begins: Sequence[int], counts: Sequence[int]) -> int:
    """Behind the last entry of all KV heads."""
    return max((begin + count for begin, count in zip(begins, counts, strict=True) if count), default=0)


def array_addresses(shape: ScoreShape, arrays: Sequence[Tensor | None]) -> list[int]:
    """A group's row of the table of addresses that the kernel reads: 5 of them, 0 for what is not there.

    Codes are read 16 bytes at a time: their memory must begin at a multiple of that.

    Raises:
        ValueError: another number of arrays than `ScoredGroup` names, another dtype or shape, strided, or codes that
            begin elsewhere.
    """
    if shape.source in (Source.LOW_BIT, Source.MINMAX):
        _check_arrays(shape, arrays)
    addresses = [0 if array is None else array.data_ptr() for array in arrays]
    return addresses + [0] * (ARRAYS - len(addresses))


def _check_arrays(shape: ScoreShape, arrays: Sequence[Tensor | None]) -> None:
    count = 5 if shape.source is Source.MINMAX else 3
    if len(arrays) != count:
        raise ValueError(
            f"expected {count} arrays for {shape.source.name} (channels, codes, scale, ...), got {len(arrays)}"
        )
    wide = (shape.num_kv_heads, shape.channels)
    dtypes = (torch.int16, *(torch.uint8, torch.float32) * 2)
    names = ("channels", "codes", "scale", "second codes", "second scale")
    for name, array, dtype in zip(names, arrays, dtypes, strict=False):
        if array is None:
            if name != "channels" or shape.listed_channels:
                raise ValueError(f"expected {name} of a group's arrays, got none; hand them in")
            continue
        codes = dtype is torch.uint8
        row_bytes = shape.channels * shape.bits // 8
        fits = array.shape[-1] == row_bytes if codes else tuple(array.shape) == wide
        if not fits or array.dtype is not dtype or not array.is_contiguous() or (codes and array.data_ptr() % 16):
            raise ValueError(
                f"expected {name} {f'[..., {row_bytes}], at a multiple of 16 bytes' if codes else wide} in {dtype}, "
                f"contiguous, got {tuple(array.shape)} {array.dtype} of strides {array.stride()} at "
                f"{array.data_ptr() % 16}"
            )


@dataclass(frozen=True)
class ScoreConfig:
    """How candidates are scored; a matter of speed only.

    Attributes:
        block_m: query rows of a tile, a power of 2 of at least 16; any with RAW, where nothing is multiplied.
        block_n: candidates of a step, a power of 2 of at least 16.
        num_warps: of a program.
        num_stages: steps that are on their way at a time.
        num_chunks: stretches of a (group, KV head).
        halves: whether rows of 24 words of 4-bit codes (96 channels) are multiplied as 16 and 8, not as 32 of which 8
            are padding. Warp-group instructions (sm_90, `block_m` from 16 on) take that as it comes; others reorder it.
    """

    block_m: int = 16
    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 3
    num_chunks: int = 1
    halves: bool = False

    def arguments(self, shape: ScoreShape) -> dict[str, int]:
        """What kernels are told of it, by parameter name."""
        halves = self.halves and coded_words(shape) == 24
        return {
            "BLOCK_K": 16 if halves else block_of(shape.row_units, 16),
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            # Not of the number of chunks, on which the order of sums would depend.
            "BLOCK_CHUNKS": 32,
            # Sixteen candidates to a warp, see the kernel's sums.
            "LANES": min(self.num_warps, self.block_n // 16),
            "STAGES": self.num_stages,
        }


class PooledScores:
    """Scores of candidates, pooled over the rows of their group: log of the (largest or mean) share of attention.

    Source of the pooling: Kascade, 3.4 (after the softmax); see `pooling.pool_scores`.

    Args:
        shape: of heads and index.
        max_batch: requests of a batch, at most.
        max_groups: groups of a batch, at most.
        config: tile and schedule; `block_m` that is less than a group's rows takes several tiles.
        device: where the buffers are made.
        listed: whether candidates are named by a list (always with KEYS).

    Raises:
        ValueError: query heads that do not divide, or bits that are no code's.
    """

    def __init__(
        self,
        shape: ScoreShape,
        max_batch: int,
        max_groups: int,
        config: ScoreConfig,
        device: torch.device,
        *,
        listed: bool = False,
    ) -> None:
        self.shape = shape
        self.config = config
        self.max_batch, self.max_groups, self.device = max_batch, max_groups, device
        self._tables = ScoreTables(shape, max_batch, max_groups, device, listed=listed)
        stats = (max_groups, shape.num_kv_heads, config.num_chunks, self._tables.max_rows)
        self._peak = torch.empty(stats, dtype=torch.float32, device=device)
        self._total = torch.empty(stats, dtype=torch.float32, device=device)

    @property
    def listed(self) -> bool:
        """Whether candidates are named by a list."""
        return self._tables.listed

    def plan(self, groups: Sequence[ScoredGroup]) -> None:
        """Write the tables of the next runs. Copies to the device, without a wait, on the stream of the runs.

        Raises:
            ValueError: more groups or rows than the buffers hold, a row out of range, a group of another number of KV
                heads, or arrays that the kernel cannot read. The plan before stays in force.
        """
        self._tables.plan(groups)

    def run(
        self,
        q: Tensor,
        scores: Tensor,
        sm_scale: float,
        *,
        k_cache: Tensor | None = None,
        lists: Tensor | None = None,
        raw: Tensor | None = None,
        arrays: Tensor | None = None,
    ) -> None:
        """Score as planned: two launches. Runs of one object follow each other on one stream.

        Args:
            q: [batch, num_qo_heads, head_dim] post-RoPE queries.
            scores: fp32 arena, written at the groups' `score_begins`: natural log of the pooled share of attention
                among a KV head's candidates; -inf where no row says anything.
            sm_scale: multiplies q.k before the softmax.
            k_cache: [num_slots, num_kv_heads, head_dim], with KEYS.
            lists: int32 or int64 arena of the groups' lists.
            raw: with RAW the scores: an fp32 arena in which the groups' rows lie. Otherwise room for them, fp32
                [max_groups, num_kv_heads, rows, candidates] by its strides, worth it for few rows: the second pass
                then reads them back instead of scoring again.
            arrays: int64 [max_groups, 5], another layer's `array_addresses`; None for those of the plan.

        Raises:
            ValueError: a tensor that the source needs is missing, or of another shape.
        """
        arguments = self._tables.arguments(ScoreInputs(q, sm_scale, k_cache, lists, raw, arrays), scores)
        shape = self.shape
        arguments |= {"peak_ptr": self._peak, "total_ptr": self._total, **self.config.arguments(shape)}
        arguments["RAW_ARENA"] = shape.source is Source.RAW
        reread = shape.source is not Source.RAW and raw is not None
        second = Source.RAW if reread else shape.source
        for pool, source in ((0, shape.source), (POOL[shape.pooling], second)):
            launch(
                pooled_scores_kernel,
                (self.config.num_chunks, shape.num_kv_heads, self.max_groups),
                {**arguments, "POOL": pool, "SOURCE": int(source), "STORE_RAW": reread and pool == 0},
                num_warps=self.config.num_warps,
                num_stages=self.config.num_stages,
            )


def default_config(shape: ScoreShape, num_rows: int) -> ScoreConfig:
    """What runs where nothing was tuned: tiles of up to 32 rows, so that a step stays in registers on sm_80, too.

    Raw scores that are there take up to 16 rows at a time, and no more than there are: their addresses need registers,
    nothing is multiplied, and no row is read twice.
    """
    if shape.source is Source.RAW:
        block_m = min(16, block_of(num_rows * shape.gqa))
        return ScoreConfig(block_m, min(512, 4096 // block_m), 4, 3)
    block_m = min(32, block_of(num_rows * shape.gqa, 16))
    coded = shape.source in (Source.LOW_BIT, Source.MINMAX)
    return ScoreConfig(block_m, 64 if coded and shape.row_units >= 32 else 128, 4, 3)


def coded_words(shape: ScoreShape) -> int:
    """Words of 4-bit codes of a row; 0 where there are none."""
    coded = shape.source in (Source.LOW_BIT, Source.MINMAX) and shape.bits == 4
    return shape.row_units if coded else 0
