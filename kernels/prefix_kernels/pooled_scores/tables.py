"""What an anchor layer scores: shape and groups, checked and in tables on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from prefix_kernels.launching import send
from prefix_kernels.pooling import MOST_APART, Pooling
from prefix_kernels.types import CandidateForm

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_FIELDS = 4
"""int64 fields of a group's KV head: candidates; first row of codes; of blocks the log2 of their tokens, of tokens that
of those of a row, of listed candidates where their list begins; first score."""
LEAST_BLOCK = 16
"""Tokens of a block: lists are made 16 tokens at a time or more."""
ARRAYS = 5
"""Addresses of a group's row, see `ScoredGroup.arrays`."""


@dataclass(frozen=True)
class ScoreShape:
    """What stays the same from step to step.

    Attributes:
        num_qo_heads, num_kv_heads: heads.
        channels: of a key that are multiplied: those that the codes keep.
        bits: of a code: 2, 4 or 8; 16: no codes but fp16.
        listed_channels: whether codes keep some channels only, which an array names.
        pooling: over the rows and query heads of a group.
        sum_every: how few candidates enter the sums of the softmax, see `pooling.pool_scores`.
        form: what stands for a candidate.
        entry_tokens: that an entry of a list stands for, 1 or 16: of the list of listed candidates, or of the lists
            that blocks make. Entry e is the tokens from 16 e on, and all counts of blocks are then of entries.
        shared_rows: whether tokens may share a row of codes (`ScoredGroup.row_tokens`).
    """

    num_qo_heads: int
    num_kv_heads: int
    channels: int
    bits: int = 4
    listed_channels: bool = False
    pooling: Pooling = Pooling.MAX
    sum_every: int = 1
    form: CandidateForm = CandidateForm.TOKEN
    entry_tokens: int = 1
    shared_rows: bool = False

    @property
    def gqa(self) -> int:
        """Query heads of a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def row_units(self) -> int:
        """Words (4 bits), bytes (2 and 8 bits) or halves of one row of codes."""
        return self.channels // (1 if self.bits >= 8 else 4)


@dataclass(frozen=True)
class ScoredGroup:
    """A group and what it chooses from.

    Attributes:
        rows: batch rows.
        count: tokens that are candidates, or in blocks that are: those of the prefix, or of a list.
        first_rows: per KV head, first of its rows among the codes.
        score_begins: per KV head, where its scores go in the arena of scores.
        arrays: tensors of the index on the device, kept alive by the caller while runs may read them: channels (int16
            [num_kv_heads, channels]) or None; codes (uint8, or fp16 with 16 bits); scale (fp32 [num_kv_heads,
            channels]) or None with 16 bits. Of blocks the codes are of the means, or of the minima; then two more
            follow: the maxima's codes and scale, or the radii (fp16, a row's each) and None. None at all: runs bring
            the addresses (`ScoreInputs.arrays`) of what `check_group` passed.
        block_sizes: per KV head, tokens of a block, a power of 2 from 16 on (or entries, from 1 on:
            `ScoreShape.entry_tokens`); none: candidates are tokens.
        list_begins: per KV head, where its list begins in `ScoreInputs.candidates`; none: they are the prefix's.
        row_tokens: per KV head, tokens that share a row of codes, a power of 2; none: each has its own. The first row
            is that of the first token.
    """

    rows: tuple[int, ...]
    count: int
    first_rows: tuple[int, ...]
    score_begins: tuple[int, ...]
    arrays: tuple[Tensor | None, ...] = ()
    block_sizes: tuple[int, ...] = ()
    list_begins: tuple[int, ...] = ()
    row_tokens: tuple[int, ...] = ()

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Candidates of each KV head."""
        sizes = self.block_sizes or (1,) * len(self.first_rows)
        return tuple(-(-self.count // size) for size in sizes)

    @property
    def heads(self) -> list[tuple[int, ...]]:
        """[num_kv_heads][HEAD_FIELDS]: the table that kernels read."""
        shifts = tuple(size.bit_length() - 1 for size in self.block_sizes or self.row_tokens)
        own = shifts or self.list_begins or (0,) * len(self.first_rows)
        return list(zip(self.counts, self.first_rows, own, self.score_begins, strict=True))

    @cached_property
    def scores_end(self) -> int:
        """Entries that the arena of scores must have."""
        return max(begin + count for begin, count in zip(self.score_begins, self.counts, strict=True))


@dataclass(frozen=True, eq=False)
class ScoreInputs:
    """What a run scores.

    Attributes:
        q: [batch, num_qo_heads, head_dim] post-RoPE queries.
        sm_scale: multiplies q.k before the softmax.
        arrays: int64 [max_groups, 5], another layer's `array_addresses`; None for those of the plan.
        heads: int64 [max_groups, num_kv_heads, HEAD_FIELDS], another layer's `ScoredGroup.heads`; None for the plan's.
        candidates: int32, lists of candidates, ascending, `entry_tokens` an entry; with that form only.
    """

    q: Tensor
    sm_scale: float
    arrays: Tensor | None = None
    heads: Tensor | None = None
    candidates: Tensor | None = None


class Layers(NamedTuple):
    """The groups of a plan once more for each of some layers, one layer behind the other.

    Attributes:
        arrays: int64 [num_layers, num_groups, ARRAYS], `array_addresses` of each layer.
        heads: int64 [num_layers, num_groups, num_kv_heads, HEAD_FIELDS], `ScoredGroup.heads` of each layer but
            for where scores begin.
        rows, scores, lists: by how many queries, scores and entries of lists a layer's are behind those of the layer
            before.
    """

    arrays: Tensor
    heads: Tensor
    rows: int
    scores: int
    lists: int

    @property
    def number(self) -> int:
        """How many layers these are."""
        return self.arrays.shape[0]


class ScoreTables:
    """The tables of a plan in fixed device buffers.

    Args:
        shape: of heads and index.
        max_batch: requests of a batch, at most; of all layers of `plan`, where it has several.
        max_groups: groups of a batch, at most; likewise.
        device: where the buffers are made.
        max_group: requests of a group, at most; None: all of a batch.

    Raises:
        ValueError: query heads that do not divide, bits that are no code's, or sums of nothing.
    """

    def __init__(
        self, shape: ScoreShape, max_batch: int, max_groups: int, device: torch.device, max_group: int | None = None
    ) -> None:
        quarters = shape.bits < 8 and shape.channels % 4
        if shape.num_qo_heads % shape.num_kv_heads or shape.bits not in (2, 4, 8, 16) or quarters:
            raise ValueError(
                "expected num_qo_heads as a multiple of num_kv_heads, bits of 2, 4, 8 or 16, and with codes of 2 and 4 "
                f"bits channels as a multiple of 4, got {shape}"
            )
        if not 1 <= shape.sum_every <= MOST_APART:
            raise ValueError(f"expected sum_every of 1 to {MOST_APART}, got {shape.sum_every}; 1 sums all candidates")
        if shape.shared_rows and shape.form is not CandidateForm.TOKEN:
            raise ValueError(f"expected shared_rows of form TOKEN alone, got {shape.form.name}; leave it out")
        entries = (1,) if shape.form is CandidateForm.TOKEN else (1, LEAST_BLOCK)
        if shape.entry_tokens not in entries:
            raise ValueError(
                f"expected entry_tokens of {' or '.join(map(str, entries))} for candidates of form {shape.form.name}, "
                f"got {shape.entry_tokens}; 1 lists every token"
            )
        self.shape = shape
        self.max_batch, self.max_groups = max_batch, max_groups
        self.max_rows = (max_group or max_batch) * shape.gqa
        heads = (max_groups, shape.num_kv_heads)
        self._rows = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._groups = torch.zeros(max_groups, 4, dtype=torch.int32, device=device)
        self._heads = torch.zeros(*heads, HEAD_FIELDS, dtype=torch.int64, device=device)
        self._arrays = torch.zeros(max_groups, ARRAYS, dtype=torch.int64, device=device)
        self._most_rows = 0
        self._own_arrays = True

    def plan(self, groups: Sequence[ScoredGroup], layers: Layers | None = None) -> None:
        """Write the tables of the next runs. Copies to the device, without a wait, on the stream of the runs.

        Args:
            groups: of the batch; with `layers` those of the first layer.
            layers: that are scored together; None: one, of the groups' own arrays.

        Raises:
            ValueError: more groups or rows than the buffers hold, a row out of range, a group without rows, or arrays
                that the kernel cannot read. The plan before stays in force.
        """
        rows = [row for group in groups for row in group.rows]
        count, apart = (1, 0) if layers is None else (layers.number, layers.rows)
        self._check_groups(groups, rows, count, apart)
        tables = torch.zeros(self._groups.shape, dtype=torch.int32)
        heads = torch.zeros(self._heads.shape, dtype=torch.int64)
        arrays = torch.zeros(self._arrays.shape, dtype=torch.int64)
        sizes, addresses, first = list[tuple[int, ...]](), list[list[int]](), 0
        for group in groups:
            if group.arrays:
                check_group(self.shape, group)
                addresses.append(array_addresses(self.shape, group.arrays))
            sizes.append((first, len(group.rows), max(group.counts), 0))
            first += len(group.rows)
        if groups:
            tables[: len(groups)] = torch.tensor(sizes, dtype=torch.int32)
            heads[: len(groups)] = torch.tensor([group.heads for group in groups])
        if addresses:
            arrays[: len(groups)] = torch.tensor(addresses)
        of_rows = torch.tensor(rows, dtype=torch.int32)
        if layers is not None and groups:
            of_layer, number = torch.arange(count), len(groups)
            places = heads[:number, :, -1] + layers.scores * of_layer[:, None, None]
            heads[: count * number] = torch.cat([layers.heads[..., :-1], places[..., None]], dim=-1).flatten(0, 1)
            arrays[: count * number] = layers.arrays.flatten(0, 1)
            tables[: count * number] = tables[:number].repeat(count, 1)
            tables[: count * number, 0] += (len(rows) * of_layer).repeat_interleave(number)
            of_rows = (of_rows + apart * of_layer[:, None]).flatten().int()
        buffers = (self._rows, self._groups, self._heads, self._arrays)
        for source, buffer in zip((of_rows, tables, heads, arrays), buffers, strict=True):
            send(source, buffer)
        self._own_arrays = layers is not None or bool(addresses) or not groups
        self._most_rows = max(rows, default=-1) + 1 + (count - 1) * apart

    def _check_groups(self, groups: Sequence[ScoredGroup], rows: Sequence[int], count: int, apart: int) -> None:
        """Of `plan`: their rows, and how many layers with queries how far apart."""
        most = self.max_rows // self.shape.gqa
        in_range = all(0 <= row < self.max_batch - (count - 1) * apart for row in rows)
        many = count * len(groups) > self.max_groups or count * len(rows) > self.max_batch
        if many or not in_range or not all(1 <= len(group.rows) <= most for group in groups):
            raise ValueError(
                f"expected at most {self.max_groups} groups of {self.max_batch} rows together, and 1 to {most} each, "
                f"got {count} times {len(groups)} of rows {rows}"
            )

    def arguments(self, inputs: ScoreInputs) -> dict[str, Any]:
        """What kernels are told of the plan, the queries and the index, by parameter name.

        Raises:
            ValueError: a tensor that the source needs is missing, or of another shape.
        """
        self._check_queries(inputs)
        shape, q, arrays = self.shape, inputs.q, inputs.arrays
        half = q.dtype is not torch.float32
        return {
            "q_ptr": q,
            "rows_ptr": self._rows,
            "groups_ptr": self._groups,
            "heads_ptr": self._heads if inputs.heads is None else inputs.heads,
            "arrays_ptr": self._arrays if arrays is None else arrays,
            "sm_scale": float(inputs.sm_scale),
            "q_stride_row": q.stride(0),
            "q_stride_head": q.stride(1),
            "max_rows": self.max_rows,
            "GQA": shape.gqa,
            "CHANNELS": shape.channels,
            "ROW_UNITS": shape.row_units,
            "BITS": shape.bits,
            "LISTED_CHANNELS": shape.listed_channels,
            "FORM": shape.form.value,
            "ENTRY": shape.entry_tokens,
            "SHARED_ROWS": shape.shared_rows,
            "candidates_ptr": self._rows if inputs.candidates is None else inputs.candidates,
            "SUM_EVERY": shape.sum_every,
            # Codes are exact in fp16, and a query's channel keeps 11 bits there.
            "COMPUTE": tl.float16 if half else tl.float32,
            "PRECISION": "tf32" if half else "ieee",
            # The interpreter knows no assembly.
            "ASSEMBLY": half and not knobs.runtime.interpret,
        }

    def _check_queries(self, inputs: ScoreInputs) -> None:
        q = inputs.q
        wide = self.shape.listed_channels or q.shape[-1] == self.shape.channels
        good = q.dim() == 3 and q.shape[1] == self.shape.num_qo_heads and q.shape[0] <= self.max_batch and wide
        if not good or q.stride(2) != 1 or q.dtype not in _DTYPES:
            width = "head_dim" if self.shape.listed_channels else self.shape.channels
            raise ValueError(
                f"expected q [at most {self.max_batch}, {self.shape.num_qo_heads}, {width}] in fp32, fp16 or bf16 with "
                f"adjacent channels, got {tuple(q.shape)} {q.dtype} of strides {q.stride()}"
            )
        if q.shape[0] < self._most_rows:
            raise ValueError(
                f"expected q of {self._most_rows} rows or more, as planned, got {q.shape[0]}; plan for this batch"
            )
        if inputs.arrays is None and not self._own_arrays:
            raise ValueError("expected arrays, as the plan has none, got none; hand in a layer's `array_addresses`")
        for name, table, like in (("arrays", inputs.arrays, self._arrays), ("heads", inputs.heads, self._heads)):
            if table is not None and (
                table.shape != like.shape or table.dtype is not like.dtype or not table.is_contiguous()
            ):
                raise ValueError(
                    f"expected {name} {tuple(like.shape)} int64 contiguous, got {tuple(table.shape)} {table.dtype}"
                )


def array_addresses(shape: ScoreShape, arrays: Sequence[Tensor | None]) -> list[int]:
    """A group's row of the table of addresses that the kernels read: 5 of them, 0 for what is not there.

    Codes are read 16 bytes at a time: their memory must begin at a multiple of that.

    Raises:
        ValueError: another number of arrays than `ScoredGroup` names, another dtype or shape, strided, or codes that
            begin elsewhere.
    """
    of_codes = "halves" if shape.bits == 16 else "codes"
    kinds = ["channels", of_codes, "scale"]
    if shape.form is CandidateForm.MINMAX:
        kinds += [of_codes, "scale"]
    elif shape.form is CandidateForm.BALL:
        kinds += ["radii", ""]
    if len(arrays) != len(kinds):
        raise ValueError(f"expected {len(kinds)} arrays ({', '.join(kinds)}), got {len(arrays)}")
    spared = {"", "channels" if not shape.listed_channels else "", "scale" if shape.bits == 16 else ""}
    for kind, array in zip(kinds, arrays, strict=True):
        if array is None:
            if kind not in spared:
                raise ValueError(f"expected {kind} of a group's arrays, got none; hand them in")
            continue
        _check_array(shape, kind, array)
    return [0 if array is None else array.data_ptr() for array in arrays] + [0] * (ARRAYS - len(arrays))


def _check_array(shape: ScoreShape, kind: str, array: Tensor) -> None:
    dtype = {"channels": torch.int16, "codes": torch.uint8, "scale": torch.float32}.get(kind, torch.float16)
    rows = {"codes": shape.channels * shape.bits // 8, "halves": shape.channels}
    wide = (shape.num_kv_heads, shape.channels)
    if kind in rows:
        fits, wanted = array.shape[-1] == rows[kind] and not array.data_ptr() % 16, f"[..., {rows[kind]}]"
    else:
        fits, wanted = kind == "radii" or tuple(array.shape) == wide, "one a row" if kind == "radii" else str(wide)
    if not fits or array.dtype is not dtype or not array.is_contiguous():
        raise ValueError(
            f"expected {kind} {wanted}, codes at a multiple of 16 bytes, in {dtype}, contiguous, got "
            f"{tuple(array.shape)} {array.dtype} of strides {array.stride()} at {array.data_ptr() % 16}"
        )


def check_group(shape: ScoreShape, group: ScoredGroup) -> None:
    """Raise ValueError unless kernels can read a group: its blocks and lists, and as many rows of codes."""
    sizes, heads = group.block_sizes, shape.num_kv_heads
    least = LEAST_BLOCK // shape.entry_tokens
    known = all(size >= least and size & (size - 1) == 0 for size in sizes)
    if len(sizes) != (heads if shape.form.is_block else 0) or not known:
        wanted = (
            f"powers of 2 from {least} on, one for each KV head" if shape.form.is_block else "no block sizes for tokens"
        )
        raise ValueError(f"expected {wanted}, got {sizes}")
    of_a_row = group.row_tokens or (1,) * heads
    shared = all(size > 0 and size & (size - 1) == 0 for size in of_a_row) and len(of_a_row) == heads
    if group.row_tokens and not (shape.shared_rows and shared):
        raise ValueError(f"expected row_tokens as powers of 2, one for each KV head, with shared_rows, got {of_a_row}")
    if len(group.list_begins) != (heads if shape.form is CandidateForm.LISTED else 0):
        raise ValueError(f"expected list_begins of {heads} KV heads for listed candidates alone, got {group}")
    counts = (-(-count // size) for count, size in zip(group.counts, of_a_row, strict=True))
    codes, rows = group.arrays[1], max(map(sum, zip(group.first_rows, counts, strict=True)))
    if codes is not None and codes[..., 0].numel() < rows:
        raise ValueError(f"expected {rows} rows of codes, got {tuple(codes.shape)}; are they of all KV heads?")
