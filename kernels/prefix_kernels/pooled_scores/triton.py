"""Triton forms of the pooled scores: one group, planned and run once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from prefix_kernels.launching import block_of
from prefix_kernels.low_bit import LowBitTensor
from prefix_kernels.pooled_scores.runner import PooledScores, ScoreConfig, ScoredGroup, ScoreShape, Source
from prefix_kernels.pooling import Pooling

_PROGRAMS = 264
"""Of all KV heads: two for every multiprocessor of an H200."""


def token_scores_triton(
    q: Tensor, keys: LowBitTensor, channels: Tensor | None, sm_scale: float, pooling: Pooling
) -> Tensor:
    """As the reference; rows of codes are read once per pass and unpacked in registers."""
    num_kv_heads, count = keys.packed.shape[:2]
    kept = keys.scale.shape[1]
    shape = ScoreShape(q.shape[1], num_kv_heads, Source.LOW_BIT, kept, keys.bits, channels is not None, pooling)
    every = tuple(count * head for head in range(num_kv_heads))
    named = None if channels is None else channels.short().contiguous()
    group = ScoredGroup(
        tuple(range(q.shape[0])),
        (count,) * num_kv_heads,
        every,
        (0,) * num_kv_heads,
        every,
        (named, _aligned(keys.packed), keys.scale.float().contiguous()),
    )
    scores = q.new_empty(num_kv_heads * count, dtype=torch.float32)
    _planned(shape, group, q).run(q, scores, sm_scale)
    return scores.view(num_kv_heads, count)


def exact_scores_triton(q: Tensor, k_cache: Tensor, slots: Tensor, sm_scale: float, pooling: Pooling) -> Tensor:
    """As the reference; for few rows the keys are read once and raw scores are kept, else they are read twice."""
    if k_cache.stride(2) != 1:
        k_cache = k_cache.contiguous()
    count, num_kv_heads, head_dim = slots.shape[0], k_cache.shape[1], k_cache.shape[2]
    shape = ScoreShape(q.shape[1], num_kv_heads, Source.KEYS, head_dim, pooling=pooling)
    every = tuple(count * head for head in range(num_kv_heads))
    nothing = (0,) * num_kv_heads
    group = ScoredGroup(tuple(range(q.shape[0])), (count,) * num_kv_heads, nothing, nothing, every)
    scores = q.new_empty(num_kv_heads * count, dtype=torch.float32)
    raw = raw_for(shape, q.shape[0], count, q.device)
    _planned(shape, group, q).run(q, scores, sm_scale, k_cache=k_cache, lists=slots.contiguous(), raw=raw)
    return scores.view(num_kv_heads, count)


def block_scores_triton(
    q: Tensor, parts: tuple[LowBitTensor, ...], row_indptr: Tensor, sm_scale: float, pooling: Pooling
) -> Tensor:
    """As the reference, ragged over heads without padding; waits for the device to read `row_indptr`."""
    bounds = row_indptr.tolist()
    num_kv_heads = len(bounds) - 1
    counts = tuple(end - begin for begin, end in itertools.pairwise(bounds))
    most = max(counts)
    head_dim = parts[0].scale.shape[1]
    bits = parts[0].packed.shape[1] * 8 // head_dim
    source = Source.LOW_BIT if len(parts) == 1 else Source.MINMAX
    arrays: list[Tensor | None] = [None]
    for part in parts:
        arrays += [_aligned(part.packed), part.scale.float().contiguous()]
    group = ScoredGroup(
        tuple(range(q.shape[0])),
        counts,
        tuple(bounds[:-1]),
        (0,) * num_kv_heads,
        tuple(most * head for head in range(num_kv_heads)),
        tuple(arrays),
    )
    shape = ScoreShape(q.shape[1], num_kv_heads, source, head_dim, bits, False, pooling)
    scores = torch.full((num_kv_heads * most,), -torch.inf, dtype=torch.float32, device=q.device)
    _planned(shape, group, q).run(q, scores, sm_scale)
    return scores.view(num_kv_heads, most)


def raw_for(shape: ScoreShape, num_rows: int, count: int, device: torch.device) -> Tensor | None:
    """Room for raw scores, one candidate's rows together, where that is less than reading its bf16 key again.

    A candidate's raw scores are written and read, 8 bytes a row; its key has 2 bytes a channel.
    """
    rows = num_rows * shape.gqa
    if 8 * rows > 2 * shape.channels:
        return None
    room = torch.empty(1, shape.num_kv_heads, count, rows, dtype=torch.float32, device=device)
    return room.transpose(2, 3)


def _aligned(codes: Tensor) -> Tensor:
    """As the kernel reads them: contiguous, from a multiple of 16 bytes on."""
    codes = codes.contiguous()
    return codes.clone() if codes.data_ptr() % 16 else codes


def _planned(shape: ScoreShape, group: ScoredGroup, q: Tensor) -> PooledScores:
    config = config_for(shape, len(group.rows))
    steps = -(-max(group.counts) // config.block_n)
    config = replace(config, num_chunks=max(1, min(_PROGRAMS // shape.num_kv_heads, steps)))
    scoring = PooledScores(shape, max(q.shape[0], 1), 1, config, q.device)
    scoring.plan([group])
    return scoring


def config_for(shape: ScoreShape, num_rows: int) -> ScoreConfig:
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
