"""Grouping a decode batch by prefix, and attention over the groups, against dense attention."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from prefix_kernels.testing import dense_attention
from prefix_kernels.types import PagedKV, Selection
from sglang_ext.attention.decode import GroupedDecode
from sglang_ext.attention.plan import DecodePlan, make_plan
from sglang_ext.config import config_from_dict
from sglang_ext.indexing import METHODS, LayerPlan
from sglang_ext.indexing.exact import ExactSpec
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import Attachment, SharedSlots
from sglang_ext.prefix.residency import Residency, ResidentIndex

PREFIX, LAYERS, KV_HEADS, GQA, DIM = 64, 3, 2, 2, 16


class Pool:
    """A table of slots and one layer's KV, filled request by request."""

    def __init__(self, num_rows: int = 8, width: int = 128, num_slots: int = 2048) -> None:
        self.table = torch.zeros(num_rows, width, dtype=torch.int32)
        order = torch.randperm(num_slots - 1, generator=torch.Generator().manual_seed(3)) + 1
        self._free = order.tolist()
        gen = torch.Generator().manual_seed(4)
        self.kv = PagedKV(*(torch.randn(num_slots, KV_HEADS, DIM, generator=gen) for _ in range(2)))

    def slots(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def fill(self, row: int, slots: list[int]) -> None:
        self.table[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def resident(bench: Any) -> Any:
    """prompt number -> a loaded index of PREFIX tokens."""
    residency = Residency(bench.store, ExactSpec(), LAYERS, KV_HEADS, torch.device("cpu"), 1 << 30)

    def load(number: int) -> ResidentIndex:
        index = residency.acquire(bench.put(list(range(number * 1000, number * 1000 + PREFIX))))
        assert index.loaded is not None
        index.loaded.result(30)
        return index

    yield load
    residency.close()


def _attachment(name: str, index: ResidentIndex | None) -> Attachment:
    return Attachment(name, 70, index, None if index else "no_index")


def _plan(pool: Pool, attachments: list[Any], lens: list[int], shared: Any, rows: list[int] | None = None) -> Any:
    indices = torch.tensor(rows or list(range(len(lens))))
    ready = [attachment.index if attachment else None for attachment in attachments]
    return make_plan(attachments, ready, pool.table, indices, lens, shared)


def _members(plan: DecodePlan) -> list[list[int]]:
    return sorted(group.rows.tolist() for group in plan.groups)


def test_equal_slots_make_a_group_at_the_second_step_and_not_before(pool: Pool, resident: Any) -> None:
    index, prefix, shared = resident(1), pool.slots(PREFIX), {}
    for row in range(3):
        pool.fill(row, prefix + pool.slots(10))
    attachments = [_attachment(str(row), index) for row in range(3)]
    assert _members(_plan(pool, attachments, [66] * 3, shared)) == [[0], [1], [2]]
    second = _plan(pool, attachments, [67] * 3, shared)
    assert _members(second) == [[0, 1, 2]]
    assert second.groups[0].slots.tolist() == prefix
    # A fourth one joins the group a step after its own first one.
    pool.fill(3, prefix + pool.slots(10))
    attachments.append(_attachment("3", index))
    assert _members(_plan(pool, attachments, [68, 68, 68, 66], shared)) == [[0, 1, 2], [3]]
    assert _members(_plan(pool, attachments, [69, 69, 69, 67], shared)) == [[0, 1, 2, 3]]


def test_slots_that_differ_in_one_position_never_make_a_group(pool: Pool, resident: Any) -> None:
    index, prefix, shared = resident(1), pool.slots(PREFIX), {}
    other = [*prefix[:-1], *pool.slots(1)]
    pool.fill(0, prefix + pool.slots(10))
    pool.fill(1, other + pool.slots(10))
    attachments = [_attachment("0", index), _attachment("1", index)]
    for step in range(4):
        assert _members(_plan(pool, attachments, [66 + step] * 2, shared)) == [[0], [1]]


def test_two_cold_prefills_of_one_prompt_read_their_own_slots_until_the_cache_made_them_one(
    pool: Pool, resident: Any
) -> None:
    index, shared = resident(1), {}
    first, second = pool.slots(PREFIX), pool.slots(PREFIX)
    pool.fill(0, first + pool.slots(10))
    pool.fill(1, second + pool.slots(10))
    attachments = [_attachment("0", index), _attachment("1", index)]
    plan = _plan(pool, attachments, [66] * 2, shared)
    assert [group.slots.tolist() for group in plan.groups] == [first, second]
    pool.fill(1, first)  # the cache replaced the duplicate's slots after its prefill
    assert _members(_plan(pool, attachments, [67] * 2, shared)) == [[0, 1]]


def test_a_retraction_starts_from_the_requests_own_slots_again(pool: Pool, resident: Any) -> None:
    index, prefix, shared = resident(1), pool.slots(PREFIX), {}
    for row in range(2):
        pool.fill(row, prefix + pool.slots(10))
    attachments = [_attachment(str(row), index) for row in range(2)]
    for step in range(2):
        _plan(pool, attachments, [66 + step] * 2, shared)
    # What SparseRuntime.slot_freed does with a retracted request.
    attachments[1].shared.members -= 1
    attachments[1].shared, attachments[1].steps = None, 0
    fresh = pool.slots(PREFIX)
    pool.fill(5, fresh + pool.slots(10))
    plan = _plan(pool, attachments, [68, 69], shared, rows=[0, 5])
    assert [group.slots.tolist() for group in plan.groups] == [prefix, fresh]
    plan = _plan(pool, attachments, [69, 70], shared, rows=[0, 5])
    assert [group.slots.tolist() for group in plan.groups] == [prefix, fresh], "still other slots: still two groups"


def test_tables_without_members_are_forgotten_and_never_matched(pool: Pool, resident: Any) -> None:
    index, prefix, shared = resident(1), pool.slots(PREFIX), {}
    pool.fill(0, prefix + pool.slots(10))
    old = _attachment("0", index)
    for step in range(2):
        _plan(pool, [old], [66 + step], shared)
    table = old.shared
    assert isinstance(table, SharedSlots)
    table.members -= 1
    new = _attachment("1", index)
    for step in range(2):
        _plan(pool, [new], [66 + step], shared)
    assert new.shared is not table
    assert shared[index.entry.digest] == [new.shared]


def test_a_groups_table_is_a_copy_that_outlives_the_row_it_came_from(pool: Pool, resident: Any) -> None:
    index, prefix, shared = resident(1), pool.slots(PREFIX), {}
    for row in range(2):
        pool.fill(row, prefix + pool.slots(10))
    attachments = [_attachment(str(row), index) for row in range(2)]
    for step in range(2):
        _plan(pool, attachments, [66 + step] * 2, shared)
    attachments[0].shared.members -= 1
    pool.table[0] = 7  # request 0 ended, SGLang gave its row to somebody
    plan = _plan(pool, attachments[1:], [68], shared, rows=[1])
    assert plan.groups[0].slots.tolist() == prefix


def test_two_prefixes_and_requests_without_index_in_one_batch(pool: Pool, resident: Any) -> None:
    one, two, shared = resident(1), resident(2), {}
    prefixes = {one: pool.slots(PREFIX), two: pool.slots(PREFIX)}
    order = [one, None, two, one, two, None]
    lens = [66, 5, 70, 67, 66, 90]
    suffixes = []
    for row, (index, length) in enumerate(zip(order, lens, strict=True)):
        head = prefixes[index] if index else []
        suffixes.append(pool.slots(length - len(head)))
        pool.fill(row, head + suffixes[-1])
    attachments: list[Any] = [_attachment(str(row), index) for row, index in enumerate(order)]
    attachments[5] = None  # never admitted here
    _plan(pool, attachments, lens, shared)
    plan = _plan(pool, attachments, lens, shared)
    assert _members(plan) == [[0, 3], [2, 4]]
    bounds = plan.kv_indptr.tolist()
    assert bounds[0] == 0
    got = [plan.kv_indices[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    assert got == suffixes


def test_a_batch_without_usable_index_has_no_plan(pool: Pool) -> None:
    assert _plan(pool, [None, _attachment("1", None)], [5, 6], {}) is None


@pytest.mark.parametrize("prompt_len", [PREFIX, PREFIX + 1])
def test_a_suffix_of_the_decoded_token_alone(pool: Pool, resident: Any, prompt_len: int) -> None:
    prefix = pool.slots(PREFIX)
    rest = pool.slots(prompt_len - PREFIX + 1)
    pool.fill(0, prefix + rest)
    plan = _plan(pool, [_attachment("0", resident(1))], [prompt_len + 1], {})
    assert plan.kv_indices.tolist() == rest


# -- attention over the groups ---------------------------------------------------------------------------------


def _decode(fields: dict[str, Any], layers: Any = None) -> tuple[GroupedDecode, Counters]:
    config = config_from_dict({"method": "exact", "methods": {"exact": {}}, **fields})
    plan = LayerPlan.from_dict({"layers": layers or ["anchor"] * LAYERS}, num_layers=LAYERS, num_kv_heads=KV_HEADS)
    counters = Counters(LAYERS, torch.device("cpu"))
    selector = METHODS["exact"].selector(METHODS["exact"].spec())
    return GroupedDecode(config, selector, plan, counters), counters


def _mixed(pool: Pool, resident: Any) -> tuple[DecodePlan, list[list[int]]]:
    """Two grouped requests, a dense one, one alone behind another prefix; and every row's slots."""
    one, two, shared = resident(1), resident(2), {}
    prefixes = {one: pool.slots(PREFIX), two: pool.slots(PREFIX)}
    order, lens = [one, None, one, two], [70, 40, 66, 80]
    slots = []
    for row, (index, length) in enumerate(zip(order, lens, strict=True)):
        head = prefixes[index] if index else []
        slots.append(head + pool.slots(length - len(head)))
        pool.fill(row, slots[-1])
    attachments = [_attachment(str(row), index) for row, index in enumerate(order)]
    _plan(pool, attachments, lens, shared)
    plan = _plan(pool, attachments, lens, shared)
    assert _members(plan) == [[0, 2], [3]]
    return plan, slots


def test_grouped_decode_over_all_positions_equals_dense(pool: Pool, resident: Any) -> None:
    plan, slots = _mixed(pool, resident)
    decode, counters = _decode({"keep_ratio": 1.0})
    q = torch.randn(4, KV_HEADS * GQA, DIM, generator=torch.Generator().manual_seed(9))
    out = decode.run(q, pool.kv, plan, 1, DIM**-0.5)
    for row, own in enumerate(slots):
        expected = dense_attention(q[row : row + 1], pool.kv.k_cache[own], pool.kv.v_cache[own], DIM**-0.5).out
        torch.testing.assert_close(out[row : row + 1].double(), expected, atol=2e-5, rtol=0)
    state = counters.snapshot()
    assert state["attended_tokens_per_layer"] == [0, 3 * PREFIX, 0]
    assert state["selections_per_layer"] == [0, 2, 0]


def test_grouped_decode_over_a_selection_attends_exactly_that(pool: Pool, resident: Any) -> None:
    plan, slots = _mixed(pool, resident)
    decode, counters = _decode({"top_k": 24, "num_sink_tokens": 4, "num_recent_pages": 1})
    q = torch.randn(4, KV_HEADS * GQA, DIM, generator=torch.Generator().manual_seed(9))
    out = decode.run(q, pool.kv, plan, 1, DIM**-0.5)
    for group in plan.groups:
        picked = group.selections[1]
        picked.check_integrity(PREFIX)
        assert picked.counts.tolist() == [24, 24]
        for row in group.rows.tolist():
            for head in range(KV_HEADS):
                positions = picked.positions[head, :24].tolist()
                assert {0, 1, 2, 3} | set(range(PREFIX - 16, PREFIX)) <= set(positions)
                own = [slots[row][p] for p in positions] + slots[row][PREFIX:]
                heads = slice(head * GQA, head * GQA + GQA)
                keys, values = (c[own][:, head : head + 1] for c in (pool.kv.k_cache, pool.kv.v_cache))
                expected = dense_attention(q[row : row + 1, heads], keys, values, DIM**-0.5).out
                torch.testing.assert_close(out[row : row + 1, heads].double(), expected, atol=2e-5, rtol=0)
    assert counters.snapshot()["attended_tokens_per_layer"] == [0, 3 * 24, 0]


def test_a_reuse_layer_takes_its_anchors_selection_through_the_head_map(pool: Pool, resident: Any) -> None:
    plan, _ = _mixed(pool, resident)
    layers = ["dense", "anchor", {"reuse": 1, "head_map": [1, 1]}]
    decode, counters = _decode({"top_k": 24, "num_sink_tokens": 4, "num_recent_pages": 0}, layers)
    q = torch.randn(2, KV_HEADS * GQA, DIM, generator=torch.Generator().manual_seed(9))
    group = next(group for group in plan.groups if group.num_rows == 2)
    dense = decode.select(q, group, KV_HEADS, 0, 0.25)
    anchor = decode.select(q, group, KV_HEADS, 1, 0.25)
    reused = decode.select(torch.zeros_like(q), group, KV_HEADS, 2, 0.25)
    assert dense.counts.tolist() == [PREFIX, PREFIX]
    assert not torch.equal(anchor.positions[0], anchor.positions[1])
    assert torch.equal(reused.positions, anchor.positions[[1, 1]])
    assert counters.snapshot()["selections_per_layer"] == [0, 0, 0], "counted where attention runs"


def test_the_groups_rows_share_one_selection_by_their_strongest_row(pool: Pool, resident: Any) -> None:
    plan, _ = _mixed(pool, resident)
    decode, _ = _decode({"top_k": 24, "num_sink_tokens": 0, "num_recent_pages": 0})
    group = next(group for group in plan.groups if group.num_rows == 2)
    q = torch.randn(2, KV_HEADS * GQA, DIM, generator=torch.Generator().manual_seed(9))
    first = decode.select(q, group, KV_HEADS, 1, 0.25).positions
    swapped = decode.select(q.flip(0), group, KV_HEADS, 1, 0.25).positions
    assert torch.equal(first, swapped)


@pytest.mark.parametrize(
    ("fields", "num_rows", "expected"),
    [
        ({"top_k": 8}, 2, 8),
        ({"top_k": 8, "group_growth": "sqrt"}, 2, 12),
        ({"top_k": 60, "group_growth": "sqrt"}, 2, 64),
        ({"keep_ratio": 0.25, "group_growth": "sqrt", "max_keep_ratio": 0.3, "min_top_k": 0}, 2, 19),
        ({"keep_ratio": 0.25, "min_top_k": 24}, 2, 24),
        ({"keep_ratio": 0.25}, 2, 64),
        ({"keep_ratio": 1.0}, 2, 64),
        ({"top_k": 500}, 2, 64),
    ],
)
def test_the_budget_of_a_group(pool: Pool, resident: Any, fields: dict[str, Any], num_rows: int, expected: int) -> None:
    plan, _ = _mixed(pool, resident)
    group = next(group for group in plan.groups if group.num_rows == num_rows)
    assert _decode(fields)[0].budget(group) == expected


@pytest.mark.parametrize(("top_k", "sink", "recent_pages"), [(1, 16, 4), (10, 16, 4), (20, 16, 1), (40, 0, 4)])
def test_a_budget_smaller_than_sink_and_recent_window_is_kept(
    pool: Pool, resident: Any, top_k: int, sink: int, recent_pages: int
) -> None:
    plan, _ = _mixed(pool, resident)
    decode, _ = _decode({"top_k": top_k, "num_sink_tokens": sink, "num_recent_pages": recent_pages})
    group = plan.groups[0]
    q = torch.randn(group.num_rows, KV_HEADS * GQA, DIM, generator=torch.Generator().manual_seed(9))
    picked = decode.select(q, group, KV_HEADS, 1, 0.25)
    picked.check_integrity(PREFIX)
    assert picked.counts.tolist() == [top_k, top_k]


# -- counters --------------------------------------------------------------------------------------------------


def test_counters_add_up_positions_rows_and_steps() -> None:
    counters = Counters(2, torch.device("cpu"))
    picked = Selection(torch.full((2, 8), -1, dtype=torch.int32), torch.tensor([8, 4], dtype=torch.int32))
    counters.count_selection(0, Selection.all(100, 2), 100, 3)
    counters.count_selection(1, picked, 100, 3)
    counters.count_selection(1, picked, 100, 1)
    counters.count_step(4, 1, 3)
    counters.count_step(0, 5, 0)
    counters.count_hit()
    counters.count_fallback("no_index")
    counters.count_fallback("no_index")
    state = counters.snapshot()
    assert state["attended_tokens_per_layer"] == [300, 6 * 4]
    assert state["prefix_tokens_per_layer"] == [300, 400]
    assert state["selections_per_layer"] == [1, 2]
    assert state["keep_ratio_per_layer"] == [1.0, 0.06]
    assert state["keep_ratio"] == pytest.approx(0.53)
    assert (state["sparse_steps"], state["sparse_rows"], state["dense_rows"]) == (1, 4, 6)
    assert (state["hits"], state["largest_group"], state["fallbacks"]) == (1, 3, {"no_index": 2})
    assert state["attended_per_step"] == [75, 6]


def test_counters_of_a_server_that_did_nothing() -> None:
    state = Counters(2, torch.device("cpu")).snapshot()
    assert state["keep_ratio"] is None
    assert state["keep_ratio_per_layer"] == [None, None]
