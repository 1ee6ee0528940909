"""Sparse decode as the graphs hold it, against the reference of a decode step, over steps with joins and departures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prefix_kernels.anchor_selection.runner import fits_specialized
from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.types import SelectionGroup, pack_lists
from sglang_ext.config import config_from_dict
from sglang_ext.decode.select_op import ListSizes, OpContext, Selecting, graph_op
from sglang_ext.decode.types import GroupRead
from sglang_ext.methods.ab_sparse import ABSparseSpec
from sglang_ext.methods.base import IndexSpec
from sglang_ext.methods.csattention import CSAttentionSpec
from sglang_ext.methods.token_index import TokenIndexSpec
from sglang_ext.methods.two_level import TwoLevelSpec
from sglang_ext.methods.two_level.decode_op import TwoLevelOp
from sglang_ext.methods.union import UnionSpec
from tests.hosted_server import HostedServer, walk_host
from tests.sparse_server import (
    FIRST,
    GQA,
    KV_HEADS,
    LAST,
    ROLES,
    SPEC,
    Server,
    join_four,
    join_many,
    searches,
    until_search,
    walk_ahead,
    walk_groups,
    walk_own_tokens,
)

CENTROIDS = CSAttentionSpec(num_subspaces=8, num_centroids=4)
ALL_CHANNELS = TokenIndexSpec(channel_ratio=1.0)


@pytest.mark.parametrize("kind", LAST, ids=str)
def test_groups_and_single_requests_with_and_without_an_index(kind: Any, device: torch.device) -> None:
    walk_groups(Server(device, 6, *kind))


def _two_levels(first: IndexSpec) -> TwoLevelSpec:
    return TwoLevelSpec(first=first, second=SPEC, candidate_factor=2)


def _union(first: IndexSpec) -> UnionSpec:
    return UnionSpec(first=first, second=ABSparseSpec(sizes="profile"))


SPECS: dict[str, IndexSpec] = {
    "blocks of sizes of heads": ABSparseSpec(sizes="profile"),
    "minmax": ABSparseSpec(representation="minmax", quantization="int2"),
    "ball of sizes": ABSparseSpec(sizes="profile", representation="ball", quantization="int8"),
    "ball of sizes on some channels": ABSparseSpec(num_channels=32, sizes="profile", representation="ball"),
    "two levels of blocks": _two_levels(ABSparseSpec(sizes="profile")),
    "two levels of minima and maxima": _two_levels(ABSparseSpec(representation="minmax")),
    "union of lists": _union(CENTROIDS),
    "lists": CENTROIDS,
}
WALKED = [SPECS[name] for name in ("blocks of sizes of heads", "union of lists", "lists")]
RARER: dict[str, IndexSpec] = {
    "mean": ABSparseSpec(),
    "mean on some channels": ABSparseSpec(channel_ratio=0.75),
    "minmax on some channels": ABSparseSpec(num_channels=20, representation="minmax", quantization="none"),
    "two levels on some channels": _two_levels(ABSparseSpec(num_channels=32, sizes="profile")),
    "minmax of sizes": ABSparseSpec(sizes="profile", representation="minmax"),
    "ball of halves": ABSparseSpec(representation="ball", quantization="none"),
    "mean of halves": ABSparseSpec(block_size=32, quantization="none"),
    "two levels of tokens": _two_levels(SPEC),
    "two levels of balls of sizes": _two_levels(ABSparseSpec(sizes="profile", representation="ball")),
    "union of tokens": _union(SPEC),
    "long lists": CSAttentionSpec(num_subspaces=8, num_centroids=4, list_ratio=0.4, score_bits=8),
}


@pytest.mark.parametrize(
    "spec",
    [
        *(pytest.param(spec, id=name) for name, spec in SPECS.items()),
        *(pytest.param(spec, id=name, marks=pytest.mark.full) for name, spec in RARER.items()),
    ],
)
@pytest.mark.parametrize("kind", LAST, ids=str)
def test_every_method(kind: Any, spec: IndexSpec, device: torch.device) -> None:
    """For a group and for requests alone; an operation of each family also while requests come and go."""
    server = Server(device, 6, *kind, spec=spec)
    if spec in WALKED:
        walk_groups(server)
        return
    join_four(server)
    reads = [[one.rows for one in server.step([1, 2, 3, 4], padded=1)] for _ in range(3)]
    assert reads == [[1, 1, 1], [1, 1, 1], [2, 1]]


@pytest.mark.parametrize(
    "spec",
    [SPEC, pytest.param(_two_levels(ABSparseSpec(num_channels=64)), marks=pytest.mark.full)],
    ids=lambda spec: spec.method,
)
def test_latent_keys_that_all_query_heads_read(spec: IndexSpec, device: torch.device) -> None:
    walk_groups(Server(device, 6, dim=96, spec=spec, latent=64, layer_plan=["dense", "anchor", "anchor", "anchor"]))


def test_both_levels_of_latent_keys_are_for_hoppers_own_kernel(device: torch.device) -> None:
    shape, config = AttentionShape(16, 1, 576, 512, torch.bfloat16, torch.bfloat16), config_from_dict({})
    op = TwoLevelOp(TwoLevelSpec(), OpContext(shape, config, 1, ListSizes(1, 4096, 1, 4096, 8192, 1), device))
    levels = [op._first.shape, op._second.shape]
    assert [(level.channels, level.listed_channels, fits_specialized(level)) for level in levels] == [
        (128, True, True)
    ] * 2


@pytest.mark.parametrize("spec", [ALL_CHANNELS, TwoLevelSpec(second=ALL_CHANNELS)], ids=lambda spec: spec.method)
def test_all_channels_of_latent_keys_are_refused_before_graphs_are_captured(
    spec: IndexSpec, device: torch.device
) -> None:
    shape, config = AttentionShape(16, 1, 576, 512, torch.bfloat16, torch.bfloat16), config_from_dict({})
    with pytest.raises(ValueError, match="got 576 channels of 4 bits; lower num_channels"):
        graph_op(spec, OpContext(shape, config, 1, ListSizes(1, 4096, 1, 4096, 8192, 1), device))


@pytest.mark.parametrize("kind", FIRST, ids=str)
def test_prefixes_in_host_memory(kind: Any, device: torch.device) -> None:
    dtype, kv_dtype, dim = kind
    server = HostedServer(device, 160, implementation="triton", dtype=dtype, kv_dtype=kv_dtype, dim=dim)
    walk_host(server)
    wanted, fetched = server.sparse.swap.residents.counters.sum(0).tolist()
    assert 0 < fetched < wanted


@pytest.mark.parametrize(
    "spec", [TwoLevelSpec(first=ABSparseSpec(), second=SPEC), UnionSpec(first=CENTROIDS)], ids=["two levels", "union"]
)
def test_probes_read_made_up_arrays_alone(spec: IndexSpec, device: torch.device) -> None:
    """Also a second level, whose candidates are positions of the whole prefix."""
    server = Server(device, size=5, spec=spec)
    op, lists = server.sparse.op, server.sparse._lists.of(1)
    (group,) = pack_lists([SelectionGroup(2048, 64)], KV_HEADS)
    op.plan_probe(Selecting(1, [(0,)], [group]))
    op.run(1, torch.zeros(1, KV_HEADS * GQA, server.dim, device=device), 0.1, server.sparse._buffers.arena, None, lists)
    positions = group.lists_in(lists.positions, KV_HEADS)
    assert bool((positions.diff(dim=1) > 0).all())
    assert 0 <= int(positions.min()) <= int(positions.max()) < 2048
    if isinstance(op, TwoLevelOp):
        assert positions.tolist() == [list(range(1984, 2048))] * KV_HEADS, "all tie, and the most recent come first"
        (made,) = op._second._probed
        assert made["keys_packed"].shape[1] == 2048


@pytest.mark.full
@pytest.mark.parametrize("sizes", ["uniform", "profile"])
def test_blocks_of_a_long_prefix(sizes: str, device: torch.device) -> None:
    """Each head's blocks are shared by several programs."""
    server = Server(device, size=9, spec=ABSparseSpec(sizes=sizes))
    for serial, length in enumerate((4500, 4500, 2051), 1):
        server.join(serial, *server.prefix(length), 5)
    for _ in range(3):
        server.step([1, 2, 3])


