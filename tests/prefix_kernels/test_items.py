"""How the work of grouped attention is cut: every entry of every row once, no two parts in one place; its tiles."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefix_kernels.grouped_attention import AttentionConfig, AttentionShape, default_config, passes_for
from prefix_kernels.grouped_attention.items import DIRECT, Segment, cut

BLOCK_M, BLOCK_N, GQA, KV_HEADS = 16, 8, 4, 3
CUTS: dict[str, Any] = {"gqa": GQA, "num_kv_heads": KV_HEADS, "block_m": BLOCK_M, "block_n": BLOCK_N}


@st.composite
def passes(draw: st.DrawFn) -> list[Segment]:
    rows = draw(st.permutations(range(draw(st.integers(1, 24)))))
    segments, begin = [], 0
    while begin < len(rows):
        end = begin + draw(st.integers(1, 9))
        segments.append(Segment(tuple(rows[begin:end]), draw(st.integers(0, 100)), list_begin=1000 * begin, list_id=-1))
        begin = end
    return segments


@given(passes(), st.integers(1, 40), st.sets(st.integers(0, 23)), st.integers(0, 99))
def test_every_entry_of_a_row_is_attended_once(
    segments: list[Segment], target: int, alone: set[int], first_partial: int
) -> None:
    items = cut(segments, **CUTS, target=target, first_partial=first_partial, alone=alone)
    attended: Counter[tuple[int, int]] = Counter()
    parts: dict[int, list[int]] = {}
    tiles: list[int] = []
    chunk = max((item[6] - item[5] for item in items.items), default=1)
    for first, count, begin, _, _, start, end, partial in items.items:
        assert start % chunk == 0
        assert start < end
        for place in range(first, first + count):
            row = items.rows[place]
            attended.update((row, begin + entry) for entry in range(start, end))
            parts.setdefault(row, []).append(partial if partial == DIRECT else partial + (place - first) * GQA)
        if partial != DIRECT:
            tiles.append(partial)
    wanted = Counter((row, s.list_begin + i) for s in segments for row in s.rows for i in range(s.length))
    assert attended == wanted
    tiles.sort()
    height = KV_HEADS * BLOCK_M
    assert all(after - before >= height for before, after in itertools.pairwise(tiles))
    assert not tiles or (tiles[0] >= first_partial and tiles[-1] + height <= first_partial + len(tiles) * height)
    for row, first, stride, head_stride, count in items.spans:
        if count == DIRECT:
            assert parts.pop(row) == [DIRECT]
            assert row in alone
        else:
            assert parts.pop(row) == [first + i * stride for i in range(count)]
            assert head_stride == BLOCK_M
    assert not parts


def test_a_tile_is_direct_where_none_of_its_rows_has_another_part() -> None:
    segments = [Segment((0, 1, 2, 3, 4), 30)]
    for alone, target, partials in (
        ({0, 1, 2, 3, 4}, 1, [DIRECT, DIRECT]),
        ({0, 1, 3, 4}, 1, [0, DIRECT]),
        ((), 1, [0, 48]),
        ({0, 1, 2, 3, 4}, 4, [0, 48, 96, 144]),  # two parts each
    ):
        assert [item[-1] for item in cut(segments, **CUTS, target=target, alone=alone).items] == partials
    with pytest.raises(ValueError, match="block_m of at least gqa=4 rows"):
        cut(segments, **{**CUTS, "block_m": 2}, target=1)


def test_lists_of_one_length_stay_whole_and_a_long_one_among_short_ones_is_cut() -> None:
    def parts(lengths: list[int]) -> list[int]:
        segments = [Segment((row,), length) for row, length in enumerate(lengths)]
        sizes = {"gqa": 4, "num_kv_heads": 8, "block_m": 16, "block_n": 64, "target": 33}
        return [item[6] - item[5] for item in cut(segments, **sizes, alone=range(32)).items]

    assert parts([1024] * 32) == [1024] * 32
    assert parts([1024] * 20) == [1024] * 20, "a second turn of half the length would be as long"
    assert max(parts([1024] * 5 + [131072] + [1024] * 26)) < 131072 / 16


def shape_of(gqa: int, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> AttentionShape:
    return AttentionShape(2 * gqa, 2, dim, dim, dtype, kv_dtype or dtype)


@pytest.mark.parametrize(
    ("shape", "rows", "specialized", "config"),
    [
        (shape_of(4, 128, torch.bfloat16), 1, True, AttentionConfig(64, 64, 4, 3, 2, 128, specialized=True)),
        (shape_of(7, 64, torch.float16), 8, True, AttentionConfig(64, 64, 4, 3, 1, specialized=True)),
        (shape_of(4, 128, torch.bfloat16), 32, True, AttentionConfig(128, 64, 4, 3, 1, specialized=True)),
        (shape_of(4, 128, torch.bfloat16), 32, False, AttentionConfig(128, 64, 8, 3, 2)),
        (shape_of(4, 128, torch.bfloat16, torch.float8_e4m3fn), 1, True, AttentionConfig(16, 64, 4, 3, 2)),
        (shape_of(4, 256, torch.bfloat16), 32, True, AttentionConfig(32, 32, 8, 3, 1)),
        (shape_of(4, 128, torch.float32), 32, True, AttentionConfig(16, 16, 8, 3, 1)),
        (shape_of(40, 128, torch.float32), 1, False, AttentionConfig(64, 16, 8, 3, 1)),
        (shape_of(16, 576, torch.bfloat16), 32, True, AttentionConfig(64, 64, 8, 2, 1)),
        (shape_of(16, 576, torch.bfloat16), 32, False, AttentionConfig(32, 64, 8, 2, 1)),
    ],
)
def test_launch_parameters_fit_the_kernel_that_has_the_shape(
    shape: AttentionShape, rows: int, specialized: bool, config: AttentionConfig
) -> None:
    assert default_config(shape, rows, specialized=specialized) == config
    alone = config if config.specialized else default_config(shape, 1)
    assert passes_for(shape, rows, specialized=specialized) == [config, alone]


def test_short_lists_of_many_rows_have_lower_tiles_two_at_a_time() -> None:
    shape, lower = shape_of(4, 128, torch.bfloat16), AttentionConfig(64, 64, 4, 3, 2, 128, specialized=True)
    assert passes_for(shape, 32, specialized=True, short=True) == [lower, lower]
    for rows, specialized in (8, True), (16, True), (32, False):
        options = {"rows": rows, "specialized": specialized}
        assert default_config(shape, **options, short=True) == default_config(shape, **options)
