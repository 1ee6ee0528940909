"""KV heads that stay dense in a layer that selects: exact where all are, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefix_kernels.testing import dense_attention
from prefix_kernels.types import PagedKV, Selection
from sglang_ext.attention.decode import GroupedDecode, with_dense_heads
from sglang_ext.attention.plan import DecodePlan, Group
from sglang_ext.config import config_from_dict
from sglang_ext.indexing import METHODS, LayerPlan
from sglang_ext.indexing.exact import ExactSpec
from sglang_ext.metrics import Counters
from sglang_ext.prefix.residency import Residency, ResidentIndex

PREFIX, LAYERS, KV_HEADS, GQA, DIM, BUDGET = 64, 3, 2, 2, 16, 12


@pytest.fixture
def index(bench: Any) -> Iterator[ResidentIndex]:
    residency = Residency(bench.store, ExactSpec(), LAYERS, KV_HEADS, torch.device("cpu"), 1 << 30)
    resident = residency.acquire(bench.put(list(range(PREFIX))))
    assert resident.loaded is not None
    resident.loaded.result(30)
    yield resident
    residency.close()


def _decode(dense: list[list[int]], layers: list[Any] | None = None) -> tuple[GroupedDecode, Counters]:
    fields = {"method": "exact", "methods": {"exact": {}}, "top_k": BUDGET, "num_sink_tokens": 2, "num_recent_pages": 0}
    roles = layers or ["anchor"] * LAYERS
    plan = LayerPlan.from_dict({"layers": roles}, num_layers=LAYERS, num_kv_heads=KV_HEADS)
    counters = Counters(LAYERS, torch.device("cpu"))
    selector = METHODS["exact"].selector(METHODS["exact"].spec())
    return GroupedDecode(config_from_dict(fields), selector, plan, counters, dense), counters


def _group(index: ResidentIndex, num_rows: int = 2) -> Group:
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:PREFIX]
    return Group(index, order, torch.arange(num_rows), num_rows)


def _q(num_rows: int = 2) -> torch.Tensor:
    return torch.randn(num_rows, KV_HEADS * GQA, DIM, generator=torch.Generator().manual_seed(9))


def _run(decode: GroupedDecode, index: ResidentIndex, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of one layer for two grouped requests of two private tokens each, and dense attention's."""
    gen = torch.Generator().manual_seed(2)
    kv = PagedKV(*(torch.randn(256, KV_HEADS, DIM, generator=gen) for _ in range(2)))
    group, q = _group(index), _q()
    suffix = torch.tensor([210, 211, 220, 221])
    plan = DecodePlan([group], torch.tensor([0, 2, 4]), suffix)
    out = decode.run(q, kv, plan, layer, DIM**-0.5)
    expected = []
    for row in range(2):
        own = torch.cat([group.slots, suffix[2 * row : 2 * row + 2]])
        expected.append(dense_attention(q[row : row + 1], kv.k_cache[own], kv.v_cache[own], DIM**-0.5).out)
    return out.double(), torch.cat(expected)


def test_with_all_heads_dense_the_output_is_dense(index: ResidentIndex) -> None:
    decode, counters = _decode([[0, 1], [], []])
    out, expected = _run(decode, index, 0)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)
    sparse, expected = _run(decode, index, 1)
    assert float((sparse - expected).abs().max()) > 1e-2, "the test would see a layer that selects"
    assert counters.snapshot()["keep_ratio_per_layer"] == [1.0, BUDGET / PREFIX, None]


