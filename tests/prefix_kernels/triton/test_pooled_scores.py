"""Pooled scores against the references: exact keys, token codes, block bounds, raw scores; groups in one plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from prefix_kernels.block_scores import (
    block_scores_mean,
    exact_scores,
    low_bit_block_scores,
    token_scores,
)
from prefix_kernels.launching import recording
from prefix_kernels.low_bit import LowBitTensor, dequantize, quantize
from prefix_kernels.pooled_scores import PooledScores, ScoreConfig, ScoredGroup, ScoreShape, Source
from prefix_kernels.pooled_scores.runner import default_config
from prefix_kernels.pooling import HEADROOM, Pooling, pool_scores
from tests.prefix_kernels.triton.conftest import INTERPRETED, paged_kv

DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
#: Largest error of a natural-log score of about unit variance, by the dtype of the queries.
BUDGET = {torch.float32: 1e-4, torch.float16: 6e-3, torch.bfloat16: 6e-3}
SM_SCALE = 0.2


def queries(rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(rows)).to(device, dtype)


def codes(count: int, kv_heads: int, channels: int, bits: int, device: torch.device, seed: int = 0) -> LowBitTensor:
    gen = torch.Generator().manual_seed(seed)
    return quantize((torch.randn(kv_heads, count, channels, generator=gen) + 0.7).to(device), bits)


def uniform_group(rows: int, count: int, kv_heads: int, arrays: tuple[Tensor | None, ...] = ()) -> ScoredGroup:
    every = tuple(count * head for head in range(kv_heads))
    return ScoredGroup(tuple(range(rows)), (count,) * kv_heads, every, (0,) * kv_heads, every, arrays)


def scored(scoring: PooledScores, q: Tensor, group: ScoredGroup, count: int, **options: Any) -> Tensor:
    scoring.plan([group])
    scores = torch.full((scoring.shape.num_kv_heads * count,), torch.nan, device=q.device)
    scoring.run(q, scores, SM_SCALE, **options)
    return scores.view(scoring.shape.num_kv_heads, count)


def close(scores: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(scores, reference, atol=BUDGET[dtype], rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("rows", [1, 3, 5, 11])
def test_token_codes_on_some_channels(
    rows: int, bits: int, pooling: Pooling, dtype: torch.dtype, device: torch.device
) -> None:
    """Of 5 requests and more the rows are several tiles."""
    count, kv_heads, gqa, dim, kept = 203, 2, 4, 64, 48
    q = queries(rows, kv_heads * gqa, dim, dtype, device)
    keys = codes(count, kv_heads, kept, bits, device)
    order = torch.rand(kv_heads, dim, generator=torch.Generator().manual_seed(bits)).argsort(dim=1)
    channels = order[:, :kept].sort(dim=1).values.to(device)
    shape = ScoreShape(kv_heads * gqa, kv_heads, Source.LOW_BIT, kept, bits, True, pooling)
    scoring = PooledScores(shape, 12, 1, ScoreConfig(block_n=32, num_chunks=3), device)
    group = uniform_group(rows, count, kv_heads, (channels.short(), keys.packed, keys.scale))
    close(scored(scoring, q, group, count), token_scores(q.float(), keys, channels, SM_SCALE, pooling), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize(
    ("count", "sum_every", "block_n", "num_chunks"),
    [
        (4095, 16, 128, 3),
        (4096, 16, 128, 3),
        (6147, 2, 128, 2),
        pytest.param(8195, 16, 256, 40, marks=pytest.mark.full),
    ],
)
def test_sums_of_a_sample(
    count: int,
    sum_every: int,
    block_n: int,
    num_chunks: int,
    pooling: Pooling,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Of 8,195 candidates every fourth is summed, of 6,147 every third; of 40 chunks most have none of them."""
    q, keys = queries(3, 8, 32, dtype, device), codes(count, 2, 32, 4, device)
    shape = ScoreShape(8, 2, Source.LOW_BIT, 32, 4, pooling=pooling, sum_every=sum_every)
    scoring = PooledScores(shape, 3, 1, ScoreConfig(block_n=block_n, num_chunks=num_chunks), device)
    found = scored(scoring, q, uniform_group(3, count, 2, (None, keys.packed, keys.scale)), count)
    raw = block_scores_mean(q.float(), dequantize(keys))
    close(found, pool_scores(raw, SM_SCALE, pooling, sum_every=sum_every), dtype)
    far = float((pool_scores(raw, SM_SCALE, pooling) - HEADROOM - found).abs().max())
    assert (far > 2 * BUDGET[dtype]) == (count > 4095)


