"""Top-L lists by threshold against a stable sort."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.methods.csattention.lists import top_lists
from tests.examples import examples


def by_sort(scores, list_len):
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :list_len].sort(dim=-1).values
    return order.int(), scores.gather(-1, order)


@settings(max_examples=examples(200, 30))
@given(
    st.integers(1, 3000),
    st.floats(0, 1),
    st.sampled_from(
        ["normal", "few", "constant", "huge", "tiny", "zeros", "skew", "rising", "falling", "spikes", "half"]
    ),
    st.integers(0, 2**31),
)
def test_equals_a_stable_sort(n, ratio, kind, seed):
    scores = torch.randn(3, 2, n, generator=torch.Generator().manual_seed(seed))
    rising = torch.arange(n).float().expand(3, 2, n)
    scores = {
        "normal": scores,
        "few": (scores * 2).round(),
        "constant": torch.full_like(scores, -1.5),
        "huge": scores * 1e38,
        "tiny": scores * 1e-40,
        "zeros": torch.where(scores > 0, 0.0, -0.0),
        "skew": scores.exp() ** 5,
        "rising": rising,
        "falling": -rising,
        "spikes": torch.where(rising % 100 == 1, rising, 0.0),
        "half": scores.half(),
    }[kind]
    list_len = max(1, int(ratio * n))
    positions, best = top_lists(scores, list_len)
    expected, values = by_sort(scores, list_len)
    assert positions.dtype == torch.int32
    assert torch.equal(positions, expected)
    assert torch.equal(best, values)


def test_errors_and_a_transposed_input():
    scores = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)).T
    for list_len in (0, 501):
        with pytest.raises(ValueError, match=f"1\\.\\.500 .*got {list_len}"):
            top_lists(scores, list_len)
    got, want = top_lists(scores, 5), top_lists(scores.contiguous(), 5)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
