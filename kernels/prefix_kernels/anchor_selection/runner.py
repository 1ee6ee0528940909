"""An anchor layer's selection, from queries to lists: planned on the host, then run in two launches, or in three."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from prefix_kernels.anchor_selection.kernels import score_kernel
from prefix_kernels.anchor_selection.programs import (
    CHUNKS_AT_ONCE,
    LIST_WARPS,
    POOL,
    TOKENS_OF_A_THREAD,
    Form,
    Programs,
    ScoredTokens,
    check_groups,
    check_queries,
    check_rows,
    check_sizes,
)
from prefix_kernels.grouped_attention.config import check_hopper
from prefix_kernels.launching import block_of, check_power_of_2, programs_at_once, send, shared_registers
from prefix_kernels.pooled_scores.tables import (
    ARRAYS,
    HEAD_FIELDS,
    Layers,
    ScoredGroup,
    ScoreInputs,
    ScoreShape,
    array_addresses,
    check_group,
)
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import ALIGNED, CandidateForm, SelectedLists, SelectionGroup, check_scores, check_table

_HOPPER = 9
_SHARED_BYTES = {True: 224 << 10, False: 160 << 10}
"""Of a multiprocessor that programs share, from sm_90 on and before, less what the GPU takes for itself of each."""
_COUNTS_BYTES = 10 << 10
"""Counts of keys, and what else a program has."""
_CHANNELS = (32, 64, 96, 128)
"""That sm_90's own kernel has: pieces of 32."""
_MOST_CHANNELS = 256
"""Of codes of tokens: tiles of more have no room in shared memory."""
_FEW_ROWS = 32
"""Of so many rows at most, the sums of 64 programs are read at once, else of 32. Groups of so few rows in a batch of
more have tiles of their own, of `_FEW_ROWS_BLOCK_N` candidates, on sm_90."""
_FEW_ROWS_BLOCK_N = 128
_LEAST_ROWS = 8
"""Groups of so few rows have the tiles of a batch of as few, on sm_90: of tokens, not of lists, and 64 channels at
most."""
_MOST_CODES = 256 * 64
"""Of a step of sm_90's own kernel: three steps have 24 KiB of shared memory."""
_MORE_CHUNKS = 64
"""Of more programs to a KV head, lest a second round be for one of them."""


@dataclass(frozen=True)
class AnchorConfig:
    """Tile and schedule.

    Attributes:
        block_m: query rows of a tile, a power of 2 of at least 8.
        block_n: candidates of a step, a power of 2 of at least 64.
        num_warps: of a program.
        num_stages: steps that are on their way at a time.
        halves: whether rows of 24 words of 4-bit codes (96 channels) are multiplied as 16 and 8, not as 32 of which 8
            are padding. Warp-group instructions (sm_90, `block_m` from 16 on) take that as it comes; others reorder it.
        programs_per_sm: programs that a multiprocessor holds at a time. Registers are bounded so that it does.
        specialized: scores by sm_90's own kernel (`fits_specialized`); `num_stages` and `halves` then say nothing.

    Raises:
        ValueError: other tiles, or a program that has fewer than 64 registers a thread; with `specialized` also more
            than 128 rows, or other numbers of warps than 4.
    """

    block_m: int = 16
    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    halves: bool = False
    specialized: bool = False

    def __post_init__(self) -> None:
        check_power_of_2("block_m", self.block_m, 8)
        check_power_of_2("block_n", self.block_n, 64)
        if self.specialized and not (self.num_warps == 4 and self.block_m <= 128):
            raise ValueError(
                f"expected 4 warps and at most 128 rows for sm_90's own kernel, got {self.num_warps} and {self.block_m}"
            )
        shared_registers(self.num_warps, self.programs_per_sm)

    @property
    def max_registers(self) -> int:
        """Registers of a thread that let `programs_per_sm` programs share those of a multiprocessor."""
        return shared_registers(self.num_warps, self.programs_per_sm)

    @property
    def stretch(self) -> int:
        """Candidates that a program's stretch is a multiple of. Those of a batch of many rows may be of few."""
        return max(self.block_n, _FEW_ROWS_BLOCK_N) if self.specialized else self.block_n


