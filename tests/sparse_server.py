"""A server's decode steps with indexes, each compared with the definition of a step (`decode_oracle`).

With `kernels` they run as decode graphs hold them; without, the reference operation selects and the reference attends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefix_kernels.anchor_selection.runner import fits_specialized
from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.pooled_scores import LEAST_BLOCK, ScoreShape
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import PagedKV, Selection, SelectionGroup, pack_lists
from sglang_ext.config import config_from_dict
from sglang_ext.decode.grouping import SlotTracker
from sglang_ext.decode.select_op import ListSizes, OpContext, ReferenceOp, SelectOp, make_op
from sglang_ext.decode.sparse import SparseDecode
from sglang_ext.decode.swap import HostKV
from sglang_ext.decode.types import DecodeBatch, GroupRead, StepPath
from sglang_ext.methods import make_selector
from sglang_ext.methods.base import IndexSpec, LayerProfile, summed_every
from sglang_ext.methods.layer_plan import LayerMode, LayerPlan
from sglang_ext.methods.registry import make_builder
from sglang_ext.methods.token_index import TokenIndexSelector, TokenIndexSpec
from sglang_ext.prefix.residency import ResidentIndex, State
from sglang_ext.prefix.suffix_index import SuffixIndex, SuffixRules
from tests.decode_oracle import Oracle, OracleGroup
from tests.prefix_kernels.interpreting import INTERPRETED

LAYERS, KV_HEADS, GQA, DIM = 4, 2, 2, 64
FP8 = torch.float8_e4m3fn
#: (queries, KV pool, head_dim); the interpreter multiplies bf16 wrongly. Hopper's own kernels are for heads of 128.
KINDS = (
    [(torch.float32, torch.float32, 64), (torch.float16, FP8, 64)]
    if INTERPRETED
    else [
        (torch.float32, torch.float32, 64),
        (torch.bfloat16, torch.bfloat16, 64),
        (torch.bfloat16, torch.bfloat16, 128),
        (torch.bfloat16, FP8, 128),
    ]
)
#: The interpreter takes its time: by day the first one, or the last one.
FIRST = [KINDS[0], *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[1:])]
LAST = [*(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[:-1]), KINDS[-1]]
WIDTH, SLOTS = 700, 4096
SPEC = TokenIndexSpec(channel_ratio=0.75)
BLOCK_SIZES = ((16, 16), (64, 16), (16, 16), (16, 32))
"""By layer, where blocks have the profile's sizes."""
ROLES = ["dense", "anchor", {"reuse": 1, "head_map": [1, 0]}, "anchor"]
CONFIG: dict[str, Any] = {
    "keep_ratio": 0.2,
    "min_top_k": 32,
    "num_recent_pages": 1,
    "group_growth": "sqrt",
    "max_keep_ratio": 0.5,
}


class RoundedQueries(TokenIndexSelector):
    """With queries as sm_90's own kernel has them: times the channels' steps in INT8, one unit for a group's rows."""

    def token_scores(self, arrays: Mapping[str, torch.Tensor], q: torch.Tensor, *options: Any) -> torch.Tensor:
        channels, steps = arrays["channels"].long(), arrays["keys_scale"][None, :, None]
        rows = q.float().unflatten(1, (KV_HEADS, GQA))
        index = channels[None, :, None].expand(len(q), -1, GQA, -1)
        products = rows.gather(3, index) * steps
        unit = products.abs().amax(dim=(0, 2, 3), keepdim=True) / 127
        rows = rows.scatter(3, index, (products / unit).round() * unit / steps)
        return super().token_scores(arrays, rows.flatten(1, 2), *options)