def test_sums_of_a_sample_of_a_long_prefix(device: torch.device) -> None:
    """Stretches are numbered beyond what times 40,503 fits into 31 bits."""
    count = 120_000
    q, keys = queries(1, 1, 16, torch.float32, device), codes(count, 1, 16, 4, device)
    shape = ScoreShape(1, 1, Source.LOW_BIT, 16, 4, sum_every=2)
    scoring = PooledScores(shape, 1, 1, ScoreConfig(block_n=1024 if INTERPRETED else 128, num_chunks=3), device)
    found = scored(scoring, q, uniform_group(1, count, 1, (None, keys.packed, keys.scale)), count)
    raw = block_scores_mean(q, dequantize(keys))
    close(found, pool_scores(raw, SM_SCALE, sum_every=2), torch.float32)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_sums_of_a_sample_of_raw_scores(pooling: Pooling, device: torch.device) -> None:
    count, rows = 6000, 5
    raw = torch.randn(1, 1, rows, count, generator=torch.Generator().manual_seed(1))
    raw[:, :, :, 1000:2000] = -torch.inf
    raw[:, :, 2] = -torch.inf
    raw = raw.to(device)
    shape = ScoreShape(rows, 1, Source.RAW, pooling=pooling, sum_every=8)
    scoring = PooledScores(shape, 1, 1, ScoreConfig(block_m=8, block_n=128, num_chunks=3), device)
    group = ScoredGroup((0,), (count,), (0,), (0,), (0,), (), count)
    found = scored(scoring, queries(1, rows, 16, torch.float32, device), group, count, raw=raw.flatten())
    close(found, pool_scores(raw, SM_SCALE, pooling, sum_every=8), torch.float32)


def test_sums_of_a_sample_keep_no_raw_scores(device: torch.device) -> None:
    for every in (0, 65):
        with pytest.raises(ValueError, match=f"1 to 64, got {every}"):
            PooledScores(ScoreShape(8, 2, Source.LOW_BIT, 32, sum_every=every), 1, 1, ScoreConfig(), device)
    keys, q = codes(5000, 2, 32, 4, device), queries(1, 8, 32, torch.float32, device)
    scoring = PooledScores(ScoreShape(8, 2, Source.LOW_BIT, 32, sum_every=2), 1, 1, ScoreConfig(), device)
    group = uniform_group(1, 5000, 2, (None, keys.packed, keys.scale))
    with pytest.raises(ValueError, match=r"sum_every 2.*leave it out"):
        scored(scoring, q, group, 5000, raw=torch.zeros(1, 2, 4, 5000, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", [Source.LOW_BIT, Source.MINMAX])
def test_rows_of_one_and_a_half_blocks(source: Source, dtype: torch.dtype, device: torch.device) -> None:
    """96 channels as 64 and 32: what 128 with padding gives, up to the order of sums."""
    count, kv_heads, kept = 203, 2, 96
    q = queries(3, kv_heads * 4, 128, dtype, device)
    keys, lower = codes(count, kv_heads, kept, 4, device), codes(count, kv_heads, kept, 4, device, seed=1)
    channels = torch.stack([torch.arange(96), torch.arange(32, 128)]).short().to(device)
    shape = ScoreShape(kv_heads * 4, kv_heads, source, kept, 4, True)
    arrays = (channels, keys.packed, keys.scale)
    arrays += (lower.packed, lower.scale) if source is Source.MINMAX else ()
    found = []
    for halves in (False, True):
        scoring = PooledScores(shape, 3, 1, ScoreConfig(block_n=64, num_chunks=2, halves=halves), device)
        with recording() as kept_launches:
            scored(scoring, q, uniform_group(3, count, kv_heads, arrays), count)
        assert {one.arguments["BLOCK_K"] for one in kept_launches.launches} == {16 if halves else 32}
        found.append(scored(scoring, q, uniform_group(3, count, kv_heads, arrays), count))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-5)
    if source is Source.LOW_BIT:
        close(found[1], token_scores(q.float(), keys, channels, SM_SCALE), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "pooling"), [(4, Pooling.MAX), (4, Pooling.MEAN), (8, Pooling.MAX), (2, Pooling.MAX)])