def fits_specialized(shape: ScoreShape) -> bool:
    """Whether sm_90's own kernel has it: tokens in codes of 4 bits, pooled by the maximum."""
    return not shape.form.is_block and shape.bits == 4 and shape.channels in _CHANNELS and shape.pooling is Pooling.MAX


def default_config(
    shape: ScoreShape,
    num_rows: int,
    capability: tuple[int, int] = (9, 0),
    *,
    specialized: bool = False,
) -> AnchorConfig:
    """Launch parameters by the rows of a batch and the GPU.

    Args:
        shape: of heads and index.
        num_rows: requests of the largest group.
        capability: of the GPU. Before (9, 0) tiles are lower: there, scores leave the registers otherwise.
        specialized: whether sm_90's own kernel may run: on such a GPU, for queries that are halves.

    Raises:
        ValueError: rows of the index are too wide for shared memory.
    """
    if specialized and capability[0] == _HOPPER and fits_specialized(shape):
        block_m = min(128, block_of(num_rows * shape.gqa, 8))
        block_n = _block_n(shape, block_m)
        # A list of one request or two is too short for more: each program reads what all of them counted.
        programs = 1 if block_m == 8 and shape.form is CandidateForm.LISTED else 2
        return AnchorConfig(block_m, block_n, 4, 3, programs, specialized=True)
    hopper = capability >= (9, 0)
    block_m = min(128 if hopper else 32, block_of(num_rows * shape.gqa, 8))
    halves = hopper and block_m >= 16
    if shape.form.is_block or shape.shared_rows:
        # Warp-group instructions, from 16 rows on, take two thirds of the time of others.
        return _config_of_blocks(shape, max(block_m, 16) if hopper else block_m, hopper)
    if shape.channels > _MOST_CHANNELS:
        raise _too_wide(shape)
    if block_m == 128:
        # One tile of all rows: codes are read and unpacked once a phase.
        return AnchorConfig(block_m, 128, 8, 3, 1, halves)
    return AnchorConfig(block_m, 128 if hopper else 64, 4, 3, 2, halves)


def _block_n(shape: ScoreShape, block_m: int) -> int:
    """Candidates of a step of sm_90's own kernel. Codes that are on their way take at most 24 KiB of shared memory."""
    block_n = 256 if block_m <= 16 else 128 if block_m <= _FEW_ROWS else 64
    return min(block_n, 128) if shape.channels > 64 else block_n


def _config_of_blocks(shape: ScoreShape, block_m: int, hopper: bool) -> AnchorConfig:
    """What fits the shared memory of a multiprocessor; of few candidates all programs have some."""
    arrays, row_bytes = 2 if shape.form is CandidateForm.MINMAX else 1, shape.channels * shape.bits // 8
    while True:
        wide = block_m == 128
        for stages, programs in ((3, 1 if wide else 2), (2, 1 if wide else 2), (2, 1)):
            sizes = (block_m, 128 if wide else 64, 8 if wide else 4)
            config = AnchorConfig(*sizes, stages, programs, hopper and block_m >= 16)
            # Queries may be fp32.
            needed = arrays * (config.block_n * row_bytes * stages + 4 * shape.channels * block_m)
            if needed <= _SHARED_BYTES[hopper] // programs - _COUNTS_BYTES:
                return config
        if block_m == 8:
            raise _too_wide(shape)
        block_m //= 2


def _too_wide(shape: ScoreShape) -> ValueError:
    return ValueError(
        f"expected an index of rows that shared memory has room for in decode graphs, got {shape.channels} channels of "
        f"{shape.bits} bits; lower num_channels or channel_ratio"
    )