class Server:
    """A table of slots, KV of all layers, requests on indexed prefixes. Each layer of an fp8 pool has its scales. With
    `latent` the pool is an MLA model's: one KV head, of whose keys so many first channels are the values.
    """

    def __init__(
        self,
        device: torch.device,
        max_batch: int = 6,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        dim: int = DIM,
        size: int = 1,
        *,
        kernels: bool = True,
        spec: IndexSpec = SPEC,
        host: HostKV | None = None,
        latent: int = 0,
        **changes: Any,
    ) -> None:
        gen = torch.Generator().manual_seed(0)
        self.device, self.gen, self.dtype, self.dim, self.spec = device, gen, dtype, dim, spec
        kv_dtype = kv_dtype or dtype
        self.caches, self.kv_heads = [], 1 if latent else KV_HEADS
        for layer in range(LAYERS):
            scales = (0.5 + layer, 2.0 - 0.25 * layer) if kv_dtype is FP8 else (1.0, 1.0)
            pool = torch.randn(2, size * SLOTS, self.kv_heads, dim, generator=gen)
            k_cache, v_cache = (one.div(by).to(device, kv_dtype) for one, by in zip(pool, scales, strict=True))
            self.caches.append(PagedKV(k_cache, k_cache[..., :latent] if latent else v_cache, *scales))
        self.pools = self.caches
        self.table = torch.zeros(max_batch + 4, size * WIDTH, dtype=torch.int32, device=device)
        self.free = torch.randperm(size * SLOTS, generator=gen).int()
        self.config = config_from_dict({**CONFIG, "method": spec.method, "layer_plan": ROLES, **changes})
        roles = {"layers": changes.get("layer_plan", ROLES)}
        self.plan = LayerPlan.from_dict(roles, num_layers=LAYERS, num_kv_heads=self.kv_heads)
        self.anchors = [i for i, role in enumerate(self.plan.layers) if role.mode is LayerMode.ANCHOR]
        self.tracker = SlotTracker(max_batch, 16, device)
        self.shape = AttentionShape(KV_HEADS * GQA, self.kv_heads, dim, latent or dim, dtype, kv_dtype)
        kept = ScoreShape(KV_HEADS * GQA, self.kv_heads, SPEC.kept_channels(dim))
        halves = kernels and device.type == "cuda" and dtype is not torch.float32
        specialized = halves and torch.cuda.get_device_capability()[0] == 9 and fits_specialized(kept)
        of_tokens = spec.method == SPEC.method
        every = summed_every(self.config)
        selector = RoundedQueries(SPEC, every) if specialized and of_tokens else make_selector(spec, every)

        def made(sizes: ListSizes) -> SelectOp:
            if not kernels:
                return ReferenceOp(selector, Pooling(self.config.pooling), sizes.ahead)
            return make_op(spec, OpContext(self.shape, self.config, LAYERS, sizes, device), captured=True)

        self.sparse = SparseDecode(
            self.shape,
            self.config,
            made,
            self.plan,
            self.tracker,
            arena_size=size * 8192,
            max_prefix_len=size * 512,
            device=device,
            host=host,
        )
        self.oracle = Oracle(self.config, selector, self.plan)
        self.path: StepPath | None = None
        self.reads: list[GroupRead] = []
        self.suffix_reads: list[GroupRead] = []
        self.groups: list[OracleGroup] = []
        self.rows: dict[int, int] = {}
        self.lens: dict[int, int] = {}
        self.index: dict[int, ResidentIndex | None] = {}
        self.suffix: dict[int, SuffixIndex | None] = {}

    def slots(self, count: int) -> torch.Tensor:
        taken, self.free = self.free[:count], self.free[count:]
        return taken.to(self.device)

    def prefix(self, length: int) -> tuple[torch.Tensor, ResidentIndex]:
        """Slots, and the index of what lies there."""
        slots = self.slots(length)
        index = ResidentIndex(SimpleNamespace(digest="d", created=1.0, identity=SimpleNamespace(num_tokens=length)))
        for cache, sizes in zip(self.caches, BLOCK_SIZES, strict=True):
            keys = cache.keys(slots.long(), torch.float32)
            queries = torch.randn(self.kv_heads, 64, self.dim, generator=self.gen).to(self.device)
            builder = make_builder(self.spec, LayerProfile(block_sizes=sizes))
            index.layers.append(builder.build_layer(keys, queries))
        index.state = State.READY
        return slots, index

    def join(self, serial: int, slots: torch.Tensor, index: ResidentIndex | None, own: int) -> None:
        row = min(set(range(1, len(self.table))) - set(self.rows.values()))
        self.rows[serial], self.lens[serial], self.index[serial] = row, len(slots) + own, index
        self.table[row, : len(slots)] = slots
        self.table[row, len(slots) : len(slots) + own] = self.slots(own)

    def leave(self, serial: int) -> None:
        self.tracker.ended(serial)
        self.suffix.pop(serial, None)
        for of in (self.rows, self.lens, self.index):
            del of[serial]

    def slots_of(self, serial: int, begin: int, end: int) -> torch.Tensor:
        """Where the oracle finds a stretch of a request's tokens."""
        return self.table[self.rows[serial], begin:end].long()

    def own_indexes(self, serials: list[int], rows: torch.Tensor) -> list[SuffixIndex | None]:
        """As a step of the server makes them; all that are wanted."""
        for serial, row in zip(serials, rows.tolist(), strict=True):
            index, rules = self.index[serial], SuffixRules.of(self.config)
            own = None
            if index is not None and rules is not None:
                begin = index.prefix_len
                own = rules.covering(self.suffix.get(serial), index, self.lens[serial] - begin)
                if own is not None:
                    slots = self.table[row, begin : begin + own.prefix_len].long()
                    own.complete(self.anchors, self.caches.__getitem__, slots, self.dtype)
            self.suffix[serial] = own
        return [self.suffix[serial] for serial in serials]

    def kept(self, number: int) -> dict[int, Selection]:
        """What the last search of a group found, by the oracle."""
        if self.path is StepPath.SPARSE or self.dtype is not torch.float32 or self.config.select_ahead:
            return {}
        return dict(self.before[number].selections)

    def listed(self, number: int, own: torch.Tensor, layer: int) -> Selection:
        """What the lists hold of a group in this step, as positions of the slots that are its own."""
        places = torch.full((len(self.caches[0].k_cache),), -1, dtype=torch.int32, device=self.device)
        places[own] = torch.arange(len(own), dtype=torch.int32, device=self.device)
        lists = self.sparse._lists.of(layer)
        assert lists.slots is not None
        budgets = self.sparse._planned.selects.budgets
        placed = pack_lists([SelectionGroup(budget, budget) for budget in budgets], self.kv_heads)[number]
        counts, slots = lists.counts[number].clone(), placed.lists_in(lists.slots, self.kv_heads)
        listed = torch.arange(slots.shape[1], device=self.device) < counts[:, None]
        return Selection(torch.where(listed, places[slots.clamp(min=0).long()], -1), counts)

    def take_lists(self, q: torch.Tensor, layer: int, sm_scale: float) -> None:
        """In 16 bits scores are rounded otherwise than the oracle's. So the oracle attends what the lists hold, and
        these may differ from what it selects by few tokens; what another query looks for may be among them.
        """
        for number, group in enumerate(self.groups):
            found = self.listed(number, group.slots, layer)
            if self.path is StepPath.SPARSE or self.config.select_ahead:
                wanted = self.oracle.select(q[group.rows], group, self.kv_heads, layer, sm_scale)
                assert found.counts.tolist() == wanted.counts.tolist()
                for mine, theirs, count in zip(found.positions, wanted.positions, found.counts.tolist(), strict=True):
                    chosen = set(mine[:count].tolist())
                    assert -1 not in chosen
                    assert len(chosen) == count
                    # At the edge whole blocks may change places.
                    edge = 2 if self.spec.method == SPEC.method else LEAST_BLOCK
                    assert len(chosen - set(theirs[:count].tolist())) <= max(edge, count // 20)
            group.kept = {**group.kept, layer: found}

    def batch(self, serials: list[int], lens: list[int]) -> DecodeBatch:
        rows = torch.tensor([self.rows[serial] for serial in serials], device=self.device)
        indexes, suffix = [self.index[serial] for serial in serials], self.own_indexes(serials, rows)
        device_lens = torch.tensor(lens, device=self.device)
        return DecodeBatch(serials, lens, self.table, rows, device_lens, indexes, suffix)

    def step(self, serials: list[int], padded: int = 0) -> list[GroupRead]:
        """A decode step of all layers; outputs are compared with the oracle's, group by group as it was made."""
        for serial in serials:
            self.table[self.rows[serial], self.lens[serial]] = self.slots(1)[0]
            self.lens[serial] += 1
        lens = [self.lens[serial] for serial in serials]
        batch = self.batch(serials, lens)
        self.tracker.learn(batch)
        plan = self.sparse.plan(batch)
        self.path = self.sparse.begin(plan, batch)
        assert self.path is not None
        self.reads, self.suffix_reads = list(plan.reads), list(plan.suffix_reads)
        self.before, self.groups = self.groups, []
        starts = [0] * len(serials)
        for number, (prefix, index) in enumerate(zip(plan.selects.prefixes, plan.indexes, strict=True)):
            begin, end = prefix.begin, prefix.begin + prefix.length
            own = self.slots_of(serials[prefix.rows[0]], begin, end)
            ahead = self.config.select_ahead and self.path is StepPath.KEPT
            before = dict(self.before[number].asked) if ahead else {}
            self.groups.append(OracleGroup(index, own, list(prefix.rows), kept=self.kept(number), before=before))
            for row in prefix.rows:
                starts[row] = max(starts[row], end)
        pairs = zip(batch.req_pool_indices, starts, lens, strict=True)
        owned = [self.table[row, start:length] for row, start, length in pairs]
        for layer, kv in enumerate(self.caches):
            q = torch.randn(len(serials) + padded, KV_HEADS * GQA, self.dim, generator=self.gen)
            q, sm_scale = (2 * q).to(self.device, self.dtype), self.dim**-0.5
            out = self.sparse.run(q, self.pools[layer], layer, sm_scale)
            if self.dtype is not torch.float32 and layer in self.anchors:
                self.take_lists(q[: len(serials)], layer, sm_scale)
            wanted = self.oracle.run(q[: len(serials)], kv, self.groups, owned, layer, sm_scale)
            assert not out[len(serials) :].any()
            off = (out[: len(serials)].float() - wanted).norm(dim=2) / wanted.norm(dim=2)
            if q.dtype is torch.float32:
                assert float(off.median()) < 1e-4
                # Among thousands of tokens keys of 11 bits tie where the reference's scores do not.
                for row, start in enumerate(starts):
                    assert float(off[row].max()) < (1e-4 if start < 1000 else 0.5)
            else:
                assert float(off.median()) < 0.01
                assert float(off.max()) < 0.05
        return self.reads


def searches(server: Server, serials: list[int], steps: int) -> list[bool]:
    """Whether each of so many steps searched; all are compared with the reference."""
    return [(server.step(serials, padded=1), server.path is StepPath.SPARSE)[1] for _ in range(steps)]


def until_search(server: Server, serials: list[int]) -> None:
    """Steps up to one that searches, that one included."""
    assert any(searches(server, serials, 1)[0] for _ in range(8))


def walk_groups(server: Server) -> None:
    """Groups and single requests, with and without an index; one leaves, and another one takes its row at once."""
    first, second = server.prefix(300), server.prefix(210)
    for serial in (1, 2, 3):
        server.join(serial, *first, 5 + serial)
    server.join(4, *second, 9)
    server.join(5, server.slots(77), None, 3)
    alone = [GroupRead(1, 300, 60)] * 3 + [GroupRead(1, 210, 42)]
    assert server.step([1, 2, 3, 4, 5], padded=1) == alone, "nothing is known of their slots yet"
    server.step([1, 2, 3, 4, 5])
    grouped = [GroupRead(3, 300, 104), GroupRead(1, 210, 42)]
    assert server.step([1, 2, 3, 4, 5]) == grouped
    plans = server.sparse.plans
    assert server.step([1, 2, 3, 4, 5]) == grouped
    assert server.sparse.plans == plans
    server.leave(1)
    server.join(6, *second, 4)
    # No padding here: with four query heads a KV head the kernels of four requests have no row to spare.
    assert server.step([4, 2, 6, 3]) == [GroupRead(1, 210, 42), GroupRead(2, 300, 85), GroupRead(1, 210, 42)]
    server.step([4, 2, 6, 3])
    assert server.step([4, 2, 6, 3]) == [GroupRead(2, 210, 60), GroupRead(2, 300, 85)]


def join_four(server: Server) -> tuple[torch.Tensor, ResidentIndex]:
    """A group of two, and two requests alone, with and without an index; the group's prefix."""
    first, second = server.prefix(300), server.prefix(210)
    for serial in (1, 2):
        server.join(serial, *first, 5 + serial)
    server.join(3, *second, 9)
    server.join(4, server.slots(77), None, 3)
    return first


def walk_ahead(server: Server) -> None:
    """Steps that name candidates for the next one."""
    join_four(server)
    found = searches(server, [1, 2, 3, 4], 7)
    assert found == sorted(found, reverse=True), "once its slots stay, no step names its own"
    assert found.count(False) >= 3
    server.leave(1)
    assert searches(server, [3, 2, 4], 3) == [True, False, False], "others are in the group now"
    server.sparse.skip()
    assert searches(server, [3, 2, 4], 2) == [True, False], "a step was attended otherwise"


def join_many(server: Server, members: Sequence[int]) -> list[int]:
    """Prefixes of different lengths, with so many requests each; their serials."""
    serials: list[int] = []
    for number, count in enumerate(members):
        prefix = server.prefix(40 + 37 * number % 101)
        for _ in range(count):
            serials.append(len(serials) + 1)
            server.join(serials[-1], *prefix, 3 + number % 4)
    return serials


def walk_surplus(server: Server) -> None:
    """Room for two lists of 60 tokens: the prefixes that save most are selected from, the others attended whole, in one
    step; who leaves makes room.
    """
    server.sparse._lists.entries = KV_HEADS * 120
    prefixes = [server.prefix(length) for length in (200, 300, 100, 300)]
    for serial, prefix in enumerate(prefixes, 1):
        server.join(serial, *prefix, 5)
    for _ in range(3):
        assert server.step([1, 2, 3, 4], padded=1) == [GroupRead(1, 300, 60), GroupRead(1, 300, 60)]
    plan = server.sparse.plan(server.batch([1, 2, 3, 4], [server.lens[serial] for serial in (1, 2, 3, 4)]))
    assert (plan.surplus, plan.others) == ((0, 2), 2)
    assert plan.own == sum(server.lens.values()) - 600
    server.join(5, *prefixes[0], 7)
    assert server.step([5, 1, 2, 3, 4])[0] == GroupRead(1, 300, 60), "nothing is known of its slots yet"
    server.step([5, 1, 2, 3, 4])
    # Two rows on 200 tokens save 343 of 400 tokens, one on 300 tokens saves 240.
    assert server.step([5, 1, 2, 3, 4]) == [GroupRead(2, 200, 57), GroupRead(1, 300, 60)]
    server.leave(2)
    assert server.step([5, 1, 3, 4]) == [GroupRead(2, 200, 57), GroupRead(1, 300, 60)]
    server.leave(4)
    assert server.step([5, 1, 3]) == [GroupRead(2, 200, 57), GroupRead(1, 100, 32)]


def walk_own_tokens(server: Server) -> tuple[ResidentIndex, torch.Tensor]:
    """Beside requests with few tokens of their own, and with none of an index: indexes of suffix tokens come and grow.
    Returns the index of the first two requests, and its slots.
    """
    first, second = server.prefix(210), server.prefix(130)
    server.join(1, *first, 300)
    server.join(2, *first, 20)
    server.join(3, *second, 78)
    server.join(4, server.slots(90), None, 200)
    server.step([1, 2, 3, 4], padded=1)
    assert server.suffix_reads == [GroupRead(1, 256, 51)]
    server.step([1, 2, 3, 4])  # of request 3 48 are covered now, more than its budget
    assert [one.prefix_len for one in server.suffix_reads] == [256, 48]
    plans = server.sparse.plans
    for _ in range(3):
        kept = server.step([1, 2, 3, 4])
    assert (kept[0], server.sparse.plans) == (GroupRead(2, 210, 60), plans + 1), "two of them are a group now"
    return first[1], first[0]
