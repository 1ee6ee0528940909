"""The kernel for Hopper against the fp64 oracle: on a GPU of that kind only; elsewhere it is compiled, no more."""

from __future__ import annotations

import pytest
import torch

from prefix_kernels.grouped_attention import AttentionConfig, AttentionShape, GroupedAttention, Segment
from prefix_kernels.testing import dense_attention
from tests.prefix_kernels.triton.test_grouped_attention import close, paged, run

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU (sm_90)"
)

DTYPES = [torch.float16, torch.bfloat16]
HIGH = AttentionConfig(128, 64, 4, 5, 1, specialized=True)
LOW = AttentionConfig(64, 64, 4, 3, 2, 128, specialized=True)
CONFIGS = {
    "128x64": HIGH,
    "128x32": AttentionConfig(128, 32, 4, 4, 1, specialized=True),
    "64x64": LOW,
    "64x128": AttentionConfig(64, 128, 4, 2, 1, specialized=True),
    "64x32": AttentionConfig(64, 32, 4, 6, 1, specialized=True),
}


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 64, 65, 1000])
def test_every_tile(length: int, dtype: torch.dtype, dim: int, config: AttentionConfig, device: torch.device) -> None:
    q, keys, values, kv, slots = paged(length, 21, 2, 4, dim, dim, dtype, device)
    for num_programs in (2, 12):
        attention = GroupedAttention(AttentionShape.of(q, kv), 21, [config], device, num_programs=num_programs)
        attention.plan([Segment(tuple(range(21)), length)])
        close(*run(attention, q, kv, slots, 0.125), dense_attention(q, keys, values, 0.125), dtype)


@pytest.mark.parametrize("rows", [1, 2, 9, 33, 64])
@pytest.mark.parametrize("gqa", [1, 2, 4, 5, 6, 7, 8, 16])
def test_every_group_size_and_batch(gqa: int, rows: int, device: torch.device) -> None:
    q, keys, values, kv, slots = paged(300, rows, 2, gqa, 128, 128, torch.bfloat16, device)
    attention = GroupedAttention(AttentionShape.of(q, kv), rows, [LOW], device)
    attention.plan([Segment(tuple(range(rows)), 300)])
    close(*run(attention, q, kv, slots, 0.09), dense_attention(q, keys, values, 0.09), torch.bfloat16)


@pytest.mark.parametrize("v_dim", [64, 128])
def test_groups_and_suffixes_of_two_kernels_are_merged_by_a_third(v_dim: int, device: torch.device) -> None:
    q, keys, values, kv, slots = paged(700, 12, 2, 4, 128, v_dim, torch.bfloat16, device)
    flat = AttentionConfig(16, 64, 4, 3, 2)
    for passes in ([LOW, flat], [flat, LOW], [LOW, HIGH]):
        attention = GroupedAttention(AttentionShape.of(q, kv), 12, passes, device, num_programs=20)
        attention.plan([Segment(tuple(range(12)), 500)], [Segment((r,), 10 + r, list_begin=500 + r) for r in range(12)])
        out, lse = run(attention, q, kv, slots, 0.1)
        for row in range(12):
            chosen = [*range(500), *range(500 + row, 510 + 2 * row)]
            close(
                out[row, None],
                lse[row, None],
                dense_attention(q[row, None], keys[chosen], values[chosen], 0.1),
                torch.bfloat16,
            )


@pytest.mark.parametrize("config", [LOW, HIGH], ids=["64x64", "128x64"])
def test_lists_by_head_lie_in_an_arena_of_their_own(config: AttentionConfig, device: torch.device) -> None:
    """Two groups' packed lists of different length, behind others of the same set, and each row's own list."""
    q, keys, values, kv, slots = paged(900, 12, 2, 4, 128, 128, torch.bfloat16, device)
    attention = GroupedAttention(AttentionShape.of(q, kv), 12, [config, config], device, num_programs=20)
    lists = torch.full((40 + 2 * 300 + 2 * 72,), 0, dtype=slots.dtype, device=device)
    groups = [Segment(tuple(range(7)), 299, 40, 300, 12), Segment(tuple(range(7, 12)), 70, 640, 72, 13)]
    counts = torch.full((14, 2), 1000, dtype=torch.int32, device=device)
    chosen = {}
    for group in groups:
        for head in range(2):
            order = torch.randperm(600, generator=torch.Generator().manual_seed(group.length + head))
            chosen[group, head] = listed = order[: group.length - 3 * head].to(device)
            counts[group.list_id, head] = len(listed)
            lists[group.list_begin + head * group.head_stride :][: len(listed)] = slots[listed]
    attention.plan(groups, [Segment((r,), 10 + r, list_begin=600 + r, list_id=r) for r in range(12)])
    out, lse = run(attention, q, kv, slots, 0.1, counts=counts, head_slots=lists)
    for group in groups:
        for row in group.rows:
            own = torch.arange(600 + row, 610 + 2 * row, device=device)
            for head in range(2):
                part, at = slice(head * 4, head * 4 + 4), torch.cat((chosen[group, head], own))
                wanted = dense_attention(
                    q[row : row + 1, part], keys[at, head][:, None], values[at, head][:, None], 0.1
                )
                close(out[row : row + 1, part], lse[row : row + 1, part], wanted, torch.bfloat16)


def test_many_launches_merge_what_each_of_them_wrote(device: torch.device) -> None:
    """Programs wait for the parts of their own launch, never for an earlier one's: a stale part would be seen."""
    q, _, _, kv, slots = paged(4000, 8, 8, 4, 128, 128, torch.bfloat16, device)
    shape = AttentionShape.of(q, kv)
    attention = GroupedAttention(shape, 8, [LOW, LOW], device)
    attention.plan([Segment(tuple(range(8)), 3900)], [Segment((r,), 9, list_begin=3900 + r) for r in range(8)])
    first = run(attention, q, kv, slots, 0.1)
    outs = [torch.full_like(q, torch.nan) for _ in range(200)]
    lse = torch.empty(8, 32, device=device)
    for n, out in enumerate(outs):
        attention.run(q if n % 2 else -q, kv, slots, 0.1, out, lse)
    assert all(torch.equal(out, first[0]) for out in outs[1::2])
    assert not any(torch.equal(out, first[0]) for out in outs[::2])


def test_a_captured_graph_follows_the_plans(device: torch.device) -> None:
    q, keys, values, kv, slots = paged(2000, 16, 2, 4, 128, 128, torch.bfloat16, device)
    attention = GroupedAttention(AttentionShape.of(q, kv), 16, [LOW, LOW], device)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    attention.plan([Segment(tuple(range(16)), 10)])
    attention.run(q, kv, slots, 0.1, out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, kv, slots, 0.1, out, lse)
    for length in (1900, 3, 64, 1):
        attention.plan([Segment(tuple(range(16)), length)], [Segment((r,), 6, list_begin=1900 + r) for r in range(16)])
        out.fill_(torch.nan)
        graph.replay()
        for row in (0, 15):
            chosen = [*range(length), *range(1900 + row, 1906 + row)]
            oracle = dense_attention(q[row, None], keys[chosen], values[chosen], 0.1)
            close(out[row, None], lse[row, None], oracle, torch.bfloat16)