@pytest.mark.parametrize("kind", FIRST, ids=str)
def test_long_own_tokens_are_selected_from(kind: Any, device: torch.device) -> None:
    """Beside requests with few of their own, with none of an index, and while indexes grow, come and go."""
    server = Server(device, 5, *kind, suffix_dense_tokens=64)
    index, slots = walk_own_tokens(server)
    for _ in range(24):
        server.lens[1] += 1
        server.table[server.rows[1], server.lens[1] - 1] = server.slots(1)[0]
    server.step([3, 1, 2, 4])
    assert [one.prefix_len for one in server.suffix_reads] == [48, 288]
    server.leave(1)
    server.join(5, slots, index, 160)
    server.step([5, 4, 2])
    assert [one.prefix_len for one in server.suffix_reads] == [128]


@pytest.mark.parametrize(
    "members",
    [pytest.param([1] * 17, id="17"), pytest.param([1, 3, 1, 2] * 4, id="28 in 16", marks=pytest.mark.full)],
)
@pytest.mark.parametrize("kind", FIRST, ids=str)
def test_any_number_of_prefixes_has_an_index(kind: Any, members: list[int], device: torch.device) -> None:
    server = Server(device, 64, *kind, 3, keep_ratio=0.5)
    serials = join_many(server, members)
    assert len(server.step(serials, padded=1)) == sum(members), "nothing is known of their slots yet"
    if max(members) > 1:
        server.step(serials)
        assert [one.rows for one in server.step(serials)] == members
    server.leave(2)
    assert sum(one.rows for one in server.step([serial for serial in serials if serial != 2][::-1])) == sum(members) - 1


