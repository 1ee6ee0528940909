"""What an anchor layer scores: shape and groups, checked and in tables on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.pooling import MOST_APART, Pooling
from prefix_kernels.types import CandidateForm

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

    Raises:
        ValueError: query heads that do not divide, bits that are no code's, or sums of nothing.
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

    def __post_init__(self) -> None:
        quarters = self.bits < 8 and self.channels % 4
        if self.num_qo_heads % self.num_kv_heads or self.bits not in (2, 4, 8, 16) or quarters:
            raise ValueError(
                "expected num_qo_heads as a multiple of num_kv_heads, bits of 2, 4, 8 or 16, and with codes of 2 and 4 "
                f"bits channels as a multiple of 4, got {self}"
            )
        if not 1 <= self.sum_every <= MOST_APART:
            raise ValueError(f"expected sum_every of 1 to {MOST_APART}, got {self.sum_every}; 1 sums all candidates")
        if self.shared_rows and self.form is not CandidateForm.TOKEN:
            raise ValueError(f"expected shared_rows of form TOKEN alone, got {self.form.name}; leave it out")
        entries = (1,) if self.form is CandidateForm.TOKEN else (1, LEAST_BLOCK)
        if self.entry_tokens not in entries:
            raise ValueError(
                f"expected entry_tokens of {' or '.join(map(str, entries))} for candidates of form {self.form.name}, "
                f"got {self.entry_tokens}; 1 lists every token"
            )

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
