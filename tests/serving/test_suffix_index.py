"""A request's suffix tokens behind its prefix, selected from where there are many of them."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch

from prefix_kernels.low_bit import LowBitTensor, dequantize
from prefix_kernels.types import PagedKV
from sglang_ext.config import PAGE_TOKENS, config_from_dict
from sglang_ext.decode.grouping import StepGroups
from sglang_ext.decode.types import PrefixGroup
from sglang_ext.methods import METHODS
from sglang_ext.methods.token_index import TokenIndexSpec, index_behind
from sglang_ext.prefix.residency import ResidentIndex
from sglang_ext.prefix.suffix_index import SuffixIndex, SuffixRules
from tests.serving.admitting import DIM, KV_HEADS, LAYERS, PROMPT, planned

PREFIX, LIMIT = 64, 64


#: Of a stored index of PREFIX tokens, what decode asks for.
ENTRY: Any = SimpleNamespace(digest="one", identity=SimpleNamespace(num_tokens=PREFIX))


def prefix_index() -> ResidentIndex:
    """Each layer's has channels of its own."""
    gen = torch.Generator().manual_seed(4)
    index, builder = ResidentIndex(ENTRY), METHODS["token_index"].builder(TokenIndexSpec(channel_ratio=0.75, bits=8))
    keys = torch.randn(PREFIX, KV_HEADS, DIM, generator=gen)
    for _ in range(LAYERS):
        index.layers.append(builder.build_layer(keys, torch.randn(KV_HEADS, 3, DIM, generator=gen)))
    index.nbytes = PREFIX * 100  # a hundred bytes a token
    return index


def test_it_begins_beyond_the_limit_and_leaves_half_of_it_and_less_than_all_in_full() -> None:
    rules = SuffixRules(LIMIT, 1 << 30, lambda covered: covered // 10)
    prefix = ResidentIndex(ENTRY)
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
    assert rules.covering(own, ResidentIndex(ENTRY), LIMIT) is None, "it is of another prefix"


def covered(rules: SuffixRules, lens: list[int]) -> list[int]:
    """Tokens that indexes of so many suffix tokens cover, 0 where there is none."""
    found = rules.renew([None] * len(lens), [prefix_index()] * len(lens), [PREFIX + n for n in lens])
    return [0 if one is None else one.prefix_len for one in found]


def test_none_is_made_of_which_all_would_be_attended() -> None:
    rules = SuffixRules(LIMIT, 1 << 30, config_from_dict({"min_top_k": 128, "keep_ratio": 0.1}).budget)
    assert [covered(rules, [own]) for own in (100, 160, 161, 176, 190)] == [[0], [0], [0], [144], [144]]


def test_the_longest_have_one_as_far_as_bytes_go() -> None:
    lens, budget = [400, 900, 20, 640, 901], lambda covered: 16
    assert covered(SuffixRules(LIMIT, 1 << 30, budget), lens) == [368, 864, 0, 608, 864]
    assert covered(SuffixRules(LIMIT, 100 * (864 + 863), budget), lens) == [0, 864, 0, 0, 0]
    assert covered(SuffixRules(LIMIT, 100 * (864 + 864 + 607), budget), lens) == [0, 864, 0, 0, 864]


def test_each_layer_has_the_channels_of_its_own_prefix_and_keys_as_the_model_made_them() -> None:
    gen = torch.Generator().manual_seed(5)
    kv = PagedKV(*(torch.randn(512, KV_HEADS, DIM, generator=gen) for _ in "kv"), k_scale=4.0, v_scale=1.0)
    prefix, slots = prefix_index(), torch.randperm(512, generator=gen)[:256]
    own = SuffixIndex(prefix, len(slots))
    assert not own.is_complete
    own.complete([1, 2], lambda layer: kv, slots, torch.float32)
    assert own.is_complete
    for layer in (1, 2):
        wanted = index_behind(prefix.layers[layer], 4.0 * kv.k_cache[slots])
        assert torch.equal(own.layers[layer]["channels"], prefix.layers[layer]["channels"])
        assert all(torch.equal(array, wanted[name]) for name, array in own.layers[layer].items())
    assert not torch.equal(own.layers[1]["channels"], own.layers[2]["channels"])
    made = own.layers[2]
    own.complete([1, 2], lambda layer: kv, slots, torch.float32)
    assert own.layers[2] is made, "once"


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


def test_a_server_goes_by_the_setting(start: Any) -> None:
    runtime = start([PROMPT], method="token_index", suffix_dense_tokens=32, top_k=16)
    request, found = runtime.came("a"), []
    attachment = runtime.requests.of(request)
    for own in (32, 48, 49, 55):
        assert planned(runtime, ["a"], [len(PROMPT) + own])
        found.append(0 if attachment.suffix is None else attachment.suffix.prefix_len)
    assert found == [0, 32, 32, 32]
    assert runtime.snapshot()["suffix_keep_ratio"] == pytest.approx(16 / 32)
    runtime.slot_freed(request, 0, finished=False)
    assert attachment.suffix is None


def test_what_has_grown_goes_before_what_replaces_it_is_made(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory is promised for the indexes of one step, not of two."""
    runtime = start([PROMPT], method="token_index", suffix_dense_tokens=32, top_k=8)
    for number in range(2):
        runtime.came(str(number), [*PROMPT, number])
    made: WeakSet[SuffixIndex] = WeakSet()
    there: list[list[int]] = []
    complete = SuffixIndex.complete

    def noted(own: SuffixIndex, *args: Any) -> None:
        there.append(sorted(one.prefix_len for one in made if one.is_complete))
        made.add(own)
        complete(own, *args)

    monkeypatch.setattr(SuffixIndex, "complete", noted)
    for own in (40, 45, 50):
        assert planned(runtime, ["0", "1"], [len(PROMPT) + own] * 2)
    assert there == [[], [16], [], [32]]


def test_own_tokens_of_a_row_in_no_group_are_attended_in_full() -> None:
    """Selected from, too, such a row would attend its prefix twice: once by itself and once in front of them."""
    numbers: dict[int, int] = {}
    step: Any = StepGroups(SimpleNamespace(), lambda index: numbers.setdefault(id(index), len(numbers)))
    own = [SimpleNamespace(prefix_len=length) for length in (96, 64, 32)]
    groups = [(PrefixGroup((7,), (0, 2), 300), SimpleNamespace(prefix_len=300))]
    found = step.suffixes(groups, [own[0], own[1], own[2], None])
    assert [(rows.rows, rows.length, rows.begin) for rows, _ in found] == [((0,), 96, 300), ((2,), 32, 300)]
    assert [index for _, index in found] == [own[0], own[2]]
    assert step.suffixes([], own) == []
