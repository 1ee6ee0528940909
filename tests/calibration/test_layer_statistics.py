"""Recall, sparsity, recovery and channels against plain loops in fp64 and against serving's own selection."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.calibration import prompt_capture
from sglang_ext.calibration.channels import channel_contribution, channel_maxima, top_channels
from sglang_ext.calibration.layer_statistics import (
    MeasureSetting,
    best_recall,
    keys_for_mass,
    recall_by_block_size,
    reuse_recovery,
)
from sglang_ext.methods.ab_sparse import BLOCK_SIZES
from tests.calibration.captures import attention, make_layers, softmax
from tests.examples import examples

SM_SCALE = 0.5


def budget_of(keep_ratio, num_sink=0, num_recent=0, min_top_k=0):
    return MeasureSetting(keep_ratio=keep_ratio, num_sink=num_sink, num_recent=num_recent, min_top_k=min_top_k)


def recalls(layer, setting, sm_scale=SM_SCALE):
    """Of blocks [size, head, token], and of the best tokens [head, token]."""
    best = best_recall(layer, sm_scale, setting)[0]
    return recall_by_block_size(layer, sm_scale, setting), best


def recall_by_loops(layer, setting, size):
    """Recall [kv_head, token] of one block size; 0 stands for the best tokens. Everything in loops and fp64."""
    q, k = layer.queries.double().numpy(), layer.keys.double().numpy()
    gqa = q.shape[1] // k.shape[1]
    masses = attention(layer, SM_SCALE)
    out = np.zeros((k.shape[1], len(q)))
    for head, token in np.ndindex(out.shape):
        mass = masses[head][token]
        seen = len(mass)
        budget = min(max(1, int(setting.keep_ratio * seen), setting.min_top_k), seen)
        taken = {n for n in range(seen) if n < setting.num_sink or n >= seen - setting.num_recent}
        if size == 0:
            order = np.argsort(-mass).tolist()
        else:
            starts = range(0, seen, size)
            rows = q[token, head * gqa : (head + 1) * gqa]
            bounds = [np.max([rows * f(k[s : s + size, head], axis=0) for f in (np.min, np.max)], 0) for s in starts]
            weights = softmax(np.stack(bounds).sum(axis=2).T * SM_SCALE)
            order = [
                n for block in np.argsort(-weights.max(axis=0)) for n in range(starts[block], starts[block] + size)
            ]
        for n in order:
            if len(taken) < budget and n < seen:
                taken.add(n)
        out[head, token] = mass[sorted(taken)].sum()
    return out


@settings(max_examples=examples(40))
@given(
    num_tokens=st.integers(1, 4),
    prefix_len=st.integers(1, 150),
    gqa=st.integers(1, 3),
    keep_ratio=st.sampled_from([0.01, 0.1, 0.35, 1.0]),
    num_sink=st.integers(0, 3),
    num_recent=st.integers(0, 5),
    min_top_k=st.sampled_from([0, 40]),
    seed=st.integers(0, 1 << 20),
)
def test_recall_against_plain_loops(num_tokens, prefix_len, gqa, keep_ratio, num_sink, num_recent, min_top_k, seed):
    (layer,) = make_layers(1, num_tokens=num_tokens, prefix_len=prefix_len, gqa=gqa, seed=seed)
    setting = budget_of(keep_ratio, num_sink, num_recent, min_top_k)
    recall, best = recalls(layer, setting)
    for i, size in enumerate(BLOCK_SIZES):
        np.testing.assert_allclose(recall[i].numpy(), recall_by_loops(layer, setting, size), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(best.numpy(), recall_by_loops(layer, setting, 0), rtol=1e-5, atol=1e-6)
    assert bool((recall <= best + 1e-6).all())


@pytest.mark.parametrize(("prefix_len", "keep_ratio"), [(1000, 0.1), (100, 0.29)])
def test_uniform_attention_reaches_the_keep_ratio_rounded_as_in_serving(prefix_len, keep_ratio):
    """0.29 * 100 is 28.999999999999996 in fp64 and 29 in fp32."""
    (layer,) = make_layers(1, prefix_len=prefix_len, positions=torch.tensor([prefix_len]))
    recall, best = recalls(layer._replace(keys=torch.ones(prefix_len, 2, 8)), budget_of(keep_ratio), 1.0)
    for found in (recall, best):
        torch.testing.assert_close(found, torch.full_like(found, int(keep_ratio * prefix_len) / prefix_len))


@pytest.mark.parametrize("mass", [0.5, 0.95])
def test_sparsity_counts_the_fewest_keys(mass):
    (layer,) = make_layers(1)
    found = keys_for_mass(layer, SM_SCALE, mass)
    for head, tokens in enumerate(attention(layer, SM_SCALE)):
        for token, weight in enumerate(tokens):
            held = np.cumsum(np.sort(weight)[::-1])
            expected = int((held < mass).sum() + 1) / len(weight)
            assert float(found[head, token]) == pytest.approx(expected, abs=1.01 / len(weight))


def pairs_by_loops(layers, sm_scale, top_k):
    """Recovery, [a, b, h, g]."""
    mass = [attention(layer, sm_scale) for layer in layers]
    num_layers, heads, tokens = len(layers), layers[0].num_kv_heads, range(layers[0].num_tokens)
    mean = np.zeros((num_layers, num_layers, heads, heads))
    for a, b, h, g in np.ndindex(mean.shape):
        if a <= b:
            order = [np.argsort(-mass[a][g][t])[:top_k] for t in tokens]
            mean[a, b, h, g] = np.mean([mass[b][h][t][order[t]].sum() for t in tokens])
    return mean


@settings(max_examples=examples(30))
@given(
    num_layers=st.integers(1, 4),
    num_tokens=st.integers(1, 6),
    prefix_len=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    gqa=st.integers(1, 3),
    top_k=st.integers(1, 20),
    seed=st.integers(0, 1 << 20),
)
def test_recovery_against_plain_loops(num_layers, num_tokens, prefix_len, kv_heads, gqa, top_k, seed):
    sizes = {"num_tokens": num_tokens, "prefix_len": prefix_len, "kv_heads": kv_heads, "gqa": gqa}
    layers = make_layers(num_layers, **sizes, seed=seed)
    mean = pairs_by_loops(layers, 0.4, top_k)
    np.testing.assert_allclose(reuse_recovery(iter(layers), 0.4, top_k).numpy(), mean, rtol=2e-5, atol=1e-7)


def test_vanishing_probabilities_still_rank():
    """All mass on key 0; the ranks behind it come from the log, so equal layers stay alike."""
    (layer,) = make_layers(1, scale=300.0, positions=torch.full((5,), 99))
    kept = reuse_recovery([layer, layer], 1.0, 10)
    torch.testing.assert_close(kept[0, 1], kept[1, 1])
    flat = [layer._replace(keys=torch.ones_like(layer.keys))] * 2
    even = torch.full((2, 2), 4 / 50, dtype=torch.float64)
    torch.testing.assert_close(reuse_recovery(flat, 0.4, 4)[0, 1], even)


def test_chunks_change_nothing(monkeypatch):
    layers = make_layers(3, num_tokens=9)

    def everything():
        return (
            *recalls(layers[0], budget_of(0.2, 2, 2)),
            keys_for_mass(layers[0], SM_SCALE, 0.9),
            reuse_recovery(layers, SM_SCALE, 20),
        )

    whole = everything()
    for elements in (1, 1000):
        monkeypatch.setattr(prompt_capture, "ELEMENTS_PER_CHUNK", elements)
        # A product's last bit may depend on how many rows are multiplied at once.
        torch.testing.assert_close(everything(), whole, rtol=1e-6, atol=1e-6)


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
