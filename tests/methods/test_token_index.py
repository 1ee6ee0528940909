"""The token index against scores of dequantized keys, and how many channels it keeps; which: `test_ab_sparse`."""

import pytest
import torch

from prefix_kernels.low_bit import LowBitTensor, dequantize
from sglang_ext.methods import make_builder, parse_spec
from tests.methods.common import randn, scores


def token_spec(**parameters):
    return parse_spec({"method": "token_index", **parameters})


@pytest.mark.parametrize("num_channels", [0, 8, 16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_scores_by_loop(bits, num_channels):
    spec = token_spec(bits=bits, num_channels=num_channels)
    keys, samples, q = randn(70, 2, 16), randn(2, 50, 16, seed=1), randn(3, 4, 16, seed=2)
    arrays = make_builder(spec).build_layer(keys, samples)
    got = scores(spec, arrays, q, 70)
    for head in range(2):
        parts = (arrays[f"keys_{name}"][head] for name in LowBitTensor._fields)
        stored = dequantize(LowBitTensor(*parts))
        channels = arrays["channels"][head].long()
        error = (stored - keys[:, head, channels]).abs()
        assert bool((error <= arrays["keys_scale"][head] / 2 + 1e-6).all())
        rows = [(stored @ q[row, 2 * head + g, channels] * 0.3).log_softmax(0) for row in range(3) for g in range(2)]
        torch.testing.assert_close(got[head], torch.stack(rows).amax(0), atol=1e-4, rtol=1e-4)


def test_candidates_share_the_softmax():
    spec = token_spec(channel_ratio=1.0)
    keys, q = randn(70, 2, 16), randn(3, 4, 16, seed=2)
    arrays = make_builder(spec).build_layer(keys, None)
    allowed = randn(2, 70, seed=4) > 0
    got = scores(spec, arrays, q, 70, allowed)
    assert torch.equal(got > -torch.inf, allowed)
    for head in range(2):
        kept = {n: a[head : head + 1] for n, a in arrays.items()}
        kept["keys_packed"] = kept["keys_packed"][:, allowed[head]]
        expected = scores(spec, kept, q[:, 2 * head : 2 * head + 2], int(allowed[head].sum()))
        torch.testing.assert_close(got[head, allowed[head]], expected[0])


@pytest.mark.parametrize(
    ("ratio", "bits", "head_dim", "kept"),
    [(0.75, 4, 64, 48), (0.75, 4, 128, 96), (0.5, 4, 18, 10), (0.01, 2, 64, 4), (1.0, 4, 64, 64), (0.3, 8, 10, 3)],
)
def test_channels_as_a_part_of_the_head(ratio, bits, head_dim, kept):
    spec = token_spec(channel_ratio=ratio, bits=bits)
    keys, samples = randn(40, 2, head_dim), randn(2, 50, head_dim, seed=1)
    builder = make_builder(spec)
    assert builder.needs_queries(head_dim) == (ratio < 1)
    arrays = builder.build_layer(keys, samples)
    assert arrays["channels"].shape == (2, kept)
    same = make_builder(token_spec(num_channels=kept, bits=bits)).build_layer(keys, samples)
    assert all(torch.equal(arrays[name], same[name]) for name in same)


@pytest.mark.parametrize(("head_dim", "ratio", "bits"), [(65, 0.99, 4), (66, 0.99, 2), (65, 1.0, 4)])
def test_channels_that_fill_no_bytes_are_refused(head_dim, ratio, bits):
    builder = make_builder(token_spec(channel_ratio=ratio, bits=bits))
    with pytest.raises(ValueError, match=rf"head_dim to be a multiple of {8 // bits} for {bits} bits, got {head_dim}"):
        builder.build_layer(randn(20, 2, head_dim), randn(2, 9, head_dim, seed=1))


def test_the_default_keeps_half_of_the_channels_but_no_more_than_128():
    assert token_spec() == token_spec(channel_ratio=0.5)
    assert [token_spec().kept_channels(dim) for dim in (64, 80, 128, 256, 576)] == [32, 40, 64, 128, 128]
    assert token_spec(channel_ratio=0.75).kept_channels(576) == 432
    # Where the number is given, the part does not count: neither the default nor that of all channels.
    for named in ({}, {"channel_ratio": 0.5}, {"channel_ratio": 1.0}):
        assert token_spec(num_channels=48, **named).kept_channels(64) == 48
