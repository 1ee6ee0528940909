"""Sparse decode with the reference operation, against the definition of a step; what its buffers hold."""

from __future__ import annotations

import gc
import pathlib
import random
import weakref
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sglang_ext.decode.buffers import KEPT_BYTES, LIST_BYTES, ListsTooLargeError, list_entries
from sglang_ext.decode.grouping import first_that_fit
from sglang_ext.decode.types import GroupRead, StepPath
from sglang_ext.methods import parse_spec
from sglang_ext.prefix.residency import ResidentIndex
from tests.sparse_server import (
    KV_HEADS,
    Server,
    join_many,
    searches,
    until_search,
    walk_ahead,
    walk_groups,
    walk_own_tokens,
    walk_surplus,
)

CPU = torch.device("cpu")
#: Layer 3 follows the first anchor, not the one before it.
CROSSED: list[Any] = ["anchor", {"reuse": 0, "head_map": [1, 0]}, "anchor", {"reuse": 0, "head_map": [1, 1]}]
METHODS = ("token_index", "ab_sparse", "csattention", "two_level", "union", "exact")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_selects_for_groups_and_single_requests(method: str) -> None:
    server = Server(CPU, kernels=False, spec=parse_spec({"method": method}))
    walk_groups(server)


@pytest.mark.parametrize("top_k", [1, 10, 20, 500])
def test_budgets_below_the_windows_and_above_the_prefix(top_k: int) -> None:
    """Sink and recent window count towards it; a budget that covers the prefix selects nothing."""
    server = Server(CPU, kernels=False, top_k=top_k, keep_ratio=1.0, num_sink_tokens=16, num_recent_pages=4)
    server.join(1, *server.prefix(128), 5)
    assert server.step([1]) == [GroupRead(1, 128, min(top_k, 128))]


def test_candidates_are_those_of_the_step_before_until_a_group_changes() -> None:
    """Of every anchor layer, by that step's queries; this step's own rank them."""
    walk_ahead(Server(CPU, kernels=False, spec=parse_spec({"method": "two_level"}), select_ahead=True))


@pytest.mark.parametrize("period", [1, 3])
def test_a_reuse_layer_may_follow_an_anchor_before_the_last_one(period: int) -> None:
    server = Server(CPU, kernels=False, search_period=period, layer_plan=CROSSED)
    server.join(1, *server.prefix(300), 5)
    assert server.sparse.paths == ((StepPath.SPARSE, StepPath.KEPT) if period > 1 else (StepPath.SPARSE,))
    searches(server, [1], 6)


def test_long_own_tokens_are_selected_from() -> None:
    server = Server(CPU, 5, kernels=False, suffix_dense_tokens=64)
    walk_own_tokens(server)
    plan = server.sparse.plan(server.batch([1, 2, 3, 4], [server.lens[serial] for serial in (1, 2, 3, 4)]))
    have, budgets = (sum(getattr(one, name) for one in plan.suffix_reads) for name in ("prefix_len", "budget"))
    assert server.sparse.attended_suffix(plan) == (have + 3 * budgets, 4 * have), "the first layer is dense"


def test_what_does_not_fit_is_left_to_others() -> None:
    server = Server(CPU, max_batch=2, kernels=False)
    slots, index = server.prefix(128)
    for serial in (1, 2, 3):
        server.join(serial, slots, index, 3)

    def begins(serials: list[int], indexes: list[ResidentIndex | None], lens: list[int]) -> bool:
        server.index.update(zip(serials, indexes, strict=True))
        batch = server.batch(serials, lens)
        plan = server.sparse.plan(batch)
        return plan is not None and server.sparse.begin(plan, batch) is not None

    assert not begins([1, 2], [None, None], [131, 131])
    assert not begins([1, 2, 3], [index] * 3, [131] * 3)
    assert not begins([1, 2], [index] * 2, [131, 8000]), "the arena"
    assert begins([1, 2], [index] * 2, [131, 131])
    index.entry.identity.num_tokens = 600
    assert not begins([1, 2], [index] * 2, [631, 631]), "longer than there is room for"


def test_lists_have_room_by_bytes() -> None:
    assert list_entries(128, 1, 8, 2048) == 128 * 8 * 2048
    assert list_entries(128, 1, 8, 30_001) == LIST_BYTES // 4 < 128 * 8 * 30_004
    assert list_entries(128, 1, 8, 1 << 21) == 8 << 21, "one group always has room"
    assert list_entries(128, 31, 8, 74_000) == KEPT_BYTES // (30 * 4) // 4 * 4 >= 7 * 8 * 74_000
    with pytest.raises(ListsTooLargeError, match=r"\(81 anchor layers, 8 KV heads, 1048576 positions\); set search_"):
        list_entries(16, 81, 8, 1 << 20)


