"""Two-level selection against the references of its stages: groups, layers, ragged sizes, plan after plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from prefix_kernels.block_scores import low_bit_block_scores
from prefix_kernels.csa_scores import csa_scores_compact, encode_lists
from prefix_kernels.csa_scores.runner import CsaConfig, CsaScores, CsaShape, CsaTables
from prefix_kernels.launching import recording
from prefix_kernels.low_bit import LowBitTensor, quantize
from prefix_kernels.pooled_scores import PooledScores, ScoreConfig, ScoreShape, Source
from prefix_kernels.pooling import Pooling, pool_scores
from prefix_kernels.top_k_selection.runner import TopKConfig, TopKSelection
from prefix_kernels.two_level_selection import (
    LayerIndex,
    TwoLevelGroup,
    TwoLevelSelection,
    listed_token_scores_reference,
    two_level_selection_reference,
)
from prefix_kernels.types import SelectedLists
from tests.prefix_kernels.triton.conftest import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HEADS, GQA, DIM, KEPT, SUBSPACES, CENTROIDS = 2, 2, 64, 48, 8, 4
BATCH, MAX_GROUPS, MAX_PREFIX, MAX_CANDIDATES, MAX_BUDGET, LAYERS = 6, 4, 720, 410, 330, 2
SM_SCALE = 0.2
CSA = CsaShape(HEADS * GQA, HEADS, DIM, SUBSPACES, CENTROIDS, 4)
DIMS = torch.arange(DIM).view(SUBSPACES, -1)
#: Of a log-probability in fp32, and what a step of 16-bit keys adds.
CLOSE, STEP = 1e-4, 44.0 / 65533


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@dataclasses.dataclass(eq=False)
class Index:
    """A prefix in one layer, and what its references are made of."""

    layer: LayerIndex
    keys: LowBitTensor
    channels: Tensor
    first_scores: Callable[[Tensor, Pooling], Tensor]


def second_of(keys: Tensor, seed: int) -> tuple[LowBitTensor, Tensor]:
    order = randn(HEADS, DIM, seed=seed).argsort(dim=1)[:, :KEPT].sort(dim=1).values
    kept = keys.gather(2, order[:, None].expand(-1, keys.shape[1], -1))
    return quantize(kept, 4), order.short()


def csa_index(prefix_len: int, seed: int) -> Index:
    keys = randn(HEADS, prefix_len, DIM, seed=seed)
    centroids = torch.nn.functional.normalize(randn(*CSA.lead, DIM // SUBSPACES, seed=seed + 1), dim=-1).half()
    parts = keys.view(HEADS, prefix_len, SUBSPACES, -1).transpose(1, 2)
    list_len = max(1, prefix_len // 12)
    best = (centroids.float() @ parts.transpose(2, 3)).topk(list_len, dim=3)
    order = best.indices.argsort(dim=3)
    lists = encode_lists(best.indices.gather(3, order), best.values.gather(3, order), prefix_len, 4)
    tables = CsaTables(centroids, lists, list_len, prefix_len)

    def first_scores(q: Tensor, pooling: Pooling) -> Tensor:
        raw = csa_scores_compact(q, centroids, lists, list_len, 4, DIMS.to(DEVICE), prefix_len)
        return pool_scores(raw, SM_SCALE, pooling)

    codes, channels = second_of(keys, seed)
    return Index(LayerIndex(tables, (channels, codes.packed, codes.scale)), codes, channels, first_scores)


def block_index(prefix_len: int, sizes: tuple[int, ...], seed: int) -> Index:
    keys = randn(HEADS, prefix_len, DIM, seed=seed)
    counts = [-(-prefix_len // size) for size in sizes]
    parts = []
    for sign in (1.0, -1.0):
        rows = []
        for head, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            padded = torch.nn.functional.pad(keys[head] * sign, (0, 0, 0, size * count - prefix_len), value=-9.0)
            rows.append(quantize(padded.view(count, size, DIM).amax(dim=1) * sign, 4))
        packed = torch.cat([one.packed for one in rows])
        parts.append(
            LowBitTensor(packed, *(torch.stack(own) for own in ([r.scale for r in rows], [r.zero for r in rows])))
        )
    indptr = torch.tensor([0, counts[0], sum(counts)], device=DEVICE)

    def first_scores(q: Tensor, pooling: Pooling) -> Tensor:
        scores = low_bit_block_scores(q, tuple(parts), indptr, SM_SCALE, pooling)
        own = [scores[head].repeat_interleave(size)[:prefix_len] for head, size in enumerate(sizes)]
        return torch.stack(own)

    codes, channels = second_of(keys, seed)
    arrays = (None, parts[0].packed, parts[0].scale, parts[1].packed, parts[1].scale)
    return Index(LayerIndex(arrays, (channels, codes.packed, codes.scale)), codes, channels, first_scores)


def pooled(source: Source, pooling: Pooling, channels: int = 16, **options: Any) -> PooledScores:
    listed = {"listed_channels": True} if options.get("listed") else {}
    shape = ScoreShape(HEADS * GQA, HEADS, source, channels, pooling=pooling, **listed)
    return PooledScores(shape, BATCH, MAX_GROUPS, ScoreConfig(block_n=32, num_chunks=2), DEVICE, **options)


def select_of(max_prefix_len: int, max_budget: int, key_bits: int, **options: Any) -> TopKSelection:
    options = {"max_block_size": 1, "config": TopKConfig(64, 1), "num_programs": 6, **options}
    return TopKSelection(MAX_GROUPS, HEADS, max_prefix_len, max_budget, DEVICE, key_bits=key_bits, **options)


def selection_of(key_bits: int = 32, pooling: Pooling = Pooling.MAX) -> TwoLevelSelection:
    csa = CsaScores(
        CSA, DIMS.to(DEVICE), BATCH, MAX_PREFIX, CsaConfig(256, 16, 1), max_groups=MAX_GROUPS, num_layers=LAYERS
    )
    nominate = select_of(MAX_PREFIX, MAX_CANDIDATES, key_bits)
    second, select = pooled(Source.LOW_BIT, pooling, KEPT, listed=True), select_of(MAX_CANDIDATES, MAX_BUDGET, key_bits)
    return TwoLevelSelection(csa, pooled(Source.RAW, pooling), nominate, second, select)


SIZES = {
    (5, 0, 2): {
        "prefix_len": 700,
        "num_candidates": 211,
        "budget": 60,
        "num_sink": 5,
        "num_recent": 20,
        "slot_start": 3,
    },
    (3,): {"prefix_len": 130, "num_candidates": 400, "budget": 300, "num_sink": 9, "num_recent": 40, "slot_start": 705},
    (1, 4): {
        "prefix_len": 403,
        "num_candidates": 403,
        "budget": 100,
        "num_sink": 0,
        "num_recent": 0,
        "slot_start": 840,
    },
}
"""By batch rows: few of many; a prefix below the budget; all positions as candidates."""
TABLE = torch.randperm(2000, generator=torch.Generator().manual_seed(5)).int()


def groups_of(first: str) -> list[tuple[TwoLevelGroup, list[Index]]]:
    found = []
    for number, (rows, sizes) in enumerate(SIZES.items()):
        length, seeds = sizes["prefix_len"], range(100 * number, 100 * number + LAYERS)
        blocks = ((16, 32), (32, 16), (16, 16))[number]
        made = [csa_index(length, s) if first == "csa" else block_index(length, blocks, s) for s in seeds]
        block_size = 1 if first == "csa" else blocks
        group = TwoLevelGroup(rows, layers=tuple(one.layer for one in made), block_size=block_size, **sizes)
        found.append((group, made))
    return found


def run(selection: TwoLevelSelection, q: Tensor, layer: int) -> SelectedLists:
    lists = selection.new_lists(with_slots=True)
    for buffer in (lists.positions, lists.counts, lists.slots, selection.candidates.positions):
        assert buffer is not None
        buffer.fill_(1_000_007)
    selection.first_scores.fill_(torch.nan)
    selection.run(q, lists, SM_SCALE, slot_table=TABLE.to(DEVICE), layer=layer)
    return lists


def best(scores: Tensor, group: TwoLevelGroup, count: int, length: int) -> Tensor:
    """The scores of the best `count` of a list of `length`, outside of the windows, in descending order."""
    free = scores[:, group.num_sink : length - group.num_recent]
    return free.topk(max(0, min(count - group.num_sink - group.num_recent, free.shape[1])), dim=1).values


def close(got: Tensor, wanted: Tensor, key_bits: int) -> None:
    """Scores of the best; -44 and less are one to keys of 16 bits."""
    if key_bits == 16:
        got, wanted = got.clamp_min(-44.0), wanted.clamp_min(-44.0)
    torch.testing.assert_close(got, wanted, atol=CLOSE + (STEP if key_bits == 16 else 0.0), rtol=0)


def check(
    selection: TwoLevelSelection, lists: SelectedLists, planned: list[Any], q: Tensor, layer: int,
    pooling: Pooling = Pooling.MAX, key_bits: int = 32,
) -> None:  # fmt: skip
    """Both choices by score, the second one among the candidates that were named; windows, counts, slots, padding."""
    assert lists.slots is not None
    for g, (group, made) in enumerate(planned):
        index, rows, length = made[layer], q[list(group.rows)], group.prefix_len
        count = min(group.budget, length)
        named = selection.candidates.positions[g, :, : group.count].long()
        assert bool((named.diff(dim=1) > 0).all())
        scores = index.first_scores(rows, pooling)
        close(best(scores.gather(1, named), group, length, group.count).sort(descending=True).values,
              best(scores, group, group.count, length), key_bits)  # fmt: skip
        ranks = listed_token_scores_reference(rows, index.keys, index.channels, named, SM_SCALE, pooling)
        taken = lists.positions[g, :, :count].long()
        assert bool((taken.diff(dim=1) > 0).all())
        places = torch.searchsorted(named, taken)
        assert torch.equal(named.gather(1, places), taken), "not among the candidates"
        close(best(ranks.gather(1, places), group, count, count), best(ranks, group, count, group.count), key_bits)
        windows = torch.tensor([*range(group.num_sink), *range(length - group.num_recent, length)], device=DEVICE)
        for head in range(HEADS):
            assert bool(torch.isin(windows, taken[head]).all())
        assert torch.equal(lists.slots[g, :, :count], TABLE.to(DEVICE)[group.slot_start + taken])
        assert bool((lists.positions[g, :, count:] == -1).all())
    assert lists.counts[:, 0].tolist() == [min(g.budget, g.prefix_len) for g, _ in planned] + [0] * (
        MAX_GROUPS - len(planned)
    )
    assert bool((lists.counts == lists.counts[:, :1]).all())
    assert bool((lists.slots[len(planned) :] == -1).all())


@pytest.mark.parametrize(
    ("pooling", "key_bits"), [(Pooling.MAX, 16), pytest.param(Pooling.MEAN, 32, marks=pytest.mark.full)]
)
def test_both_choices_are_the_references_by_score(pooling: Pooling, key_bits: int) -> None:
    selection, planned = selection_of(key_bits, pooling), groups_of("csa")
    q = randn(BATCH, HEADS * GQA, DIM, seed=1)
    selection.plan([group for group, _ in planned])
    for layer in range(LAYERS):
        check(selection, run(selection, q, layer), planned, q, layer, pooling, key_bits)


@pytest.mark.full
def test_one_plan_after_another() -> None:
    selection, planned = selection_of(), groups_of("csa")
    q = randn(BATCH, HEADS * GQA, DIM, seed=2)
    for some in (planned, planned[::-1], planned[1:2], [], planned[:1]):
        selection.plan([group for group, _ in some])
        check(selection, run(selection, q, 1), some, q, 1)


@pytest.mark.full
def test_the_positions_of_the_whole_reference() -> None:
    """Without near ties in the scores; candidates that no list holds are taken from the end, in both."""
    selection, planned = selection_of(), groups_of("csa")
    q = randn(BATCH, HEADS * GQA, DIM, seed=3)
    selection.plan([group for group, _ in planned])
    lists = run(selection, q, 0)
    for g, (group, made) in enumerate(planned):
        rows, index = q[list(group.rows)], made[0]

        def second(named: Tensor, rows: Tensor = rows, index: Index = index) -> Tensor:
            return listed_token_scores_reference(rows, index.keys, index.channels, named, SM_SCALE, Pooling.MAX)

        sizes = (group.num_candidates, group.budget, group.num_sink, group.num_recent, 1, group.prefix_len)
        wanted = two_level_selection_reference(index.first_scores(rows, Pooling.MAX), second, *sizes)
        wanted.check_integrity(group.prefix_len)
        assert torch.equal(lists.positions[g, :, : wanted.max_count], wanted.positions)


def check_replays(selection: Any, groups: list[TwoLevelGroup], num_launches: int) -> None:
    """Launches are the same whatever is planned, with the same buffers: a run allocates nothing."""
    q, lists = randn(BATCH, HEADS * GQA, DIM, seed=1), selection.new_lists()
    with recording() as empty:
        selection.run(q, lists, SM_SCALE)
    selection.plan(groups)
    with recording() as full:
        selection.run(q, lists, SM_SCALE)
    assert len(full.launches) == num_launches
    assert [one.grid for one in empty.launches] == [one.grid for one in full.launches]
    for before, after in zip(empty.launches, full.launches, strict=True):
        for name, value in before.arguments.items():
            now = after.arguments[name]
            same = value.data_ptr() == now.data_ptr() if isinstance(value, Tensor) else value == now
            assert same, f"a replay of {before.kernel.__name__} would not see {name}"


def test_a_replay_sees_the_plan() -> None:
    check_replays(selection_of(16), [group for group, _ in groups_of("csa")], 2 + 2 + 3 + 2 + 3)


def test_stages_that_do_not_fit_each_other() -> None:
    good = selection_of()
    csa, pooling, nominate, second, select = good._csa, good._pooling, good.nominate, good.second, good.select
    other = TopKSelection(MAX_GROUPS, HEADS + 1, MAX_CANDIDATES, MAX_BUDGET, DEVICE, num_programs=6)
    with pytest.raises(ValueError, match="stages of the same max_groups and num_kv_heads, got"):
        TwoLevelSelection(csa, pooling, nominate, second, other)
    with pytest.raises(ValueError, match=r"listed=True and Source.LOW_BIT, got listed=False and LOW_BIT"):
        TwoLevelSelection(csa, pooling, nominate, pooled(Source.LOW_BIT, Pooling.MAX, KEPT), select)
    short = select_of(MAX_CANDIDATES - 1, MAX_BUDGET, 32)
    with pytest.raises(ValueError, match="selection among 410 candidates, got one among 409; raise its max_prefix_len"):
        TwoLevelSelection(csa, pooling, nominate, second, short)
    with pytest.raises(ValueError, match="a pooling of RAW scores of 4 query and 2 KV heads"):
        TwoLevelSelection(csa, second, nominate, second, select)


def test_groups_that_cannot_be() -> None:
    (group, made), (other, _) = groups_of("csa")[:2]
    for changed, message in (
        ({"num_candidates": 59}, "num_candidates of at least the budget of 60 and one layer or more, got 59 and 2"),
        ({"layers": ()}, "got 211 and 0"),
        ({"block_size": 0}, "blocks of one token or more, got block_size=0"),
        ({"prefix_len": 701}, "codes .num_kv_heads, 701, bytes of a token. .* as layer 0's second index"),
        ({"layers": (LayerIndex(made[0].layer.first, ()),)}, "second index, got ..; is it of another prefix?"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(group, **changed)
    selection = selection_of()
    with pytest.raises(ValueError, match="expected indexes of 2 layers, got 1; name every layer's"):
        selection.plan([dataclasses.replace(group, layers=group.layers[:1])])
    one_head = tuple(
        LayerIndex(layer.first, (layer.second[0], layer.second[1][:1], layer.second[2])) for layer in group.layers
    )
    with pytest.raises(ValueError, match=r"expected codes of 2 KV heads as layer 0's second index, got .1, 700"):
        selection.plan([dataclasses.replace(group, layers=one_head)])
    mixed = tuple(LayerIndex(other.layers[0].first, layer.second) for layer in group.layers)
    with pytest.raises(ValueError, match="expected tables of a prefix of 700 tokens, got 130"):
        selection.plan([dataclasses.replace(group, layers=mixed)])
    blocks, _ = groups_of("blocks")[0]
    with pytest.raises(ValueError, match="expected tables of a prefix of 700 tokens, got arrays"):
        selection.plan([blocks])