def test_block_bounds(bits: int, pooling: Pooling, dtype: torch.dtype, device: torch.device) -> None:
    """Heads of different length, each with its own scales; also the means alone, in what runs untuned."""
    counts, dim = (75, 31), 64
    q, indptr = queries(2, 8, dim, dtype, device), torch.tensor([0, 75, 106])
    tokens = torch.randn(sum(counts), 16, dim, generator=torch.Generator().manual_seed(4)).to(device)
    parts = []
    for rows in (tokens.amax(dim=1) + 0.5, tokens.amin(dim=1) - 0.5):
        heads = [quantize(own, bits) for own in rows.split(counts)]
        packed = torch.cat([head.packed for head in heads])
        parts.append(LowBitTensor(packed, torch.stack([h.scale for h in heads]), torch.stack([h.zero for h in heads])))
    arrays = (None, parts[0].packed, parts[0].scale, parts[1].packed, parts[1].scale)
    for source, own in ((Source.MINMAX, parts), (Source.LOW_BIT, parts[:1])):
        shape = ScoreShape(8, 2, source, dim, bits, False, pooling)
        config = ScoreConfig(block_n=16) if source is Source.MINMAX else default_config(shape, 2)
        scoring = PooledScores(shape, 2, 1, config, device)
        scoring.plan([ScoredGroup((0, 1), counts, (0, 75), (0, 0), (0, 75), arrays[: 1 + 2 * len(own)])])
        scores = torch.full((150,), -torch.inf, device=device)
        scoring.run(q, scores, SM_SCALE)
        close(scores.view(2, 75), low_bit_block_scores(q.float(), tuple(own), indptr, SM_SCALE, pooling), dtype)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "gqa", "dim"), [(1, 1, 64), (5, 5, 96), (9, 4, 128), (2, 16, 256)])
