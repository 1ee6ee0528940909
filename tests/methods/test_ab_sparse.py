"""AB-Sparse: block sizes per head, ragged arrays, balls, budgets in tokens; against loops over blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_kernels.low_bit import LowBitTensor, dequantize
from prefix_kernels.pooling import Pooling
from sglang_ext.methods import make_builder, make_selector, parse_spec
from sglang_ext.methods.arrays import join_heads, split_heads
from sglang_ext.methods.base import LayerProfile
from tests.examples import examples
from tests.methods.common import randn, scores, select

FORMS = ("mean", "minmax", "ball")


def profiled(**parameters):
    return parse_spec({"method": "ab_sparse", "sizes": "profile", **parameters})


@settings(max_examples=examples(60))
@given(
    st.lists(st.sampled_from([16, 32, 64]), min_size=1, max_size=4),
    st.integers(1, 700),
    st.integers(6, 300),
    st.sampled_from(FORMS),
    st.sampled_from(["int4", "none"]),
    st.sampled_from(list(Pooling)),
)
def test_each_head_selects_as_alone_with_its_block_size(sizes, prefix_len, budget, form, bits, pooling):
    """Against the uniform index of each head's size, head by head."""
    heads = len(sizes)
    keys, q = randn(prefix_len, heads, 8), randn(2, 2 * heads, 8, seed=1)
    spec = profiled(representation=form, quantization=bits)
    arrays = make_builder(spec, LayerProfile(block_sizes=tuple(sizes))).build_layer(keys, None)
    got = select(spec, arrays, q, prefix_len, budget, num_recent=3, pooling=pooling)
    for head, size in enumerate(sizes):
        alone = parse_spec({"method": "ab_sparse", "block_size": size, "representation": form, "quantization": bits})
        own = make_builder(alone).build_layer(keys[:, head : head + 1], None)
        expected = select(alone, own, q[:, 2 * head : 2 * head + 2], prefix_len, budget, num_recent=3, pooling=pooling)
        assert torch.equal(got.positions[head], expected.positions[0])


@pytest.mark.parametrize("form", FORMS)
def test_heads_are_cut_and_joined(form):
    keys, q = randn(333, 3, 8), randn(2, 6, 8, seed=1)
    spec = profiled(representation=form)
    arrays = make_builder(spec, LayerProfile(block_sizes=(64, 16, 32))).build_layer(keys, None)
    pieces = split_heads(arrays)
    for name, array in join_heads(pieces).items():
        assert torch.equal(array, arrays[name])
    whole = select(spec, arrays, q, 333, 60)
    for order in ([0], [2], [2, 0], [1, 2]):
        part = select(spec, join_heads([pieces[h] for h in order]), q.view(2, 3, 2, 8)[:, order].flatten(1, 2), 333, 60)
        assert torch.equal(part.positions, whole.positions[order])


