"""Recall of block selection against plain loops and against serving's own selection; the accumulator."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_kernels.block_scores import block_scores_mean
from prefix_kernels.pooling import Pooling, pool_scores
from prefix_kernels.testing import attention_recall
from prefix_kernels.top_k_selection import top_k_selection
from sglang_ext.calibration import BlockRecallAccumulator, LayerCapture, capture, recall_by_block_size
from sglang_ext.calibration.block_recall import RecallSetting, mean_scorer, minmax_scorer
from sglang_ext.methods.ab_sparse import block_representation
from tests.examples import examples

SIZES = (2, 4, 8)
SM_SCALE = 0.5


def make_layer(*, num_tokens=4, prefix_len=50, kv_heads=2, gqa=2, dim=8, seed=0, positions=None):
    gen = torch.Generator().manual_seed(seed)
    if positions is None:
        positions = torch.randint(0, prefix_len + 5, (num_tokens,), generator=gen)
    return LayerCapture(
        2 * torch.randn(num_tokens, kv_heads * gqa, dim, generator=gen),
        torch.randn(prefix_len, kv_heads, dim, generator=gen),
        positions,
    )


def softmax(values):
    weight = np.exp(values - values.max())
    return weight / weight.sum()


def loops(layer, setting, size):
    """Recall [kv_head, token] of one block size; 0 stands for the oracle. Everything in loops and fp64."""
    q, k = layer.queries.double().numpy(), layer.keys.double().numpy()
    prefix_len, heads = k.shape[:2]
    gqa = q.shape[1] // heads
    out = np.zeros((heads, len(q)))
    for token, position in enumerate(layer.positions.tolist()):
        seen = min(position + 1, prefix_len)
        budget = max(1, int(setting.keep_ratio * seen))
        window = {n for n in range(seen) if n < setting.num_sink or n >= seen - setting.num_recent}
        for head in range(heads):
            rows = q[token, head * gqa : (head + 1) * gqa]
            mass = np.mean([softmax(SM_SCALE * (k[:seen, head] @ row)) for row in rows], axis=0)
            taken = set(window)
            if size == 0:
                order = np.argsort(-mass).tolist()
            else:
                starts = range(0, seen, size)
                means = [k[start : start + size, head].mean(axis=0) for start in starts]
                weights = np.array([softmax(SM_SCALE * np.array([mean @ row for mean in means])) for row in rows])
                pooled = weights.max(axis=0) if setting.pooling is Pooling.MAX else weights.mean(axis=0)
                order = [n for block in np.argsort(-pooled) for n in range(starts[block], starts[block] + size)]
            for n in order:
                if len(taken) < budget and n < seen:
                    taken.add(n)
            out[head, token] = mass[sorted(taken)].sum()
    return out


@settings(max_examples=examples(40))
@given(
    num_tokens=st.integers(1, 4),
    prefix_len=st.integers(1, 50),
    gqa=st.integers(1, 3),
    keep_ratio=st.sampled_from([0.01, 0.1, 0.35, 1.0]),
    num_sink=st.integers(0, 3),
    num_recent=st.integers(0, 5),
    pooling=st.sampled_from(Pooling),
    seed=st.integers(0, 1 << 20),
)
def test_against_plain_loops(num_tokens, prefix_len, gqa, keep_ratio, num_sink, num_recent, pooling, seed):
    layer = make_layer(num_tokens=num_tokens, prefix_len=prefix_len, gqa=gqa, seed=seed)
    setting = RecallSetting(keep_ratio, SIZES, num_sink, num_recent, pooling)
    recall, oracle = recall_by_block_size(layer, SM_SCALE, setting)
    for i, size in enumerate(SIZES):
        np.testing.assert_allclose(recall[i].numpy(), loops(layer, setting, size), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(oracle.numpy(), loops(layer, setting, 0), rtol=1e-5, atol=1e-6)
    assert bool((recall <= oracle + 1e-6).all())


def test_is_the_recall_of_servings_own_selection():
    layer = make_layer(num_tokens=1, prefix_len=77, positions=torch.tensor([80]))
    setting = RecallSetting(0.3, SIZES, num_sink=3, num_recent=5)
    recall, _ = recall_by_block_size(layer, SM_SCALE, setting)
    for i, size in enumerate(SIZES):
        (mean,) = block_representation(layer.keys, size, "mean")
        scores = pool_scores(block_scores_mean(layer.queries, mean), SM_SCALE, Pooling.MAX)
        selection = top_k_selection(scores, 23, 3, 5, size, 77)
        expected = attention_recall(layer.queries, layer.keys, selection, SM_SCALE).view(2, 2).mean(dim=1)
        torch.testing.assert_close(recall[i, :, 0], expected, rtol=1e-5, atol=1e-6)


def test_the_scorer_is_asked_once_per_size_and_used():
    layer = make_layer()
    asked = []

    def scorer(keys, size):
        asked.append(size)
        return minmax_scorer(keys, size)

    bound, _ = recall_by_block_size(layer, SM_SCALE, RecallSetting(0.2, SIZES), scorer)
    mean, _ = recall_by_block_size(layer, SM_SCALE, RecallSetting(0.2, SIZES), mean_scorer)
    assert asked == list(SIZES)
    assert not torch.equal(bound, mean)


def test_scattered_keys_need_small_blocks_and_clustered_ones_do_not():
    """Head 0: one critical key every 64; head 1: 16 critical keys in a row."""
    keys = torch.zeros(1024, 2, 4)
    keys[::64, 0, 0] = 12.0
    keys[512:576, 1, 0] = 12.0
    noise = torch.randn(keys.shape, generator=torch.Generator().manual_seed(0))
    layer = LayerCapture(torch.ones(1, 2, 4), keys + 1e-3 * noise, torch.tensor([2000]))
    setting = RecallSetting(0.25)
    recall, oracle = recall_by_block_size(layer, 1.0, setting)
    scattered, clustered = recall[:, 0, 0].tolist(), recall[:, 1, 0].tolist()
    assert clustered == pytest.approx([1.0, 1.0, 1.0], abs=1e-2)
    assert scattered[0] > 0.9
    assert scattered[0] > scattered[1] + 0.3
    assert scattered[1] > scattered[2] + 0.15
    assert oracle.min() > 0.95


def test_uniform_attention_reaches_the_keep_ratio():
    layer = make_layer(num_tokens=1, prefix_len=1000, positions=torch.tensor([1000]))
    recall, oracle = recall_by_block_size(layer._replace(keys=torch.ones(1000, 2, 8)), 1.0, RecallSetting(0.1))
    torch.testing.assert_close(recall, torch.full((3, 2, 1), 0.1, dtype=torch.float64))
    torch.testing.assert_close(oracle, torch.full((2, 1), 0.1, dtype=torch.float64))


def test_the_budget_is_rounded_as_in_serving():
    """0.29 * 100 is 28.999999999999996 in fp64 and 29 in fp32."""
    layer = make_layer(num_tokens=1, prefix_len=100, positions=torch.tensor([100]))
    recall, _ = recall_by_block_size(layer._replace(keys=torch.ones(100, 2, 8)), 1.0, RecallSetting(0.29))
    torch.testing.assert_close(recall, torch.full((3, 2, 1), int(0.29 * 100) / 100, dtype=torch.float64))


def test_chunks_change_nothing(monkeypatch):
    layer = make_layer(num_tokens=9)
    setting = RecallSetting(0.2, SIZES, 2, 2)
    whole = recall_by_block_size(layer, SM_SCALE, setting)
    monkeypatch.setattr(capture, "ELEMENTS_PER_CHUNK", 1)
    parts = recall_by_block_size(layer, SM_SCALE, setting)
    torch.testing.assert_close(parts.recall, whole.recall)
    torch.testing.assert_close(parts.oracle, whole.oracle)


def test_accumulator_means_resumes_and_keeps_failures_out():
    setting = RecallSetting(0.2, SIZES)
    prompts = [[make_layer(seed=10 * p + n, prefix_len=30 + p, num_tokens=2 + p) for n in range(2)] for p in range(3)]
    acc, resumed = BlockRecallAccumulator(2, 2, setting), BlockRecallAccumulator(2, 2, setting)
    acc.add_prompt(iter(prompts[0]), SM_SCALE)
    resumed.load_state_dict(acc.state_dict())
    with pytest.raises(ValueError, match="expected 2 layers of a prompt, got 1"):
        resumed.add_prompt(prompts[1][:1], SM_SCALE)
    with pytest.raises(ValueError, match="layer 1: expected keys of 2 KV heads, got 1"):
        resumed.add_prompt([prompts[1][0], make_layer(kv_heads=1)], SM_SCALE)
    assert resumed.num_prompts == 1
    for prompt in prompts[1:]:
        resumed.add_prompt(prompt, SM_SCALE)
    single = [[recall_by_block_size(layer, SM_SCALE, setting) for layer in prompt] for prompt in prompts]
    for layer in range(2):
        recall = torch.stack([results[layer].recall.mean(dim=2).T for results in single]).mean(dim=0)
        oracle = torch.stack([results[layer].oracle.mean(dim=1) for results in single]).mean(dim=0)
        torch.testing.assert_close(resumed.recall()[layer], recall)
        torch.testing.assert_close(resumed.oracle_recall()[layer], oracle)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: RecallSetting(0.0), "expected keep_ratio above 0"),
        (lambda: RecallSetting(0.1, (16, 16)), "expected ascending block sizes"),
        (lambda: RecallSetting(0.1, ()), "expected ascending block sizes"),
        (lambda: RecallSetting(0.1, num_sink=-1), "expected windows of 0 or more tokens"),
        (lambda: BlockRecallAccumulator(0, 1, RecallSetting(0.1)), "expected num_layers and num_kv_heads >= 1"),
        (lambda: BlockRecallAccumulator(1, 1, RecallSetting(0.1)).recall(), "expected at least one prompt"),
        (lambda: BlockRecallAccumulator(1, 1, RecallSetting(0.1)).oracle_recall(), "expected at least one prompt"),
        (
            lambda: BlockRecallAccumulator(1, 1, RecallSetting(0.1)).load_state_dict(
                BlockRecallAccumulator(1, 1, RecallSetting(0.2)).state_dict()
            ),
            "expected keep_ratio=0.1 in the saved state, got 0.2",
        ),
        (
            lambda: recall_by_block_size(
                make_layer()._replace(positions=torch.full((4,), -1)), SM_SCALE, RecallSetting(0.1)
            ),
            "expected positions >= 0",
        ),
    ],
)
def test_what_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run()