def test_exact_keys(rows: int, gqa: int, dim: int, dtype: torch.dtype, stored: bool, device: torch.device) -> None:
    count, kv_heads = 70, 2
    q = queries(rows, kv_heads * gqa, dim, dtype, device)
    keys = torch.randn(count, kv_heads, dim, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    kv, slots = paged_kv(keys, keys)
    scoring = PooledScores(
        ScoreShape(kv_heads * gqa, kv_heads, Source.KEYS, dim), rows, 1, ScoreConfig(block_n=32, num_chunks=2), device
    )
    raw = torch.full((1, kv_heads, rows * gqa, count), torch.nan, device=device) if stored else None
    scores = scored(scoring, q, uniform_group(rows, count, kv_heads), count, k_cache=kv.k_cache, lists=slots, raw=raw)
    close(scores, exact_scores(q.float(), kv.k_cache.float(), slots, SM_SCALE), dtype)


@pytest.mark.parametrize("num_chunks", [2, 3])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_a_key_that_is_no_number_leaves_no_share_to_its_head(
    pooling: Pooling, num_chunks: int, device: torch.device
) -> None:
    """Of none of its tokens, however they are cut: a sum without that key would make shares of the rest."""
    q, keys = queries(2, 8, 64, torch.float32, device), queries(70, 2, 64, torch.float32, device)
    keys[33, 0, 5] = torch.nan
    kv, slots = paged_kv(keys, keys)
    shape = ScoreShape(8, 2, Source.KEYS, 64, pooling=pooling)
    scoring = PooledScores(shape, 2, 1, ScoreConfig(block_n=32, num_chunks=num_chunks), device)
    scores = scored(scoring, q, uniform_group(2, 70, 2), 70, k_cache=kv.k_cache, lists=slots)
    assert not scores[0].isfinite().any()
    reference = pool_scores(block_scores_mean(q, keys.transpose(0, 1)), SM_SCALE, pooling)
    close(scores[1], reference[1], torch.float32)


@pytest.mark.parametrize("block_m", [1, 4, 16])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_raw_scores_with_holes_and_silent_rows(pooling: Pooling, block_m: int, device: torch.device) -> None:
    count, kv_heads, rows, gqa = 100, 2, 3, 4
    gen = torch.Generator().manual_seed(0)
    raw = torch.randn(1, kv_heads, rows * gqa, count, generator=gen)
    raw[torch.rand(raw.shape, generator=gen) < 0.5] = -torch.inf
    raw[:, 0, 3] = -torch.inf  # a row that says nothing
    raw[:, :, :, 40] = -torch.inf  # a candidate that nobody names
    raw = raw.to(device)
    scoring = PooledScores(
        ScoreShape(kv_heads * gqa, kv_heads, Source.RAW, pooling=pooling),
        rows,
        1,
        ScoreConfig(block_m, block_n=16, num_chunks=3),
        device,
    )
    q = queries(rows, kv_heads * gqa, 16, torch.float32, device)
    begins = tuple(rows * gqa * count * head for head in range(kv_heads))
    group = replace(uniform_group(rows, count, kv_heads), list_begins=begins, raw_stride=count)
    scores = scored(scoring, q, group, count, raw=raw.flatten())
    close(scores, pool_scores(raw.view(kv_heads, rows, gqa, count), SM_SCALE, pooling), torch.float32)
    assert bool((scores[:, 40] == -torch.inf).all())
    with pytest.raises(ValueError, match="expected a contiguous arena of 2400 raw scores, got 2399 of stride 1"):
        scored(scoring, q, group, count, raw=raw.flatten()[:-1])
    with pytest.raises(ValueError, match=r"expected raw .arena. fp32, got .1, 2, 12, 100."):
        scored(scoring, q, group, count, raw=raw)


def test_raw_scores_of_groups_of_other_lengths(device: torch.device) -> None:
    """Rows and begins as they come, in one arena; the second group has more rows than the first."""
    kv_heads, gqa = 2, 2
    scoring = PooledScores(ScoreShape(4, kv_heads, Source.RAW), 5, 3, ScoreConfig(block_n=16, num_chunks=2), device)
    arena = torch.full((3000,), torch.nan)
    gen = torch.Generator().manual_seed(0)
    groups, wanted, at = [], [], 7
    for number, (rows, count, stride) in enumerate((((2,), 33, 35), ((4, 0, 1), 101, 101))):
        raw = torch.randn(kv_heads, len(rows) * gqa, count, generator=gen)
        begins = tuple(at + head * len(rows) * gqa * stride for head in range(kv_heads))
        for head, begin in enumerate(begins):
            arena.as_strided((len(rows) * gqa, count), (stride, 1), begin).copy_(raw[head])
        at += kv_heads * len(rows) * gqa * stride + 3
        nothing, own = (0,) * kv_heads, tuple(300 * number + 150 * head for head in range(kv_heads))
        groups.append(ScoredGroup(rows, (count,) * kv_heads, nothing, begins, own, raw_stride=stride))
        wanted.append(pool_scores(raw.view(kv_heads, len(rows), gqa, count), SM_SCALE))
    scoring.plan(groups)
    scores = torch.full((600,), torch.nan, device=device)
    scoring.run(queries(5, 4, 16, torch.float32, device), scores, SM_SCALE, raw=arena.to(device))
    for number, expected in enumerate(wanted):
        close(scores.view(2, kv_heads, 150)[number, :, : expected.shape[1]].cpu(), expected, torch.float32)
    assert bool(scores.view(2, kv_heads, 150)[0, :, 33:].isnan().all())


def test_groups_ragged_heads_and_listed_candidates(device: torch.device) -> None:
    """Two groups with indexes of their own; heads of different length; only listed rows are scored."""
    kv_heads, gqa, dim = 2, 4, 64
    q = queries(5, kv_heads * gqa, dim, torch.float32, device)
    members = ((3, 0, 4), (1,))
    gen = torch.Generator().manual_seed(3)
    lists: list[Tensor] = []
    groups, wanted = [], []
    at = 0
    for number, rows in enumerate(members):
        lengths = ((50, 31), (90, 17))[number]
        flat = torch.randn(1, sum(lengths), dim, generator=gen).to(device)
        keys = quantize(flat, 4)
        scale = keys.scale.expand(kv_heads, dim).contiguous()
        picks = [torch.randperm(n, generator=gen)[: n // 2].sort().values.to(device) for n in lengths]
        counts = [len(pick) for pick in picks]
        begins = [at, at + counts[0]]
        firsts = (0, lengths[0])
        lists += picks
        groups.append(
            ScoredGroup(rows, tuple(counts), firsts, tuple(begins), tuple(begins), (None, keys.packed[0], scale))
        )
        values = dequantize(keys)[0]
        for head, (pick, first) in enumerate(zip(picks, firsts, strict=True)):
            part = q[list(rows), head * gqa : head * gqa + gqa]
            raw = block_scores_mean(part, values[first + pick][None])
            wanted.append(pool_scores(raw, SM_SCALE)[0])
        at += sum(counts)
    scoring = PooledScores(
        ScoreShape(kv_heads * gqa, kv_heads, Source.LOW_BIT, dim),
        5,
        3,
        ScoreConfig(block_n=16, num_chunks=2),
        device,
        listed=True,
    )
    for order in (groups, groups[::-1], groups):  # one plan after another
        scoring.plan(order)
        scores = torch.full((at,), torch.nan, device=device)
        scoring.run(q, scores, SM_SCALE, lists=torch.cat(lists).int())
        close(scores, torch.cat(wanted), torch.float32)


@pytest.mark.parametrize("source", [Source.KEYS, Source.RAW, Source.LOW_BIT])
def test_missing_tensors_are_named(source: Source, device: torch.device) -> None:
    scoring = PooledScores(ScoreShape(4, 1, source, 16), 1, 1, ScoreConfig(), device, listed=True)
    with pytest.raises(ValueError, match=r"expected .*(k_cache|raw|lists).* got none"):
        scoring.run(queries(1, 4, 16, torch.float32, device), torch.empty(4, device=device), SM_SCALE)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    shape = ScoreShape(4, 1, Source.LOW_BIT, 16)
    scoring = PooledScores(shape, 2, 1, ScoreConfig(), device)
    keys = codes(5, 1, 16, 4, device)
    arrays = (None, keys.packed, keys.scale)
    group = uniform_group(2, 5, 1, arrays)
    for groups, message in (
        ([group, group], "expected at most 1 groups of 2 rows"),
        ([uniform_group(3, 5, 1)], "expected at most 1 groups of 2 rows"),
        ([uniform_group(1, 5, 2)], "for each of 1 KV heads"),
        ([replace(group, rows=(2,))], "expected at most 1 groups of 2 rows"),
        ([replace(group, rows=(-1,))], "expected at most 1 groups of 2 rows"),
        ([replace(group, rows=())], "expected a row or more in each group"),
        ([replace(group, first_rows=(1,))], "expected 6 rows of codes, got .*; are they of all KV heads"),
    ):
        with pytest.raises(ValueError, match=message):
            scoring.plan(groups)
    shifted = torch.zeros(48, dtype=torch.uint8, device=device)[8:48].view(1, 5, 8)
    for wrong, message in (
        ((), "expected 3 arrays for LOW_BIT"),
        ((None, None, keys.scale), "expected codes of a group's arrays, got none"),
        ((None, keys.packed, keys.scale.half()), "expected scale"),
        ((None, keys.packed.int(), keys.scale), "expected codes"),
        ((None, shifted, keys.scale), "at a multiple of 16 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            scoring.plan([uniform_group(2, 5, 1, wrong)])
    scoring.plan([group])
    with pytest.raises(ValueError, match="expected q of 2 rows or more, as planned, got 1"):
        scoring.run(queries(1, 4, 16, torch.float32, device), torch.empty(5, device=device), SM_SCALE)
    with pytest.raises(ValueError, match="expected q"):
        scoring.run(queries(3, 4, 16, torch.float32, device), torch.empty(5, device=device), SM_SCALE)
    q, scores = queries(2, 4, 16, torch.float32, device), torch.empty(5, device=device)
    for wrong in (scores.half(), scores[:4]):
        with pytest.raises(ValueError, match="contiguous float32 arena of 5 entries or more"):
            scoring.run(q, wrong, SM_SCALE)
    for wrong in (queries(2, 4, 32, torch.float32, device), q.double()):
        with pytest.raises(ValueError, match=r"expected q .at most 2, 4, 16. in fp32, fp16 or bf16"):
            scoring.run(wrong, scores, SM_SCALE)
    with pytest.raises(ValueError, match=r"expected arrays .1, 5. int64 contiguous, got .1, 5. torch.int32"):
        scoring.run(q, scores, SM_SCALE, arrays=torch.zeros(1, 5, dtype=torch.int32, device=device))
    room = torch.empty(1, 1, 8, 5, device=device)
    for wrong in (room[:, :, :7], room[..., :4]):
        with pytest.raises(ValueError, match=r"expected raw .* of .1, 1, 8, 5. or more, as planned"):
            scoring.run(q, scores, SM_SCALE, raw=wrong)
    listed = PooledScores(shape, 2, 1, ScoreConfig(), device, listed=True)
    listed.plan([ScoredGroup((0, 1), (5,), (0,), (2,), (0,), arrays)])
    with pytest.raises(ValueError, match=r"expected lists of 7 entries or more, as planned, got .6"):
        listed.run(q, scores, SM_SCALE, lists=torch.zeros(6, dtype=torch.int32, device=device))
    for heads, bits in itertools.product((4,), (3, 16)):
        with pytest.raises(ValueError, match="bits of 2, 4 or 8"):
            PooledScores(ScoreShape(heads, 1, Source.LOW_BIT, 16, bits), 2, 1, ScoreConfig(), device)