def test_a_traced_step_keeps_what_every_anchor_layer_selected(device: torch.device, tmp_path: Path) -> None:
    """Later layers write over the lists; the copies are those of the step, group by group."""
    server = Server(device, trace_folder=str(tmp_path))
    join_four(server)
    for _ in range(3):
        server.step([1, 2, 3, 4], padded=1)
    copies = server.sparse.copies
    assert copies.layers == [1, 3]
    for of_group, here in zip(server.groups, copies.take(range(len(server.groups))), strict=True):
        for layer, selection in of_group.selections.items():
            positions, counts = here[layer]
            assert counts.tolist() == selection.counts.tolist()
            for head, count in enumerate(counts.tolist()):
                assert positions[head, :count].tolist() == selection.positions[head, :count].tolist()


def copied(server: Server, slots: torch.Tensor) -> torch.Tensor:
    """Other slots, with the same keys and values."""
    copy = server.slots(len(slots))
    for cache in server.caches:
        for part in (cache.k_cache, cache.v_cache):
            part[copy.long()] = part[slots.long()]
    return copy


def test_groups_are_of_slots_and_not_of_tokens(device: torch.device) -> None:
    """Two cold prefills of one prompt: equal tokens, one index, but no slot in common. A third one is moved to the
    first one's slots behind its first step, as the prefix cache does, and its own are given away: every row is compared
    with what its slots hold in that very step.
    """
    server = Server(device)
    slots, index = server.prefix(128)
    server.join(1, slots, index, 3)
    server.join(2, copied(server, slots), index, 5)
    for _ in range(3):
        assert server.step([1, 2]) == [GroupRead(1, 128, 32)] * 2
    copy = copied(server, slots)
    server.join(3, copy, index, 4)
    server.step([1, 2, 3])
    server.table[server.rows[3], :128] = slots
    for cache in server.caches:
        cache.v_cache[copy.long()] += 100
    server.step([1, 2, 3])
    server.step([1, 2, 3])
    assert server.step([1, 2, 3]) == [GroupRead(2, 128, 46), GroupRead(1, 128, 32)]