def test_copies_for_a_trace_have_no_more_memory_than_kept_lists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """One of each anchor layer: all but one take what is promised for them."""
    monkeypatch.setattr("sglang_ext.decode.buffers.KEPT_BYTES", 4096)
    assert Server(CPU, kernels=False).sparse._lists.nbytes > 2 * 4096, "one set"
    server = Server(CPU, kernels=False, trace_folder=str(tmp_path))
    assert server.sparse.copies.positions.nbytes == 2 * 4096


@pytest.mark.parametrize("members", [[1, 3, 1, 2] * 4, [1] * 64], ids=["28 in 16", "64"])
def test_any_number_of_prefixes_has_an_index(members: list[int]) -> None:
    server = Server(CPU, 64, kernels=False, size=3)
    serials = join_many(server, members)
    assert len(server.step(serials)) == sum(members), "nothing is known of their slots yet"
    server.step(serials)
    reads = server.step(serials)
    assert [one.rows for one in reads] == members
    assert len({(one.prefix_len, one.budget) for one in reads}) > 10
    server.leave(2)
    left = [serial for serial in serials if serial != 2][::-1]
    assert sum(one.rows for one in server.step(left)) == len(left)


def test_every_set_of_lists_has_all_groups() -> None:
    server = Server(CPU, 20, kernels=False, size=2, search_period=3, layer_plan=CROSSED)
    serials = join_many(server, [1, 2] * 6 + [1])
    until_search(server, serials)
    assert searches(server, serials, 12).count(False) >= 6


@pytest.mark.parametrize("period", [1, 3])
def test_where_lists_are_full_the_surplus_attends_all(period: int) -> None:
    walk_surplus(Server(CPU, kernels=False, search_period=period))


def test_where_the_operation_is_full_the_surplus_attends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(CPU, kernels=False)
    monkeypatch.setattr(server.sparse.op, "fits", lambda lengths, budgets: sum(lengths) <= 250)
    for serial, length in enumerate((200, 300, 100, 30), 1):
        server.join(serial, *server.prefix(length), 5)
    # Of the last one all would be attended.
    assert server.step([1, 2, 3, 4]) == [GroupRead(1, 200, 40), GroupRead(1, 30, 30)]
    server.leave(1)
    assert server.step([2, 3, 4]) == [GroupRead(1, 100, 32), GroupRead(1, 30, 30)]
    monkeypatch.setattr(server.sparse.op, "fits", lambda lengths, budgets: False)
    assert server.sparse.plan(server.batch([2], [server.lens[2]])) is None


def test_what_fits_is_what_trying_one_after_the_other_finds() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        sizes = {one: (rng.randint(1, 50), rng.randint(1, 9)) for one in range(rng.randint(0, 20))}
        most = rng.randint(0, 300), rng.randint(0, 60)

        def fits(some: Sequence[int], sizes: Any = sizes, most: Any = most) -> bool:
            return all(sum(sizes[one][n] for one in some) <= most[n] for n in range(2)) and len(some) < 9

        wanted = set[int]()
        for one in sizes:
            wanted |= {one} if fits([*wanted, one]) else set()
        assert first_that_fit(list(sizes), sizes, fits) == wanted
    tries, alike = Mock(side_effect=lambda some: len(some) <= 9), dict.fromkeys(range(64), (1, 1))
    assert first_that_fit(list(alike), alike, tries) == set(range(9))
    assert tries.call_count <= 10, "each try looks at all groups: one for each would be much of a step of many"


def test_suffixes_that_lists_have_no_room_for_are_attended_whole() -> None:
    server = Server(CPU, 12, kernels=False, size=2, suffix_dense_tokens=64)
    for serial in range(1, 11):
        server.join(serial, *server.prefix(100 + serial), 150 if serial % 2 else 20)
    serials = list(range(1, 11))
    assert len(server.step(serials)) == 10
    assert [one.prefix_len for one in server.suffix_reads] == [112] * 5
    # Room for the prefixes and two suffixes more: then for none, and for one prefix less.
    server.sparse._lists.entries = KV_HEADS * 32 * 12
    assert (len(server.step(serials)), len(server.suffix_reads)) == (10, 2)
    server.sparse._lists.entries = KV_HEADS * 32 * 9
    assert (len(server.step(serials)), len(server.suffix_reads)) == (9, 0)
    assert [one.prefix_len for one in server.reads] == list(range(102, 111))


def test_an_index_that_nobody_uses_any_more_is_not_held() -> None:
    """An evicted one would keep its memory until the next sparse step, for which there may be none."""
    server = Server(CPU, kernels=False)
    slots, index = server.prefix(210)
    server.join(1, slots, index, 4)
    server.step([1])
    gone = weakref.ref(index)
    server.leave(1)
    server.groups, server.before = [], []
    del index
    gc.collect()
    assert gone() is None
