"""Channel sets: the statistic against plain loops, the choice by hand, what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.calibration.channels import channel_contribution, channel_maxima, top_channels
from tests.calibration.captures import make_layers
from tests.examples import examples


def over_pairs(layers):
    """Greatest |q_i k_i| of all pairs of a query and a key, mean over the group: [layer, head, channel]."""
    out = []
    for queries, keys, _ in layers:
        pairs = (queries[:, None] * keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)[None]).abs()
        out.append(pairs.double().amax(dim=(0, 1)).unflatten(0, (keys.shape[1], -1)).mean(dim=1))
    return torch.stack(out)


@settings(max_examples=examples(25))
@given(
    num_tokens=st.integers(1, 5),
    prefix_len=st.integers(1, 7),
    kv_heads=st.integers(1, 3),
    gqa=st.integers(1, 3),
    seed=st.integers(0, 1 << 20),
)
def test_contribution_against_all_pairs(seed, **sizes):
    layers = make_layers(2, **sizes, seed=seed)
    found = channel_contribution(*channel_maxima(iter(layers)))
    np.testing.assert_allclose(found.numpy(), over_pairs(layers).numpy(), rtol=1e-6)


def test_top_channels_by_hand():
    chosen = top_channels(torch.tensor([[3.0, 1.0, 9.0, 3.0], [0.0, 0.0, 0.0, 1.0]]), 2)
    assert chosen.dtype == torch.int16
    assert chosen.tolist() == [[0, 2], [0, 3]]


@pytest.mark.parametrize(
    ("contribution", "count", "message"),
    [
        (torch.ones(2, 6), 7, r"expected num_channels in 1\.\.6 \(head_dim\), got 7"),
        (torch.ones(2, 6), 0, "got 0"),
        (torch.full((2, 6), torch.nan), 2, "expected finite contributions"),
    ],
)
def test_what_is_refused(contribution, count, message):
    with pytest.raises(ValueError, match=message):
        top_channels(contribution, count)