@pytest.mark.parametrize("bits", ["int2", "int4", "int8", "none"])
@pytest.mark.parametrize("prefix_len", [1, 40, 64, 101])
def test_balls_hold_their_keys(prefix_len, bits):
    """Also around a quantized center: the score bounds q.k from above."""
    keys, q = 3 * randn(prefix_len, 2, 8), randn(2, 4, 8, seed=1)
    spec = parse_spec({"method": "ab_sparse", "block_size": 32, "representation": "ball", "quantization": bits})
    arrays = make_builder(spec).build_layer(keys, None)
    selector = make_selector(spec)
    raw, _ = selector._blocks(arrays, q, prefix_len)
    centers = selector._read(arrays, "center")
    for head in range(2):
        true = torch.einsum("rgd,nd->rgn", q.view(2, 2, 2, 8)[:, head], keys[:, head])
        for block in range(-(-prefix_len // 32)):
            own = slice(block * 32, block * 32 + 32)
            distance = (keys[own, head] - centers[head, block]).norm(dim=1).amax()
            radius = arrays["radius"][head, block].float()
            assert distance <= radius <= 1.002 * distance + 1e-6
            assert bool((raw[head, ..., block] >= true[..., own].amax(-1) - 1e-4).all())


def test_candidates_share_the_softmax():
    spec, allowed = profiled(), randn(2, 101, seed=5) > 0
    arrays = make_builder(spec, LayerProfile(block_sizes=(32, 16))).build_layer(randn(101, 2, 8), None)
    some = scores(spec, arrays, randn(2, 4, 8, seed=1), 101, allowed, pooling=Pooling.MEAN)
    assert torch.equal(some > -torch.inf, allowed)
    torch.testing.assert_close(some.exp().sum(1), torch.ones(2))


@pytest.mark.parametrize("sizes", [(16, 16), (64, 32)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", ["int4", "none"])
@pytest.mark.parametrize("kept", [6, 16])
def test_blocks_by_loop(kept, bits, form, sizes):
    """On all channels, or each head on its own: those with the greatest max |q_i| * max |k_i|, as a bound on keys."""
    keys, samples, q = randn(101, 2, 16) * randn(2, 16, seed=3), randn(2, 50, 16, seed=1), randn(3, 4, 16, seed=2)
    spec = profiled(representation=form, quantization=bits, num_channels=kept % 16)
    arrays = make_builder(spec, LayerProfile(block_sizes=sizes)).build_layer(keys, samples)
    assert ("channels" in arrays) == (kept < 16)
    got = scores(spec, arrays, q, 101)
    for head, size in enumerate(sizes):
        share = [(float(samples[head, :, c].abs().max() * keys[:, head, c].abs().max()), c) for c in range(16)]
        channels = sorted(c for _, c in sorted(share)[-kept:])
        assert kept == 16 or arrays["channels"][head].tolist() == channels
        own = slice(int(arrays["row_indptr"][head]), int(arrays["row_indptr"][head + 1]))

        def stored(part, head=head, own=own):
            if bits == "none":
                return arrays[f"ragged_{part}"][own].float()
            scale, zero = (arrays[f"{part}_{name}"][head] for name in ("scale", "zero"))
            return dequantize(LowBitTensor(arrays[f"ragged_{part}_packed"][own], scale, zero))

        rows = q[:, 2 * head : 2 * head + 2, channels].flatten(0, 1)
        blocks = [keys[i : i + size, head][:, channels] for i in range(0, 101, size)]
        if form == "minmax":
            raw = torch.maximum(rows[:, None] * stored("min"), rows[:, None] * stored("max")).sum(-1)
            wanted = [block.amin(0) for block in blocks], stored("min")
        else:
            center = stored("mean" if form == "mean" else "center")
            raw, wanted = rows @ center.T, ([block.mean(0) for block in blocks], center)
        if form == "ball":
            radius = arrays["ragged_radius"][own].float()
            raw = raw + rows.norm(dim=1, keepdim=True) * radius
            furthest = [(block - center[i]).norm(dim=1).amax() for i, block in enumerate(blocks)]
            torch.testing.assert_close(radius, torch.stack(furthest), rtol=3e-3, atol=1e-6)
        torch.testing.assert_close(torch.stack(wanted[0]), wanted[1], rtol=0, atol=0.02 if bits == "none" else 0.3)
        expected = (raw * 0.3).log_softmax(1).amax(0).repeat_interleave(size)[:101]
        torch.testing.assert_close(got[head], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["ab_sparse", "token_index"])
def test_channels_of_the_profile(method):
    """Of all channels none is named, or each; another number than the profile's is refused."""
    spec, channels = parse_spec({"method": method, "num_channels": 4}), ((0, 1, 5, 15), (2, 3, 4, 6))
    layer, keys = LayerProfile(channels=channels), randn(70, 2, 16)
    builder = make_builder(spec, layer)
    assert not builder.needs_queries(16)
    assert spec.profile_part([layer]) == {"channels": [[list(head) for head in channels]]}
    assert builder.build_layer(keys, None)["channels"].tolist() == [list(head) for head in channels]
    whole = make_builder(parse_spec({"method": method, "channel_ratio": 1.0}), layer).build_layer(keys, None)
    assert method == "ab_sparse" or whole["channels"].tolist() == [list(range(16))] * 2
    assert ("channels" in whole) == (method == "token_index")
    with pytest.raises(ValueError, match=rf"{method}.num_channels of 4, as many as the profile has, got 6"):
        parse_spec({"method": method, "num_channels": 6}).profile_part([layer])


def test_all_channels_or_128_of_wide_keys():
    """Of wide keys a second level has the same channels."""
    spec = parse_spec({"method": "ab_sparse"})
    assert [spec.kept_channels(dim) for dim in (64, 128, 256, 576)] == [64, 128, 256, 128]
    assert [spec.selects_channels(dim) for dim in (64, 128, 256, 576)] == [False, False, False, True]
    assert [make_builder(spec).needs_queries(dim) for dim in (64, 256, 576)] == [False, False, True]
    assert "channels" not in make_builder(spec).build_layer(randn(40, 1, 256), None)
    keys, samples = randn(40, 1, 576), randn(1, 50, 576, seed=1)
    arrays = make_builder(parse_spec({"method": "two_level"})).build_layer(keys, samples)
    assert arrays["first.channels"].shape == (1, 128)
    assert torch.equal(arrays["first.channels"], arrays["second.channels"])
    assert arrays["first.mean_packed"].shape == (1, 3, 64)
    whole = make_builder(parse_spec({"method": "ab_sparse", "num_channels": 576})).build_layer(keys, samples)
    assert whole["channels"].tolist() == [list(range(576))]


def test_more_channels_than_keys_have_are_refused():
    builder = make_builder(parse_spec({"method": "ab_sparse", "num_channels": 16}))
    with pytest.raises(ValueError, match="at most head_dim=8, got 16"):
        builder.build_layer(randn(9, 1, 8), randn(1, 9, 8, seed=1))
