"""Sparse decode in which a selection serves several steps, as the graphs hold it, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefix_kernels.grouped_attention import AttentionConfig, AttentionShape, GroupedAttention, Segment
from prefix_kernels.testing import dense_attention
from prefix_kernels.top_k_selection import SelectionGroup, pack_lists
from prefix_kernels.types import PagedKV
from sglang_ext.decode.buffers import AnchorLists, StepBuffers
from sglang_ext.methods.layer_plan import LayerPlan
from tests.sparse_server import FIRST, Server, searches, until_search

FLAT = AttentionConfig(16, 16, 4, 3, 2)
#: Layer 3 follows the first anchor, not the one before it.
CROSSED: list[Any] = ["anchor", {"reuse": 0, "head_map": [1, 0]}, "anchor", {"reuse": 0, "head_map": [1, 1]}]


@pytest.mark.parametrize(("dtype", "kv_dtype", "dim"), FIRST, ids=str)
def test_a_selection_serves_its_steps_until_a_group_changes(
    dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, device: torch.device
) -> None:
    """Each anchor layer's own selection, in a step with other queries; suffix tokens grow in all of them."""
    server = Server(device, dtype=dtype, kv_dtype=kv_dtype, dim=dim, search_period=3)
    first, second = server.prefix(300), server.prefix(210)
    for serial in (1, 2):
        server.join(serial, *first, 5 + serial)
    server.join(3, *second, 9)
    server.join(4, server.slots(77), None, 3)
    # As long as slots may change, and when two requests become a group, every step searches.
    found = searches(server, [1, 2, 3, 4], 7)
    settled = found.index(False) - 1
    assert settled <= 3
    assert found[settled:] == ([True, False, False] * 3)[: 7 - settled]
    until_search(server, [1, 2, 3, 4])
    server.leave(4)
    assert searches(server, [1, 2, 3], 3) == [False, False, True], "who has no index is in no group"
    server.join(6, server.slots(50), None, 3)
    assert searches(server, [1, 2, 3, 6], 3) == [False, False, True], "nor is one that comes"
    assert searches(server, [3, 1, 2], 2) == [True, False], "rows have moved"
    server.join(5, *first, 4)
    assert searches(server, [3, 1, 2, 5], 1) == [True]


@pytest.mark.full
def test_a_reuse_layer_may_follow_an_anchor_before_the_last_one(device: torch.device) -> None:
    server = Server(device, search_period=3, layer_plan=CROSSED)
    for serial in (1, 2):
        server.join(serial, *server.prefix(300), 5)
    assert searches(server, [1, 2], 9).count(False) >= 4


@pytest.mark.full
def test_own_tokens_are_searched_when_the_step_searches(device: torch.device) -> None:
    """Also when an index of suffix tokens has grown: the groups are others then."""
    server = Server(device, 5, search_period=8, suffix_dense_tokens=64)
    first = server.prefix(210)
    server.join(1, *first, 300)
    server.join(2, *first, 20)
    searches(server, [1, 2], 4)
    covered = [one.prefix_len for one in server.suffix_reads]
    found, grown = [], 0
    for _ in range(40):
        found += searches(server, [1, 2], 1)
        if [one.prefix_len for one in server.suffix_reads] != covered:
            assert found[-1], "an index has grown"
            covered, grown = [one.prefix_len for one in server.suffix_reads], grown + 1
    assert grown >= 1
    assert 40 > found.count(False) > 20


def test_the_kernel_reads_each_set_by_head_map_and_counts(device: torch.device) -> None:
    """The kernel of the graphs, which interpreted steps of a server do not run: two sets, lists of other lengths."""
    heads, width, gqa, dim = 2, 24, 2, 64
    gen = torch.Generator().manual_seed(3)
    q = torch.randn(3, heads * gqa, dim, generator=gen).to(device)
    kv = PagedKV(*(torch.randn(300, heads, dim, generator=gen).to(device) for _ in "kv"))
    plan = LayerPlan.from_dict({"layers": CROSSED}, num_layers=4, num_kv_heads=heads)
    buffers = StepBuffers(4, heads, 64, device, "reference", reserved_counts=2, num_sets=2)
    groups = pack_lists([SelectionGroup(200, width), SelectionGroup(200, width - 5)], heads)
    lists = AnchorLists(plan, buffers, heads * (width + width - 4), device)
    for layer in (0, 2):
        to = lists.of(layer)
        assert to.slots is not None
        to.slots.copy_(torch.randint(200, to.slots.shape, generator=gen))
        to.counts.copy_(torch.randint(1, width - 4, to.counts.shape, generator=gen))
    own = torch.arange(200, 209)
    buffers.arena[-16:-7] = own.to(device)
    private = lists.segment(1, (2,), groups[1])
    for number in range(2):
        buffers.counts_of(number)[0] = 9
    attention = GroupedAttention(AttentionShape.of(q, kv), 4, [FLAT, FLAT], device, num_programs=8)
    alone = Segment((0,), 16, list_begin=len(buffers.arena) - 16, list_id=0)
    attention.plan([lists.segment(0, (0, 1), groups[0]), private], [alone])
    for layer in range(4):
        out, lse = torch.empty_like(q), torch.empty(3, heads * gqa, device=device)
        counts, head_map = lists.counts(layer), lists.head_maps[layer]
        slots = lists.of(layer).slots
        attention.run(q, kv, buffers.arena, 0.1, out, lse, counts=counts, head_map=head_map, head_slots=slots)
        role = plan.layers[layer]
        read, mapped = lists.of(layer), range(heads) if role.anchor_layer is None else role.head_map
        assert read.slots is not None
        for row, group in enumerate((0, 0, 1)):
            for head, source in enumerate(mapped):
                listed = groups[group].lists_in(read.slots, heads)[source, : int(read.counts[group, source])].cpu()
                listed = torch.cat((listed, own.int())) if row == 0 else listed
                part, at = slice(head * gqa, (head + 1) * gqa), listed.long().to(device)
                keys, values = kv.k_cache[at, head : head + 1], kv.v_cache[at, head : head + 1]
                wanted = dense_attention(q[row : row + 1, part], keys, values, 0.1).out
                torch.testing.assert_close(out[row : row + 1, part].double(), wanted, atol=2e-5, rtol=0)
