"""A prefill's attention: the kernel against the reference, own slots first, then pieces of what lies before."""

from __future__ import annotations

import pytest
import torch

from prefix_kernels import PagedKV
from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.prefill_attention import Reference, Span
from prefix_kernels.prefill_attention.runner import PrefillAttention
from tests.prefix_kernels.triton.conftest import INTERPRETED

SPARE = 5
HALF = torch.float16 if INTERPRETED else torch.bfloat16
"""The interpreter multiplies bf16 wrongly."""
#: Query heads, KV heads, widths of a key and a value, dtype, tolerance.
SHAPES = [
    pytest.param((4, 2, 16, 16, torch.float32, 2e-5), id="fp32"),
    pytest.param((8, 2, 64, 64, torch.float16, 2e-3), id="fp16"),
    pytest.param((7, 1, 24, 40, HALF, 2e-2), id="odd heads and widths"),
]
#: Tokens of each request and how many of them are new; which requests have what before them; its pieces.
BATCHES = [
    pytest.param(([(1, 1)], [[0]], [[1]]), id="one row"),
    pytest.param(([(70, 70), (1, 1), (150, 41), (90, 1)], [[0, 3], [1]], [[6, 2], [1]]), id="extend"),
    pytest.param(([(1, 1), (129, 1), (64, 1)], [[2, 0]], [[4, 4, 4]]), id="decode"),
]


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_as_the_reference(
    batch: tuple[list[tuple[int, int]], list[list[int]], list[list[int]]],
    sizes: tuple[int, int, int, int, torch.dtype, float],
    device: torch.device,
) -> None:
    """Slots that nobody names, pages behind a piece, and queries beyond the batch hold NaN."""
    requests, members, pieces = batch
    heads, kv_heads, dim, v_dim, dtype, tolerance = sizes
    scales = 0.5, 1.5
    gen = torch.Generator().manual_seed(len(requests) + heads)
    total = sum(length for length, _ in requests)
    order = torch.randperm(total + 9, generator=gen)[:total] + 16
    k_cache, v_cache = (torch.full((16 + total + 9, kv_heads, one), torch.nan) for one in (dim, v_dim))
    for cache in (k_cache, v_cache):
        cache[order] = torch.randn(total, *cache.shape[1:], generator=gen)
    spans, rows, begin = [], 0, 0
    for length, new in requests:
        spans.append(Span(slice(rows, rows + new), order[begin : begin + length].to(device)))
        rows, begin = rows + new, begin + length
    groups = [torch.cat([torch.arange(spans[n].rows.start, spans[n].rows.stop) for n in one]) for one in members]
    q = torch.full((rows + SPARE, heads, dim + 8), torch.nan)
    q[:rows] = torch.randn(rows, heads, dim + 8, generator=gen)
    q = q.to(device, dtype)[..., :dim]

    kv = PagedKV(k_cache.to(device, dtype), v_cache.to(device, dtype), *scales)
    forms = Reference(spans, groups, device), PrefillAttention(spans, groups, AttentionShape.of(q, kv), device)
    # The reference attends NaN of no request: it gives 0 there, too.
    states = [form.own(q, kv, 0.3) for form in forms]
    for state in states:
        assert not state.out[rows:].any()
        assert (state.lse[rows:] == -torch.inf).all()
    for group, sizes_of_pieces in enumerate([[], *pieces]):
        for size in sizes_of_pieces:
            pages = torch.full((size + 1, kv_heads, 16, dim + v_dim), torch.nan)
            pages[:size] = torch.randn(size, *pages.shape[1:], generator=gen)
            pages = pages.to(device, dtype)[:size]
            for form, state in zip(forms, states, strict=True):
                form.fold(state, group - 1, q, kv, pages, 0.3)
        expected, found = states
        torch.testing.assert_close(found.lse, expected.lse, rtol=0, atol=tolerance)
        torch.testing.assert_close(found.out, expected.out, rtol=0, atol=tolerance * scales[1])


def test_channels_must_be_adjacent(device: torch.device) -> None:
    kv = PagedKV(*(torch.zeros(4, 1, 16, dtype=torch.float16, device=device) for _ in "kv"))
    spans = [Span(slice(0, 1), torch.tensor([1], device=device))]
    q = torch.zeros(1, 16, 2, dtype=torch.float16, device=device).transpose(1, 2)
    form = PrefillAttention(spans, [], AttentionShape.of(q, kv), device)
    with pytest.raises(ValueError, match="expected q, k_cache and v_cache with adjacent channels"):
        form.own(q, kv, 1.0)