def test_a_dense_head_is_exact_and_the_other_heads_select_as_before(index: ResidentIndex) -> None:
    mixed, counters = _decode([[], [1], []])
    plain, _ = _decode([])
    out, expected = _run(mixed, index, 1)
    sparse, _ = _run(plain, index, 1)
    torch.testing.assert_close(out[:, GQA:], expected[:, GQA:], atol=2e-5, rtol=0)
    torch.testing.assert_close(out[:, :GQA], sparse[:, :GQA], atol=2e-6, rtol=0)
    assert not torch.allclose(sparse[:, GQA:], expected[:, GQA:], atol=1e-2)
    state = counters.snapshot()
    assert state["keep_ratio_per_layer"][1] == pytest.approx((BUDGET + PREFIX) / (2 * PREFIX))
    assert state["attended_tokens_per_layer"][1] == pytest.approx(2 * (BUDGET + PREFIX) / 2)


@given(st.integers(1, 3), st.integers(0, 20), st.sets(st.integers(0, 2)), st.integers(0, 5), st.integers(0, 99))
def test_extending_a_selection(num_heads: int, longest: int, dense: set[int], more: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    prefix_len = longest + more
    counts = torch.randint(0, longest + 1, (num_heads,), generator=gen, dtype=torch.int32)
    positions = torch.full((num_heads, longest), -1, dtype=torch.int32)
    for head, count in enumerate(counts.tolist()):
        positions[head, :count] = torch.randperm(prefix_len, generator=gen)[:count].sort().values
    before = Selection(positions.clone(), counts.clone())
    heads = sorted(head for head in dense if head < num_heads)
    after = with_dense_heads(before, heads, prefix_len)
    after.check_integrity(prefix_len)
    for head in range(num_heads):
        expected = range(prefix_len) if head in heads else positions[head, : counts[head]].tolist()
        assert after.positions[head, : after.counts[head]].tolist() == list(expected)
    assert torch.equal(before.positions, positions), "the selection that others reuse is not written"
    assert torch.equal(before.counts, counts)


def test_a_reuse_layer_takes_what_a_dense_head_of_its_anchor_would_have_selected(index: ResidentIndex) -> None:
    roles = ["dense", "anchor", {"reuse": 1, "head_map": [1, 1]}]
    decode, _ = _decode([[], [1], [0]], roles)
    plain, _ = _decode([], roles)
    group, other = _group(index), _group(index)
    assert decode.select(_q(), group, KV_HEADS, 1, 0.25).counts.tolist() == [BUDGET, PREFIX]
    anchor = plain.select(_q(), other, KV_HEADS, 1, 0.25)
    reused = decode.select(_q(), group, KV_HEADS, 2, 0.25)
    assert reused.counts.tolist() == [PREFIX, BUDGET]
    assert torch.equal(reused.positions[1, :BUDGET], anchor.positions[1])


def test_an_anchor_of_dense_heads_alone_still_selects_for_those_that_reuse_it(index: ResidentIndex) -> None:
    decode, _ = _decode([[], [0, 1], []], ["dense", "anchor", {"reuse": 1}])
    group = _group(index)
    assert decode.select(_q(), group, KV_HEADS, 1, 0.25).counts.tolist() == [PREFIX, PREFIX]
    assert decode.select(_q(), group, KV_HEADS, 2, 0.25).counts.tolist() == [BUDGET, BUDGET]


def test_an_anchor_that_nobody_reuses_does_not_search_when_all_its_heads_are_dense(index: ResidentIndex) -> None:
    decode, _ = _decode([[], [0, 1], []])
    index.layers[1].clear()  # a search would raise
    assert decode.select(_q(), _group(index), KV_HEADS, 1, 0.25).counts.tolist() == [PREFIX, PREFIX]


def test_a_reuse_layer_behind_an_anchor_that_sglang_ran_itself_is_dense(index: ResidentIndex) -> None:
    decode, _ = _decode([], ["dense", "anchor", {"reuse": 1}])
    assert decode.select(_q(), _group(index), KV_HEADS, 2, 0.25).counts.tolist() == [PREFIX, PREFIX]


@pytest.mark.parametrize("dense", [[[], []], [[], [2], []], [[-1], [], []]])
def test_dense_heads_of_another_model_are_refused(dense: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"dense heads of 3 layers, each in 0..1, got .*another model"):
        _decode(dense)