@pytest.mark.parametrize("spec", [SPEC, CENTROIDS], ids=lambda spec: spec.method)
def test_costs_are_measured_on_made_up_indexes_of_many_groups(
    spec: IndexSpec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a start times: lists of the budget of each group; of short prefixes the half, so that each is searched."""
    server = Server(device, 5, min_top_k=400, spec=spec)
    sparse, lists = server.sparse, server.sparse._lists.of(0)
    found = []

    def count(run: Any, device: torch.device) -> float:
        lists.counts.zero_()
        run()
        found.append(sorted({tuple(row) for row in lists.counts.tolist()} - {(0, 0)}))
        return 1.0

    monkeypatch.setattr("sglang_ext.decode.sparse.measure_us", count)
    assert sparse.measure(5, server.caches[0]) is not None
    most = [512, 4 * 512, 5 * 512]
    halves = [tokens // number // 2 for far, number in zip(most, (1, 4, 5), strict=True) for tokens in (far // 4, far)]
    assert found[1::2] == [[(half, half)] for half in halves]
    assert found[::2] == [[]] * 6, "attention selects nothing"
    server.join(1, *server.prefix(130), 5)
    server.step([1])


@pytest.mark.parametrize("kind", FIRST, ids=str)
def test_a_selection_serves_its_steps_until_a_group_changes(kind: Any, device: torch.device) -> None:
    """Each anchor layer's own selection, in a step with other queries; suffix tokens grow in all of them."""
    server = Server(device, 6, *kind, search_period=3)
    first = join_four(server)
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


AHEAD: dict[str, IndexSpec] = {
    "blocks of sizes of heads": _two_levels(ABSparseSpec(sizes="profile")),
    "blocks": _two_levels(ABSparseSpec()),
    "tokens": _two_levels(SPEC),
}


@pytest.mark.parametrize("kind", FIRST, ids=str)
def test_candidates_are_those_of_the_step_before_until_a_group_changes(kind: Any, device: torch.device) -> None:
    walk_ahead(Server(device, 6, *kind, spec=AHEAD["blocks of sizes of heads"], select_ahead=True))


@pytest.mark.parametrize("name", ["blocks of sizes of heads", pytest.param("blocks", marks=pytest.mark.full), "tokens"])
def test_queries_that_stay_select_the_same_a_step_later(name: str, device: torch.device) -> None:
    """What all layers' launch names is what each layer's own named, and what is selected among it is, too."""
    server = Server(device, 6, spec=AHEAD[name], select_ahead=True)
    op, lists, arena = server.sparse.op, server.sparse._lists.of(0), server.sparse._buffers.arena
    assert isinstance(op, TwoLevelOp)
    prefixes = [server.prefix(length)[1] for length in (500, 300, 40)]
    budgets, rows = (64, 50, 40), [(4, 0), (1,), (3, 2)]
    groups = [
        SelectionGroup(one.prefix_len, n, num_sink=4, num_recent=16) for one, n in zip(prefixes, budgets, strict=True)
    ]
    groups = pack_lists(groups, KV_HEADS)
    for index in prefixes:
        op.number_of(index)
    op.plan(Selecting(6, rows, groups), prefixes)
    queries = [torch.randn(6, 2 * KV_HEADS * GQA, server.dim, generator=server.gen).to(device)[:, ::2] for _ in "12"]

    def found(select: Any) -> list[list[list[list[int]]]]:
        both = []
        for layer, q in zip(server.anchors, queries, strict=True):
            lists.positions.fill_(-1)
            select(6, q, 0.1, arena, layer, lists)
            both.append([group.lists_in(lists.positions, KV_HEADS).tolist() for group in groups])
        return both

    own, named = found(op.run), op._lists.positions.clone()
    op._lists.positions.fill_(-1)
    op.look_ahead(6, queries, 0.1)
    assert torch.equal(op._lists.positions, named)
    assert found(op.run_behind) == own
    op._lists.positions.fill_(-1)
    op._pack._queries.zero_()
    op.look_ahead(6, [q[:5] for q in queries], 0.1)
    assert torch.equal(op._lists.positions, named), "a step without a graph is not padded"
    op.look_ahead(6, queries[::-1], 0.1)
    assert found(op.run_behind) != own, "candidates of other queries"


def test_an_index_whose_last_layer_no_kernel_can_read_is_refused_when_it_is_met(device: torch.device) -> None:
    server = Server(device)
    _, index = server.prefix(100)
    index.layers[-1]["keys_packed"] = index.layers[-1]["keys_packed"][:, :50].contiguous()
    with pytest.raises(ValueError, match=r"expected 200 rows of codes, got .2, 50, "):
        server.sparse.op.number_of(index)


def test_the_start_says_which_prefixes_candidates_ahead_have_no_room_for(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Server(device, 5, spec=AHEAD["tokens"], select_ahead=True)
    assert "no_room" not in caplog.text
    anchors, tokens = ROLES.count("anchor"), 256
    monkeypatch.setattr("sglang_ext.methods.score_pack.SCORE_BYTES", 4 * anchors * KV_HEADS * tokens)
    server = Server(device, 5, spec=AHEAD["tokens"], select_ahead=True)
    assert f"got room behind {tokens} tokens and of " in caplog.text
    for serial, length in enumerate((tokens, tokens + 1)):
        server.join(serial, *server.prefix(length), 5)
        plan = server.sparse.plan(server.batch([serial], [server.lens[serial]]))
        assert (plan is None) == (length > tokens)


def test_costs_of_steps_that_name_candidates_ahead(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only of as many groups as all layers have room for; others attend all, and the start says so."""
    monkeypatch.setattr("sglang_ext.methods.score_pack.GROUP_BYTES", 60_000)
    server = Server(device, 5, spec=AHEAD["blocks"], select_ahead=True)
    assert "behind 512 tokens and of 5 groups, got room behind 512 tokens and of 1 groups" in caplog.text
    ran: list[float] = []

    def note(run: Any, device: torch.device) -> float:
        run()
        ran.append(1.0 + len(ran) % 4)
        return ran[-1]

    monkeypatch.setattr("sglang_ext.decode.sparse.measure_us", note)
    costs = server.sparse.measure(5, server.caches[0])
    assert len(ran) == 4 * 2 * len(costs.attend)
    assert list(costs.attend) == [1]
    assert [of[1].base for of in (costs.attend, costs.select, costs.ahead, costs.behind)] == [1.0, 2.0, 3.0, 4.0]
    lists = server.sparse._lists.of(0)
    assert int(lists.counts[0, 0]) > 0
    for serial in (1, 2):
        server.join(serial, *server.prefix(130 + serial), 5)
    assert [one.prefix_len for one in server.step([1, 2])] == [132]


def test_candidates_ahead_have_room_for_windows_that_begin_within_blocks(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """17 and 47 tokens are in two blocks and in three: one more than their budget fills. One group has room."""
    room = 4 * ROLES.count("anchor") * KV_HEADS * 8
    monkeypatch.setattr("sglang_ext.methods.two_level.decode_op.CANDIDATE_BYTES", room)
    spec = TwoLevelSpec(candidate_ratio=0.01, candidate_factor=1.0)
    budget = {"keep_ratio": 1.0, "top_k": 64, "num_sink_tokens": 17, "num_recent_pages": 4, "group_growth": "none"}
    server = Server(device, 5, spec=spec, select_ahead=True, **budget)
    for serial in (1, 2):
        server.join(serial, *server.prefix(304), 5)
    assert [one.budget for one in server.step([1, 2])] == [64]


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
