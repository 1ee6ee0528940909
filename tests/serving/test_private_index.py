"""A request's own tokens behind its prefix, selected from where there are many of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefix_kernels.low_bit import LowBitTensor, dequantize
from prefix_kernels.pooling import Pooling
from prefix_kernels.testing import dense_attention
from prefix_kernels.types import PagedKV, Selection
from sglang_ext.attention.decode import GroupedDecode
from sglang_ext.attention.plan import DecodePlan, make_plan
from sglang_ext.attention.private_index import PrivateRules
from sglang_ext.attention.step_buffers import PrefixRows
from sglang_ext.attention.step_groups import StepGroups
from sglang_ext.config import PAGE_TOKENS, ConfigError, Settings, config_from_dict
from sglang_ext.indexing import METHODS, LayerPlan, make_selector
from sglang_ext.indexing.token_index import TokenIndexSpec, index_behind
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import Attachment, SharedSlots
from sglang_ext.prefix.residency import ResidentIndex
from tests.serving.admitting import Runtime
from tests.serving.test_runtime import NAMESPACE, PROMPT, Model, Request, _decode_batch

PREFIX, LAYERS, KV_HEADS, GQA, DIM, LIMIT = 64, 3, 2, 2, 16, 64
SCALE = DIM**-0.5
SPEC = TokenIndexSpec(channel_ratio=0.75, bits=8)
#: Rows of SGLang's table, by batch row.
ROWS = [2, 0, 3]


class Serving:
    """Decode steps of requests behind one prefix, each with slots of its own, in random order."""

    def __init__(self, layers: list[Any], fields: dict[str, Any]) -> None:
        gen = torch.Generator().manual_seed(4)
        self.kv = PagedKV(*(torch.randn(4096, KV_HEADS, DIM, generator=gen) for _ in range(2)))
        order = torch.randperm(4096, generator=gen).to(torch.int32)
        self.table = order[: 4 * 1024].view(4, 1024).clone()
        self.table[:, :PREFIX] = self.table[0, :PREFIX]
        keys = self.kv.keys(self.table[0, :PREFIX].long(), torch.float32)
        self.index = ResidentIndex(_Entry())  # type: ignore[arg-type]
        builder = METHODS["token_index"].builder(SPEC)
        for _ in range(LAYERS):  # of channels of its own each
            sample = torch.randn(KV_HEADS, 3, DIM, generator=gen)
            self.index.layers.append(builder.build_layer(keys, sample))
        spec = {"channel_ratio": 0.75, "bits": 8}
        usual = {"methods": {"token_index": spec}, "num_sink_tokens": 0, "num_recent_pages": 0, "sum_every": 1}
        self.config = config_from_dict({**usual, "private_dense_tokens": LIMIT, **fields})
        plan = LayerPlan.from_dict({"layers": layers}, num_layers=LAYERS, num_kv_heads=KV_HEADS)
        self.counters = Counters(LAYERS, torch.device("cpu"))
        self.decode = GroupedDecode(self.config, make_selector(SPEC), plan, self.counters)
        self.requests: dict[str, Attachment] = {}
        self.shared: dict[str, list[SharedSlots]] = {}

    def plan(self, **own: int) -> DecodePlan:
        """A step of requests with so many tokens of their own."""
        batch = [self.requests.setdefault(name, Attachment(name, PREFIX, self.index, None)) for name in own]
        lens = [PREFIX + count for count in own.values()]
        rows, indexes = torch.tensor(ROWS[: len(lens)]), [self.index] * len(lens)
        rules = PrivateRules.of(self.config)
        plan = make_plan(batch, indexes, self.table, rows, lens, self.shared, 1, rules)
        assert plan is not None
        return plan

    def dense(self, q: torch.Tensor, row: int, positions: torch.Tensor) -> torch.Tensor:
        """Attention of a batch row over positions of its sequence."""
        slots = self.table[ROWS[row], positions].long()
        return dense_attention(q[row : row + 1], self.kv.k_cache[slots], self.kv.v_cache[slots], SCALE).out


class _Entry:
    """Of a stored index of PREFIX tokens, what decode asks for."""

    digest = "one"

    class identity:  # noqa: N801
        num_tokens = PREFIX


@pytest.fixture
def serving() -> Callable[..., Serving]:
    def start(layers: list[Any] | None = None, **fields: Any) -> Serving:
        return Serving(layers or ["anchor"] * LAYERS, fields)

    return start


def queries(rows: int, seed: int = 9) -> torch.Tensor:
    return torch.randn(rows, KV_HEADS * GQA, DIM, generator=torch.Generator().manual_seed(seed))


# -- what is covered ---------------------------------------------------------------------------------------------


def test_it_begins_beyond_the_limit_and_leaves_half_of_it_and_less_than_all_in_full() -> None:
    rules = PrivateRules(LIMIT, 1 << 30, lambda covered: covered // 10)
    prefix = ResidentIndex(_Entry())  # type: ignore[arg-type]
    own, grown = None, []
    for count in range(1, 1000):
        before, own = own, rules.covering(own, prefix, count)
        covered = own.prefix_len if own is not None else 0
        assert 1 <= count - covered <= LIMIT
        assert covered % PAGE_TOKENS == 0
        if own is not before:
            grown.append(count)
            assert LIMIT // 2 <= count - covered < LIMIT // 2 + PAGE_TOKENS
    assert grown[0] == LIMIT + 1
    # About every half limit, not in each step.
    assert {b - a for a, b in pairwise(grown)} <= set(range(LIMIT // 2 - PAGE_TOKENS, LIMIT // 2 + 2))
    assert rules.covering(own, ResidentIndex(_Entry()), LIMIT) is None, "it is of another prefix"  # type: ignore[arg-type]


def test_none_is_made_of_which_all_would_be_attended(serving: Any) -> None:
    run = serving(min_top_k=128, keep_ratio=0.1)
    lengths = {own: [group.prefix_len for group in run.plan(one=own).private] for own in (100, 160, 161, 176, 190)}
    assert lengths == {100: [], 160: [], 161: [], 176: [144], 190: [144]}


def test_the_longest_have_one_as_far_as_bytes_and_groups_go(serving: Any) -> None:
    run = serving(top_k=16)
    index = run.index
    index.nbytes = PREFIX * 100  # a hundred bytes a token
    requests = [Attachment(str(row), PREFIX, index, None) for row in range(5)]
    lens = [PREFIX + own for own in (400, 900, 20, 640, 901)]

    def covered(nbytes: int, most: int) -> list[int]:
        rules = PrivateRules(LIMIT, nbytes, run.config.budget)
        found = rules.renew(requests, [index] * 5, lens, most)
        assert [request.private for request in requests] == found
        return [0 if one is None else one.prefix_len for one in found]

    assert covered(1 << 30, 5) == [368, 864, 0, 608, 864]
    kept = requests[1].private
    assert covered(1 << 30, 2) == [0, 864, 0, 0, 864]
    assert requests[1].private is kept
    assert covered(100 * (864 + 863), 5) == [0, 864, 0, 0, 0]
    assert covered(100 * (864 + 864 + 607), 5) == [0, 864, 0, 0, 864]
    rules = PrivateRules(LIMIT, 1 << 30, run.config.budget)
    assert rules.renew(requests, [None] * 5, lens, 5) == [None] * 5
    assert all(request.private is None for request in requests), "what is not used is let go"


def test_only_requests_with_many_tokens_of_their_own_are_selected_from(serving: Any) -> None:
    run = serving(top_k=16)
    plan = run.plan(short=LIMIT, long=LIMIT + 1, longer=200)
    assert [group.rows.tolist() for group in plan.private] == [[1], [2]]
    assert [group.prefix_len for group in plan.private] == [32, 160]
    assert plan.kv_indptr.diff().tolist() == [LIMIT, LIMIT + 1 - 32, 40]
    for group in plan.private:
        row = int(group.rows)
        end = PREFIX + group.prefix_len
        assert torch.equal(group.slots, run.table[ROWS[row], PREFIX:end].long())
        own = plan.kv_indices[plan.kv_indptr[row] : plan.kv_indptr[row + 1]]
        assert int(own[0]) == int(run.table[ROWS[row], end]), "what is attended in full goes on where it ends"


def test_without_the_setting_all_own_tokens_are_attended_in_full(serving: Any) -> None:
    run = serving(private_dense_tokens=None)
    plan = run.plan(one=900)
    assert (plan.private, plan.kv_indptr.tolist()) == ([], [0, 900])
    run.decode.run(queries(1), run.kv, plan, 0, SCALE)
    assert run.counters.snapshot()["private_keep_ratio"] is None


def test_a_request_that_starts_over_or_has_another_prefix_has_another_index(serving: Any) -> None:
    run = serving(top_k=16)
    run.plan(one=300)
    request = run.requests["one"]
    first = request.private
    run.plan(one=301)
    assert request.private is first
    request.start_over()
    assert (request.private, request.shared, request.steps) == (None, None, 0)
    run.plan(one=100)
    assert request.private is not first
    assert request.private.prefix_len == (100 - LIMIT // 2) // PAGE_TOKENS * PAGE_TOKENS
    second, run.index = request.private, Serving(["anchor"] * LAYERS, {}).index
    run.plan(one=100)
    assert request.private is not second


# -- what is attended --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [1, LIMIT, LIMIT + 1, 500])
def test_in_a_dense_layer_all_own_tokens_are_attended_once(serving: Any, own: int) -> None:
    run = serving(["dense", "anchor", "anchor"], top_k=16)
    plan = run.plan(one=own, other=37)
    q = queries(2)
    assert len(plan.private) == (own > LIMIT)
    out = run.decode.run(q, run.kv, plan, 0, SCALE)
    for row, count in enumerate((own, 37)):
        wanted = run.dense(q, row, torch.arange(PREFIX + count))
        torch.testing.assert_close(out[row : row + 1].double(), wanted, atol=2e-5, rtol=0)


def test_the_best_of_its_own_tokens_are_attended_and_the_others_are_not(serving: Any) -> None:
    run = serving(top_k=24)
    plan = run.plan(one=500)
    q = queries(1)
    out = run.decode.run(q, run.kv, plan, 1, SCALE)
    covered = plan.private[0].prefix_len
    picked = {"prefix": plan.groups[0].selections[1], "own": plan.private[0].selections[1]}
    keys = run.kv.keys(run.table[ROWS[0], PREFIX : PREFIX + covered].long(), torch.float32)
    wanted = make_selector(SPEC).select(
        index_behind(run.index.layers[1], keys), q, prefix_len=covered, budget=24, num_sink=0, num_recent=0,
        sm_scale=SCALE, pooling=Pooling.MAX,
    )  # fmt: skip
    assert torch.equal(picked["own"].positions, wanted.positions)
    for head in range(KV_HEADS):
        positions = [
            picked["prefix"].positions[head].long(),
            picked["own"].positions[head].long() + PREFIX,
            torch.arange(PREFIX + covered, PREFIX + 500),
        ]
        slots = run.table[ROWS[0], torch.cat(positions)].long()
        heads = slice(head * GQA, (head + 1) * GQA)
        k, v = (cache[slots][:, head : head + 1] for cache in (run.kv.k_cache, run.kv.v_cache))
        expected = dense_attention(q[:, heads], k, v, SCALE).out
        torch.testing.assert_close(out[:, heads].double(), expected, atol=2e-5, rtol=0)


def test_a_token_that_a_query_looks_for_is_found_wherever_it_lies(serving: Any) -> None:
    run = serving(top_k=8)
    own, q = 700, queries(1)
    for place in (0, 17, 311, 600):
        slot = int(run.table[ROWS[0], PREFIX + place])
        kept = run.kv.k_cache[slot].clone()
        run.kv.k_cache[slot] = 8 * q[0].view(KV_HEADS, GQA, DIM).mean(1)
        run.requests.clear()
        plan = run.plan(one=own)
        run.decode.run(q, run.kv, plan, 0, SCALE)
        selected: Selection = plan.private[0].selections[0]
        assert all(place in row.tolist() for row in selected.positions)
        run.kv.k_cache[slot] = kept


def test_the_layer_plan_holds_for_own_tokens_too(serving: Any) -> None:
    run = serving(["dense", "anchor", {"reuse": 1, "head_map": [1, 0]}], top_k=16)
    plan = run.plan(one=400)
    q, own = queries(1), plan.private[0]
    for layer in range(LAYERS):
        run.decode.run(q, run.kv, plan, layer, SCALE)
    assert list(own.selections) == [1]
    assert [bool(arrays) for arrays in own.index.layers] == [False, True, False], "made where a layer selects"
    reused = run.decode.select(q, own, KV_HEADS, 2, SCALE)
    assert torch.equal(reused.positions, own.selections[1].positions[[1, 0]])
    kept = [own.prefix_len, 16, 16]
    assert run.counters.snapshot()["private_keep_ratio"] == pytest.approx(sum(kept) / (3 * own.prefix_len))
    assert run.counters.snapshot()["prefix_tokens_per_layer"] == [PREFIX] * LAYERS, "counted apart"


def test_arrays_are_made_once_until_it_grows(serving: Any) -> None:
    run = serving(top_k=16)
    made = []
    for count in range(300, 380):
        plan = run.plan(one=count)
        run.decode.run(queries(1), run.kv, plan, 2, SCALE)
        made.append(plan.private[0].index.layers[2]["keys_packed"])
    assert 2 <= len({id(one) for one in made}) <= 4


def test_each_layer_has_the_channels_of_its_own_prefix_and_keys_as_the_model_made_them(serving: Any) -> None:
    run = serving(top_k=16)
    run.kv = PagedKV(run.kv.k_cache, run.kv.v_cache, 4.0, 1.0)
    plan = run.plan(one=300)
    own = plan.private[0]
    for layer in range(LAYERS):
        run.decode.run(queries(1), run.kv, plan, layer, SCALE)
        keys = 4.0 * run.kv.k_cache[own.slots]
        wanted = index_behind(run.index.layers[layer], keys)
        assert torch.equal(own.index.layers[layer]["channels"], run.index.layers[layer]["channels"])
        assert all(torch.equal(array, wanted[name]) for name, array in own.index.layers[layer].items())
    channels = [run.index.layers[layer]["channels"] for layer in range(LAYERS)]
    assert not torch.equal(channels[0], channels[1])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_arrays_have_the_channels_and_bits_of_the_prefix(bits: int) -> None:
    spec = TokenIndexSpec(num_channels=8, bits=bits)
    gen = torch.Generator().manual_seed(1)
    keys, more = torch.randn(40, KV_HEADS, DIM, generator=gen), torch.randn(48, KV_HEADS, DIM, generator=gen)
    arrays = METHODS["token_index"].builder(spec).build_layer(keys, torch.randn(KV_HEADS, 9, DIM, generator=gen))
    behind = index_behind(arrays, more)
    assert torch.equal(behind["channels"], arrays["channels"])
    assert {name: one.dtype for name, one in behind.items()} == {name: one.dtype for name, one in arrays.items()}
    assert behind["keys_packed"].shape == (KV_HEADS, 48, 8 * bits // 8)
    kept = more.transpose(0, 1).gather(2, behind["channels"].long()[:, None].expand(-1, 48, -1))
    quantized = LowBitTensor(*(behind[f"keys_{name}"] for name in LowBitTensor._fields))
    assert bool(((dequantize(quantized) - kept).abs() <= quantized.scale[:, None] / 2 + 1e-5).all())
    assert torch.equal(quantized.zero, kept.amin(1)), "levels lie between each channel's own bounds"
    with pytest.raises(ValueError, match="expected arrays"):
        index_behind({"tables": keys}, more)


def test_a_server_goes_by_the_setting(make_bench: Callable[..., Any]) -> None:
    fields = {"layer_plan": ["anchor"] * LAYERS, "prefetch_policy": "wait_complete", "top_k": 16}
    bench = make_bench(method="token_index", private_dense_tokens=32, **fields)
    bench.put(PROMPT)
    runtime = Runtime(Settings(config=bench.config, store=str(bench.store.folder)), Model(bench.model))
    request, covered = Request(), []
    runtime.admit(request, "a", [*PROMPT, 1], NAMESPACE)
    for own in (32, 48, 49, 55):
        plan = runtime._plan(_decode_batch(runtime, ["a"], [len(PROMPT) + own]))
        assert plan is not None
        covered.append([group.prefix_len for group in plan.private])
    assert covered == [[], [32], [32], [32]]
    attachment = runtime.requests.of(request)
    assert attachment is not None
    assert attachment.private is not None
    runtime.slot_freed(request, 0, finished=False)
    assert attachment.private is None
    runtime.close()


# -- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"private_dense_tokens": 31}, ["private_dense_tokens", "32 or more tokens, or null"]),
        ({"private_dense_tokens": 64, "method": "csattention"}, ["other than token_index", "csattention"]),
        ({"private_dense_tokens": 64, "trace_folder": "somewhere"}, ["trace_folder", "from prefixes only"]),
    ],
)
def test_settings_that_it_cannot_have_are_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(fields)
    assert all(word in str(caught.value) for word in words), caught.value


def test_own_tokens_of_a_row_in_no_group_are_attended_in_full() -> None:
    """Selected from, too, such a row would attend its prefix twice: once by itself and once in front of them."""
    numbers: dict[int, int] = {}
    step: Any = StepGroups(SimpleNamespace(), lambda index: numbers.setdefault(id(index), len(numbers)))  # type: ignore[arg-type]
    own = [SimpleNamespace(prefix_len=length) for length in (96, 64, 32)]
    groups = [(PrefixRows((7,), (0, 2), 300), SimpleNamespace(prefix_len=300))]
    found = step.stretches(groups, [own[0], own[1], own[2], None])
    assert [(rows.rows, rows.length, rows.begin) for rows, _ in found] == [((0,), 96, 300), ((2,), 32, 300)]
    assert [index for _, index in found] == [own[0], own[2]]
    assert step.stretches([], own) == []