class AnchorSelection:
    """Exactly min(budget, prefix_len) positions per group and KV head: sink, recent window, then the best tokens.

    Scores are the log of the (largest or mean) share of attention over the rows of a group, by the codes of a token
    index, of blocks, or of listed tokens: `pooling.pool_scores`. Source of the pooling: Kascade, 3.4 (after the
    softmax). Tokens rank by keys of 11 bits: natural logarithms in steps of 0.0215 from -44 to 0, what lies outside
    ties at the ends, -inf and NaN last. Among equal keys the most recent comes first.

    Runs of one object follow each other on one stream. If a launch dies half-way, make a new object: its programs'
    counters are left behind.

    Args:
        shape: of heads and index.
        max_batch: requests of a batch, at most; of all layers of `plan`, where it has several.
        max_groups: groups of a batch, at most; likewise.
        max_prefix_len: tokens of a prefix, at most.
        list_entries: of the lists of all groups and KV heads together, at most; likewise.
        config: tile and schedule.
        device: where the buffers are made.
        form: scores in one launch, or in one for each phase.
        num_programs: of a launch, shared by the KV heads and then by the groups; None: as many as run at a time.
        max_group: requests of a group, at most; None: all of a batch.
        list_warps: of a program that lists; more where its stretches are long.

    Raises:
        ValueError: sizes below 1, 2^30 tokens of all KV heads or more, or a configuration that does not fit.
    """

    def __init__(
        self,
        shape: ScoreShape,
        max_batch: int,
        max_groups: int,
        max_prefix_len: int,
        list_entries: int,
        config: AnchorConfig,
        device: torch.device,
        *,
        form: Form = Form.FUSED,
        num_programs: int | None = None,
        max_group: int | None = None,
        list_warps: int = LIST_WARPS,
    ) -> None:
        check_sizes(
            max_prefix_len, shape.num_kv_heads, max_batch=max_batch, max_groups=max_groups, list_entries=list_entries
        )
        if config.specialized:
            _check_fits(shape, config, device)
        self.shape, self.config, self.form = shape, config, form
        self.max_batch, self.max_groups = max_batch, max_groups
        self.max_prefix_len, self.list_entries = max_prefix_len, list_entries
        heads = shape.num_kv_heads
        self._max_rows = (max_group or max_batch) * shape.gqa
        self._rows = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._groups = torch.zeros(max_groups, 4, dtype=torch.int32, device=device)
        self._heads = torch.zeros(max_groups, heads, HEAD_FIELDS, dtype=torch.int64, device=device)
        self._arrays = torch.zeros(max_groups, ARRAYS, dtype=torch.int64, device=device)
        self._most_rows = 0
        self._own_arrays = True
        programs = max(1, (num_programs or programs_at_once(device, config.programs_per_sm)) // heads)
        whole = config.specialized and config.block_m <= _FEW_ROWS and shape.form is CandidateForm.TOKEN
        programs = programs if whole else _in_rounds(programs)
        self.programs = Programs(
            heads, programs, max_groups, config.stretch, device, max_rows=self._max_rows,
            list_warps=list_warps, list_chunks=CHUNKS_AT_ONCE if programs <= CHUNKS_AT_ONCE else _MORE_CHUNKS,
        )  # fmt: skip
        self._scores_end = 0

    def plan(
        self, scored: Sequence[ScoredGroup], selected: Sequence[SelectionGroup], layers: Layers | None = None
    ) -> None:
        """Write the tables of the next runs. Copies to the device, without a wait, on the stream of the runs.

        Args:
            scored: the groups, and where their codes and scores lie. Scores begin at multiples of 4.
            selected: their lengths, windows and budgets, in the same order.
            layers: all this once more for each of some layers, whose queries follow each other; None: for one.

        Raises:
            ValueError: another number of groups in one than in the other; groups, rows, prefixes or lists that there is
                no room for; a group without rows; lists of KV heads that overlap; scores that begin elsewhere; other
                candidates than the tokens of the prefix; arrays of some groups only, or such that the kernel cannot
                read. The plan before stays in force.
        """
        count, apart, scores, lists = (1, 0, 0, 0) if layers is None else (len(layers.arrays), *layers[2:])
        limits = (self.max_prefix_len, self.list_entries - (count - 1) * lists)
        check_groups(scored, selected, self.shape.num_kv_heads, limits)
        most = self._max_rows // self.shape.gqa
        rows = check_rows(
            scored, self.max_groups // count, self.max_batch // count, self.max_batch - (count - 1) * apart, most
        )
        _check_alike(scored, selected)
        tables = torch.zeros(self._groups.shape, dtype=torch.int32)
        heads = torch.zeros(self._heads.shape, dtype=torch.int64)
        arrays = torch.zeros(self._arrays.shape, dtype=torch.int64)
        sizes, addresses, first = list[tuple[int, ...]](), list[list[int]](), 0
        for group in scored:
            if group.arrays:
                check_group(self.shape, group)
                addresses.append(array_addresses(self.shape, group.arrays))
            sizes.append((first, len(group.rows), max(group.counts), 0))
            first += len(group.rows)
        if scored:
            tables[: len(scored)] = torch.tensor(sizes, dtype=torch.int32)
            heads[: len(scored)] = torch.tensor([group.heads for group in scored])
        if addresses:
            arrays[: len(scored)] = torch.tensor(addresses)
        of_rows = torch.tensor(rows, dtype=torch.int32)
        if layers is not None and scored:
            of_layer, number = torch.arange(count), len(scored)
            places = heads[:number, :, -1] + scores * of_layer[:, None, None]
            heads[: count * number] = torch.cat([layers.heads[..., :-1], places[..., None]], dim=-1).flatten(0, 1)
            arrays[: count * number] = layers.arrays.flatten(0, 1)
            tables[: count * number] = tables[:number].repeat(count, 1)
            tables[: count * number, 0] += (len(rows) * of_layer).repeat_interleave(number)
            of_rows = (of_rows + apart * of_layer[:, None]).flatten().int()
        buffers = (self._rows, self._groups, self._heads, self._arrays)
        for source, buffer in zip((of_rows, tables, heads, arrays), buffers, strict=True):
            send(source, buffer)
        self._own_arrays = layers is not None or bool(addresses) or not scored
        self._most_rows = max(rows, default=-1) + 1 + (count - 1) * apart
        self.programs.plan(selected, count, lists)
        # Scores are read four at a time.
        end = (count - 1) * scores + max((of.scores_end for of in scored), default=0)
        self._scores_end = end + -end % ALIGNED

    def run(
        self,
        inputs: ScoreInputs,
        scores: Tensor,
        lists: SelectedLists,
        *,
        slot_table: Tensor | None = None,
    ) -> None:
        """Select as planned, in two launches, or in three (`form`).

        Args:
            inputs: queries and what they are scored against.
            scores: fp32 arena, written at the groups' `score_begins`: natural log of the pooled share of attention.
                Not written for a group whose budget holds all of its tokens.
            lists: written, up to the counts.
            slot_table: int32 or int64 arena in which the groups' position-to-slot tables lie; with `lists.slots`.

        Raises:
            ValueError: a tensor of another shape or dtype than planned for; slots without a table; or one launch in
                Triton's interpreter.
            RuntimeError: CUDA's, where one launch does not fit the GPU; take fewer `num_programs`, or `Form.UNFUSED`.
        """
        # Programs of scores that wait for each other are all on the GPU before they let these come. Scores themselves
        # are not launched behind what is before them: their programs would stand where that ends first.
        behind = self.form is Form.FUSED and self.config.specialized
        found, entry_tokens = self.score(inputs, scores), self.shape.entry_tokens
        self.programs.make_lists(
            found, lists, slot_table, candidates=inputs.candidates, entry_tokens=entry_tokens, behind=behind
        )

    def score(self, inputs: ScoreInputs, scores: Tensor) -> ScoredTokens:
        """The launches of `run` up to scores, whose counts and tables are returned."""
        check_scores(scores, self._scores_end)
        if self.config.specialized:
            _check_inputs(inputs)
        kernel, own = self._scoring()
        arguments = self._arguments(inputs) | own | {"scores_ptr": scores, "BLOCK_N": self.config.block_n}
        config = self.config
        self.programs.score(
            kernel, self.form, arguments, num_warps=config.num_warps, num_stages=config.num_stages,
            maxnreg=config.max_registers,
        )  # fmt: skip
        return ScoredTokens(scores, arguments["heads_ptr"], self.programs.at_least, self.shape.form)

    def _arguments(self, inputs: ScoreInputs) -> dict[str, Any]:
        """What kernels are told of the plan, the queries and the index, by parameter name."""
        shape, q, arrays = self.shape, inputs.q, inputs.arrays
        width = None if shape.listed_channels else shape.channels
        check_queries(q, (self._most_rows, self.max_batch), shape.num_qo_heads, width)
        if arrays is None and not self._own_arrays:
            raise ValueError("expected arrays, as the plan has none, got none; hand in a layer's `array_addresses`")
        for name, table, like in (("arrays", arrays, self._arrays), ("heads", inputs.heads, self._heads)):
            if table is not None:
                check_table(name, table, tuple(like.shape), torch.int64)
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

    def _scoring(self) -> tuple[Any, dict[str, Any]]:
        """The kernel of scores, and what it is told beside tables and buffers."""
        config = self.config
        if config.specialized:
            from prefix_kernels.anchor_selection.sm90_codes_kernels import words_layout
            from prefix_kernels.anchor_selection.sm90_kernels import score_items_sm90_kernel

            least = _block_n(self.shape, _LEAST_ROWS)
            return score_items_sm90_kernel, {
                "BLOCK_M": config.block_m,
                "BLOCK_CHUNKS": 64 if config.block_m <= _FEW_ROWS else 32,
                "NUM_WARPS": config.num_warps,
                "LAYOUT": words_layout(config.block_n, config.num_warps),
                "FEW_LAYOUT": words_layout(config.stretch, config.num_warps),
                "LEAST_BLOCK_N": least,
                "LEAST_LAYOUT": words_layout(least, config.num_warps),
            }
        halves = config.halves and self.shape.bits == 4 and self.shape.row_units == 24
        return score_kernel, {
            "BLOCK_K": 16 if halves else block_of(self.shape.row_units, 16),
            "BLOCK_M": config.block_m,
            # Not of the number of programs, on which the order of sums would depend.
            "BLOCK_CHUNKS": 32,
            # Sixteen candidates to a warp, see the kernel's sums.
            "LANES": min(config.num_warps, config.block_n // 16),
            "STAGES": config.num_stages,
            "POOL": POOL[self.shape.pooling],
            "TILE": 32 * config.num_warps * TOKENS_OF_A_THREAD,
        }


def _in_rounds(programs: int) -> int:
    """Fewer programs where a last round of reading what all of them counted would be for an eighth of them or less."""
    rest = programs % CHUNKS_AT_ONCE
    return programs - rest if programs > CHUNKS_AT_ONCE and 8 * rest <= programs else programs


def _check_alike(scored: Sequence[ScoredGroup], selected: Sequence[SelectionGroup]) -> None:
    """Raise ValueError unless all groups have arrays or none has, and candidates are the tokens of the prefixes."""
    with_arrays = sum(bool(group.arrays) for group in scored)
    counts, lengths = [of.count for of in scored], [group.prefix_len for group in selected]
    if with_arrays not in (0, len(scored)) or counts != lengths:
        raise ValueError(
            "expected arrays of all groups or of none, and the tokens of each prefix as its candidates, got arrays of "
            f"{with_arrays} of {len(scored)} and candidates {counts} of prefixes of {lengths}; plan the same for both"
        )


def _check_fits(shape: ScoreShape, config: AnchorConfig, device: torch.device) -> None:
    """What sm_90's own kernel scores; on a CPU, where it can be compiled only, the device is not asked."""
    if not fits_specialized(shape):
        raise ValueError(
            "expected 4-bit codes on 32, 64, 96 or 128 channels, pooled by the maximum, for sm_90's own kernel, got "
            f"{shape}; use a configuration that is not specialized"
        )
    if config.stretch * shape.channels > _MOST_CODES:
        raise ValueError(
            f"expected steps of at most {_MOST_CODES} codes for sm_90's own kernel, got {config.stretch} candidates of "
            f"{shape.channels} channels; take a lower block_n"
        )
    check_hopper(device)


def _check_inputs(inputs: ScoreInputs) -> None:
    """It takes the largest score before it scales, and multiplies in INT8."""
    if not inputs.sm_scale > 0 or inputs.q.dtype is torch.float32:
        raise ValueError(
            f"expected a positive scale and q in fp16 or bf16 for sm_90's own kernel, got {inputs.sm_scale} and "
            f"{inputs.q.dtype}; use a configuration that is not specialized"
        )
