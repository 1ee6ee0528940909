"""What a builder makes passes the check of its spec, whatever the prefix's length; what it never makes does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefix_kernels.csa_scores import CompactLists, check_entries, encode_lists
from sglang_ext.methods import make_builder, parse_spec
from sglang_ext.methods.arrays import ContentError, Form, IndexSize, check_forms, check_layer, join_heads, split_heads
from sglang_ext.methods.base import LayerProfile
from tests.methods.test_methods import SPECS

RAGGED = [
    {"method": "ab_sparse", "sizes": "profile", "representation": "ball", "quantization": "none", "num_channels": 6},
    {"method": "union", "first": {"method": "ab_sparse", "sizes": "profile"}},
]


def built(data: dict[str, Any], prefix_len: int) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    gen = torch.Generator().manual_seed(prefix_len)
    keys, queries = torch.randn(prefix_len, 2, 16, generator=gen), torch.randn(2, 50, 16, generator=gen)
    spec = parse_spec(data)
    return spec, split_heads(make_builder(spec, LayerProfile(block_sizes=(16, 64))).build_layer(keys, queries))


def check(spec: Any, heads: list[dict[str, torch.Tensor]], prefix_len: int) -> None:
    size = IndexSize(prefix_len, 16)
    for pieces in heads:
        found = {name: (piece.numpy().dtype.name, tuple(piece.shape)) for name, piece in pieces.items()}
        check_forms(spec.forms(size), found, "layer 3, KV head 1")
    check_layer(spec, join_heads(heads), size, "layer 3")


@pytest.mark.parametrize("prefix_len", [1, 2, 16, 17, 255, 256, 257, 1025])
@pytest.mark.parametrize("data", [*SPECS, *RAGGED], ids=str)
def test_what_is_built_is_accepted(data: dict[str, Any], prefix_len: int) -> None:
    spec, heads = built(data, prefix_len)
    check(spec, heads, prefix_len)


@pytest.mark.parametrize("data", [*SPECS, *RAGGED], ids=str)
def test_an_index_of_another_length_is_refused(data: dict[str, Any]) -> None:
    spec, heads = built(data, 257)
    with pytest.raises(ContentError, match=r"layer 3.*: expected .*, got .*; build the index again"):
        check(spec, heads, 1025)


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("token_index", "channels", -1),
        ("token_index", "channels", 16),
        ("token_index", "keys_scale", float("nan")),
        ("token_index", "keys_zero", 2e5),
        ("ab_sparse", "channels", -1),
        ("ab_sparse", "channels", 16),
        ("ab_sparse", "mean_scale", -1.0),
    ],
)
def test_values_out_of_their_range_are_refused(method: str, name: str, value: float) -> None:
    spec, heads = built({"method": method, "num_channels": 8}, 64)
    heads[1][name][-1] = value
    with pytest.raises(ContentError, match=rf"{name} of layer 3: expected values of .*, got .*{value:g}"):
        check(spec, heads, 64)


@pytest.mark.parametrize("method", ["token_index", "ab_sparse"])
def test_channels_that_do_not_ascend_are_refused(method: str) -> None:
    spec, heads = built({"method": method, "num_channels": 8}, 64)
    heads[1]["channels"][3:5] = heads[1]["channels"][4].clone()
    with pytest.raises(ContentError, match="channels of layer 3: expected ascending channels, got"):
        check(spec, heads, 64)


@pytest.mark.parametrize("list_len", [1, 2, 40, 300])
def test_lists_of_other_positions_are_refused(list_len: int) -> None:
    """Each way of being no list of ascending positions, in one list of many."""
    n = 600
    order = torch.rand(3, 2, n, generator=torch.Generator().manual_seed(list_len))
    positions = order.topk(list_len).indices.sort(dim=-1).values
    lists = encode_lists(positions, torch.rand(positions.shape), n, 4)
    check_entries(lists.places, lists.counts, list_len, n)
    for wrong in damaged(lists, list_len):
        with pytest.raises(ValueError, match=f"expected {list_len} ascending positions below 600"):
            check_entries(wrong.places, wrong.counts, list_len, n)


def damaged(lists: CompactLists, list_len: int) -> list[CompactLists]:
    found = []

    def one(field: str, at: Any, value: Any) -> None:
        part = getattr(lists, field).clone()
        part[1, 1][at] = value
        found.append(lists._replace(**{field: part}))

    counts = lists.counts[1, 1]
    for more in (1, -1):
        one("counts", 0, counts[0] + more)
    one("counts", slice(None), torch.tensor([0, 0, list_len]) if list_len > 88 else counts.flip(0) + 1)
    last = (lists.counts[..., -1] > 0).nonzero()
    if len(last):  # beyond the prefix: the last block has 88 positions
        head, row = last[0].tolist()
        places = lists.places.clone()
        places[head, row, -1] = 88
        found.append(lists._replace(places=places))
    if int(counts.max()) > 1:
        block = int(counts.argmax())
        first = int(counts[:block].sum())
        one("places", slice(first, first + 2), lists.places[1, 1, first : first + 2].flip(0))
        one("places", slice(first, first + 2), 7)
    return found


def test_names_forms_and_lengths_of_ragged_arrays_are_told() -> None:
    forms = {"ragged_a": Form("uint8", (None, 4)), "ragged_b": Form("float16", (None,))}
    good = {"ragged_a": ("uint8", (3, 4)), "ragged_b": ("float16", (3,))}
    check_forms(forms, good, "here")
    for found, message in (
        ({**good, "ragged_b": ("float16", (2,))}, r"rows of here: expected as many in all ragged arrays, got \[2, 3\]"),
        ({**good, "ragged_b": ("float16", (0,))}, r"ragged_b of here: expected float16 \[None\], got float16 \[0\]"),
        ({**good, "c": ("uint8", ())}, "arrays of here: expected ragged_a, ragged_b, got c, ragged_a, ragged_b"),
        ({}, "arrays of here: expected ragged_a, ragged_b, got none"),
    ):
        with pytest.raises(ContentError, match=message):
            check_forms(forms, found, "here")
