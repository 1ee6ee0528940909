"""Two levels as two selections that score and choose at once: against the references, by score."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorConfig, AnchorSelection, Form
from prefix_kernels.block_scores import low_bit_block_scores, token_scores
from prefix_kernels.launching import recording
from prefix_kernels.low_bit import LowBitTensor, quantize
from prefix_kernels.pooled_scores import ScoreShape, Source
from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection.plan import list_stride
from prefix_kernels.two_level_selection import LayerIndex, TwoLevelGroup, TwoLevelSelection
from prefix_kernels.types import SelectedLists
from tests.prefix_kernels.triton.conftest import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FORMS = pytest.mark.parametrize("form", [Form.UNFUSED] if INTERPRETED else list(Form), ids=lambda form: form.name)
HEADS, GQA, DIM, KEPT = 2, 2, 64, 48
BATCH, MAX_GROUPS, MAX_PREFIX, MAX_CANDIDATES, MAX_ENTRIES, LAYERS = 6, 4, 720, 410, 2 * 750, 2
POISON = 1_000_007
MAX_BLOCKS = MAX_PREFIX // 16
CONFIG = AnchorConfig(block_n=64)
SM_SCALE = 0.2
#: Of a log-probability: in fp32, and what a step of 16-bit keys adds.
CLOSE = 1e-4 + 44.0 / 65533


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@dataclasses.dataclass(eq=False)
class Index:
    """A prefix in one layer, and what its references are made of."""

    layer: LayerIndex
    keys: LowBitTensor
    channels: Tensor
    parts: tuple[LowBitTensor, ...]
    sizes: tuple[int, ...]

    def first_scores(self, q: Tensor, pooling: Pooling) -> Tensor:
        """Of every position that of its block."""
        prefix_len = self.keys.packed.shape[1]
        counts = [-(-prefix_len // size) for size in self.sizes]
        indptr = torch.tensor([0, counts[0], sum(counts)], device=DEVICE)
        scores = low_bit_block_scores(q, self.parts, indptr, SM_SCALE, pooling)
        return torch.stack([scores[h].repeat_interleave(size)[:prefix_len] for h, size in enumerate(self.sizes)])

    def second_scores(self, q: Tensor, positions: Tensor, pooling: Pooling) -> Tensor:
        """Of listed positions alone: the softmax is over these."""
        index = positions.long()[:, :, None].expand(-1, -1, self.keys.packed.shape[2])
        listed = LowBitTensor(self.keys.packed.gather(1, index), self.keys.scale, self.keys.zero)
        return token_scores(q, listed, self.channels, SM_SCALE, pooling)


def index_of(prefix_len: int, sizes: tuple[int, ...], seed: int) -> Index:
    keys = randn(HEADS, prefix_len, DIM, seed=seed)
    parts = []
    for sign in (1.0, -1.0):
        rows = []
        for head, size in enumerate(sizes):
            count = -(-prefix_len // size)
            padded = torch.nn.functional.pad(keys[head] * sign, (0, 0, 0, size * count - prefix_len), value=-9.0)
            rows.append(quantize(padded.view(count, size, DIM).amax(dim=1) * sign, 4))
        packed = torch.cat([one.packed for one in rows])
        parts.append(
            LowBitTensor(packed, *(torch.stack(own) for own in ([r.scale for r in rows], [r.zero for r in rows])))
        )
    order = randn(HEADS, DIM, seed=seed).argsort(dim=1)[:, :KEPT].sort(dim=1).values
    codes = quantize(keys.gather(2, order[:, None].expand(-1, keys.shape[1], -1)), 4)
    arrays = (None, parts[0].packed, parts[0].scale, parts[1].packed, parts[1].scale)
    layer = LayerIndex(arrays, (order.short(), codes.packed, codes.scale))
    return Index(layer, codes, order.short(), tuple(parts), sizes)


GROUPS = [
    ((5, 0, 2), (16, 32), (700, 211, 60), (5, 20), 3),
    ((3,), (32, 16), (130, 400, 300), (9, 40), 705),
    ((1, 4), (16, 16), (403, 403, 100), (0, 0), 840),
]
"""Rows, blocks, (prefix, candidates, budget), windows, slots: few of many; a prefix below the budget; all positions as
candidates."""
TABLE = torch.randperm(2000, generator=torch.Generator().manual_seed(5)).int()


def groups_of() -> list[tuple[TwoLevelGroup, list[Index]]]:
    found = []
    for number, (rows, blocks, sizes, windows, slots) in enumerate(GROUPS):
        made = [index_of(sizes[0], blocks, 100 * number + layer) for layer in range(LAYERS)]
        begin = sum(HEADS * list_stride(before[2][2]) for before in GROUPS[:number])
        place = (begin, list_stride(sizes[2]))
        group = TwoLevelGroup(rows, *sizes, tuple(one.layer for one in made), blocks, *windows, slots, *place)
        found.append((group, made))
    return found


def shapes(pooling: Pooling) -> tuple[ScoreShape, ScoreShape]:
    blocks = ScoreShape(HEADS * GQA, HEADS, Source.MINMAX, DIM, pooling=pooling)
    return blocks, ScoreShape(HEADS * GQA, HEADS, Source.LOW_BIT, KEPT, 4, True, pooling)


def stage(shape: ScoreShape, form: Form = Form.UNFUSED, num_chunks: int = 1, **options: Any) -> AnchorSelection:
    second = {"max_prefix_len": MAX_CANDIDATES, "list_entries": MAX_ENTRIES, "listed": True, "max_block_size": 1}
    first = {"max_prefix_len": MAX_PREFIX, "list_entries": MAX_ENTRIES, "listed": False, "max_block_size": 32}
    sizes: dict[str, Any] = {
        "max_groups": MAX_GROUPS,
        **(first if shape.source is Source.MINMAX else second),
        **options,
    }
    return AnchorSelection(
        shape, max_batch=BATCH, config=CONFIG, device=DEVICE, form=form, num_programs=num_chunks * HEADS, **sizes
    )


def joined(form: Form = Form.UNFUSED, num_chunks: int = 1, pooling: Pooling = Pooling.MAX) -> TwoLevelSelection:
    first, second = (stage(shape, form, num_chunks) for shape in shapes(pooling))
    return TwoLevelSelection(first, second, MAX_BLOCKS, num_layers=LAYERS)


def run(selection: Any, q: Tensor, layer: int, **options: Any) -> SelectedLists:
    lists = selection.new_lists(with_slots=True)
    for buffer in (lists.positions, lists.counts, lists.slots):
        buffer.fill_(POISON)
    selection.run(q, lists, SM_SCALE, slot_table=TABLE.to(DEVICE), layer=layer, **options)
    return lists


def poison(selection: TwoLevelSelection) -> None:
    """What no run may read before it is written."""
    selection.candidates.positions.fill_(POISON)
    for scores in (selection.first_scores, selection.second_scores):
        scores.fill_(torch.nan)


def best(scores: Tensor, group: TwoLevelGroup, count: int, length: int) -> Tensor:
    """The scores of the best `count` of a list of `length`, outside of the windows, in descending order."""
    free = scores[:, group.num_sink : length - group.num_recent]
    return free.topk(max(0, min(count - group.num_sink - group.num_recent, free.shape[1])), dim=1).values


def close(got: Tensor, wanted: Tensor) -> None:
    """Scores of the best; -44 and less are one to keys of 16 bits."""
    torch.testing.assert_close(got.clamp_min(-44.0), wanted.clamp_min(-44.0), atol=CLOSE, rtol=0)


def check(
    selection: TwoLevelSelection, lists: SelectedLists, planned: list[Any], q: Tensor, layer: int,
    pooling: Pooling = Pooling.MAX,
) -> None:  # fmt: skip
    """Both choices by score, the second one among the candidates that were named; windows, counts, slots, padding."""
    assert lists.slots is not None
    at = 0
    for group, made in planned:
        index, rows, length = made[layer], q[list(group.rows)], group.prefix_len
        count = min(group.budget, length)
        stride = list_stride(group.count)
        named = selection.candidates.positions[at:][: HEADS * stride].view(HEADS, -1)[:, : group.count].long()
        at += HEADS * stride
        assert bool((named.diff(dim=1) > 0).all())
        scores = index.first_scores(rows, pooling)
        close(best(scores.gather(1, named), group, length, group.count).sort(descending=True).values,
              best(scores, group, group.count, length))  # fmt: skip
        ranks = index.second_scores(rows, named, pooling)
        positions, slots = (
            of[group.list_begin :][: HEADS * group.head_stride].view(HEADS, -1) for of in (lists.positions, lists.slots)
        )
        taken = positions[:, :count].long()
        assert bool((taken.diff(dim=1) > 0).all())
        places = torch.searchsorted(named, taken)
        assert torch.equal(named.gather(1, places), taken), "not among the candidates"
        close(best(ranks.gather(1, places), group, count, count), best(ranks, group, count, group.count))
        windows = torch.tensor([*range(group.num_sink), *range(length - group.num_recent, length)], device=DEVICE)
        for head in range(HEADS):
            assert bool(torch.isin(windows, taken[head]).all())
        assert torch.equal(slots[:, :count], TABLE.to(DEVICE)[group.slot_start + taken])
        assert bool((positions[:, count:] == POISON).all())
    wanted_counts = [min(g.budget, g.prefix_len) for g, _ in planned] + [POISON] * (MAX_GROUPS - len(planned))
    assert lists.counts.tolist() == [[count] * HEADS for count in wanted_counts]


@FORMS
@pytest.mark.parametrize("pooling", [pytest.param(Pooling.MAX, marks=pytest.mark.full), Pooling.MEAN])
def test_the_positions_of_the_stages(pooling: Pooling, form: Form) -> None:
    """As the references choose by score: as many programs as groups; layer after layer, and plan after plan."""
    selection, planned = joined(form, 1, pooling), groups_of()
    q = randn(BATCH, HEADS * GQA, DIM, seed=4)
    plans = (planned, planned[::-1], planned[1:2], [], planned[:1])
    for some in plans if pooling is Pooling.MAX else plans[:1]:
        selection.plan([group for group, _ in some])
        for layer in range(LAYERS):
            poison(selection)
            check(selection, run(selection, q, layer), some, q, layer, pooling)


@pytest.mark.full
@FORMS
@pytest.mark.parametrize("kept", [False, True], ids=["again", "raw kept"])
def test_groups_shared_out_among_programs(kept: bool, form: Form) -> None:
    selection, planned = joined(form, 7), groups_of()
    selection.plan([group for group, _ in planned])
    rooms = [
        torch.full((MAX_GROUPS, HEADS, n, 6 * GQA), torch.nan, device=DEVICE) for n in (MAX_BLOCKS, MAX_CANDIDATES)
    ]
    raw = tuple(room.transpose(2, 3) if kept else None for room in rooms)
    q = randn(BATCH, HEADS * GQA, DIM, seed=6)
    for layer in range(LAYERS):
        poison(selection)
        check(selection, run(selection, q, layer, raw=raw), planned, q, layer)
    assert all(bool(room.isfinite().any()) == kept for room in rooms)


def test_a_replay_sees_the_plan() -> None:
    """Launches are the same whatever is planned, with the same buffers: a run allocates nothing."""
    selection = joined()
    q, lists = randn(BATCH, HEADS * GQA, DIM, seed=1), selection.new_lists()
    with recording() as empty:
        selection.run(q, lists, SM_SCALE)
    selection.plan([group for group, _ in groups_of()])
    with recording() as full:
        selection.run(q, lists, SM_SCALE)
    assert len(full.launches) == 4 + 4
    assert [one.grid for one in empty.launches] == [one.grid for one in full.launches]
    for before, after in zip(empty.launches, full.launches, strict=True):
        for name, value in before.arguments.items():
            now = after.arguments[name]
            same = value.data_ptr() == now.data_ptr() if isinstance(value, Tensor) else value == now
            assert same, f"a replay of {before.kernel.__name__} would not see {name}"


def test_stages_and_tables_that_do_not_fit() -> None:
    blocks, tokens = shapes(Pooling.MAX)
    first, second = stage(blocks), stage(tokens)
    with pytest.raises(ValueError, match=r"stages of the same max_groups and num_kv_heads, got .*4, 2.*5, 2"):
        TwoLevelSelection(first, stage(tokens, max_groups=5), MAX_BLOCKS)
    with pytest.raises(ValueError, match="a first level of all rows, got listed=True"):
        TwoLevelSelection(second, second, MAX_BLOCKS)
    with pytest.raises(ValueError, match="got listed=False and LOW_BIT; it scores the candidates alone"):
        TwoLevelSelection(first, stage(tokens, listed=False), MAX_BLOCKS)
    selection, (group, _) = joined(), groups_of()[0]
    with pytest.raises(ValueError, match=r"at most .210, 1500, 1. tokens of a prefix, .* got .211, 120, 1."):
        TwoLevelSelection(first, stage(tokens, max_prefix_len=210), MAX_BLOCKS, num_layers=LAYERS).plan([group])
    with pytest.raises(ValueError, match="expected indexes of 2 layers, got 1; name every layer's"):
        selection.plan([dataclasses.replace(group, layers=group.layers[:1])])
    for size, message in ((8, "expected at most 48 blocks a head"), (16, "and 88 in each layer's index")):
        with pytest.raises(ValueError, match=message):
            selection.plan([dataclasses.replace(group, block_size=size)])
    selection.plan([group])
    lists, q = selection.new_lists(with_slots=True), randn(BATCH, HEADS * GQA, DIM, seed=1)
    with pytest.raises(ValueError, match="expected a slot_table of 703 entries, got 702"):
        selection.run(q, lists, SM_SCALE, slot_table=TABLE[:702].to(DEVICE))


def test_groups_that_cannot_be() -> None:
    group, made = groups_of()[0]
    for changed, message in (
        ({"num_candidates": 59}, "num_candidates of at least the budget of 60 and one layer or more, got 59 and 2"),
        ({"layers": ()}, "got 211 and 0"),
        ({"block_size": 0}, "blocks of one token or more, got block_size=0"),
        ({"prefix_len": 701}, "codes .num_kv_heads, 701, bytes of a token. .* as layer 0's second index"),
        ({"layers": (LayerIndex(made[0].layer.first, ()),)}, "second index, got ..; is it of another prefix?"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(group, **changed)
    one_head = tuple(
        LayerIndex(layer.first, (layer.second[0], layer.second[1][:1], layer.second[2])) for layer in group.layers
    )
    with pytest.raises(ValueError, match=r"expected codes of 2 KV heads as layer 0's second index, got .1, 700"):
        joined().plan([dataclasses.replace(group, layers=one_head)])
